"""Random chains of operators as one compiled function: DTensors do there what plain tensors do, or it is refused by name.

A chain is played on plain tensors first, which writes the source of a function. What is not for one graph of plain
tensors is left out: operators that draw, and those whose lengths follow from values.
"""

import contextlib
import random
import warnings

import torch
import torch.nn.functional as F  # for the chains

from tests.tensor.proving.chains import doubles, drawn, drawn_placements, tame
from tests.tensor.proving.tables import IN_PLACE, OPERATORS, lines

_NOT_IN_GRAPHS = (
    "rand_like", "randint_like", "dropout", "gumbel", "rrelu", "uniform_", "normal_", "normal(", "random_", "exponential_",
    "cauchy_", "geometric_", "bernoulli", "multinomial", "poisson(", "orthogonal_",
    "item()", "nonzero", "argwhere", "torch.where(x > 0)[0]", "bincount", "repeat_interleave((y", "unique", "x[x > 0]",
    "x[y > 0]", "set_(", "resize_as_", "searchsorted", "bucketize",
)  # fmt: skip
_ROOM = {"torch": torch, "F": F}


def _lines(table):
    return [line for line in lines(table) if not any(name in line for name in _NOT_IN_GRAPHS)]


class Program:
    """The source of a function of two tensors, and of what brings a tensor to other placements, with two tensors.

    Raises:
        RuntimeError: plain tensors have come to an end of their own.
    """

    def __init__(self, seed, steps):
        self.chance = random.Random(seed)
        self.values = [self._drawn(seed) for _ in range(2)]
        self.needs = [self.chance.random() < 0.7 for _ in self.values]
        self.body, self.tensors = [], self.leaves()
        if self.chance.random() < 0.6:  # so that writes are allowed
            for k in range(2):
                self._append(f"t{k}.clone()", self.tensors[k].clone())
        for _ in range(20 * steps):
            if len(self.body) < steps:
                self._step()
        results = "".join(f"t{k}, " for k in range(2, len(self.tensors)))
        lines = [f"    {line}\n" for step in self.body for line in step]
        self.source = f"def chain(t0, t1, move):\n{''.join(lines)}    return ({results})\n"
        exec(compile(self.source, f"<chain {seed}>", "exec"), room := dict(_ROOM))
        self.function = room["chain"]

    def leaves(self):
        return [v.clone().requires_grad_(needs) for v, needs in zip(self.values, self.needs, strict=True)]

    def _drawn(self, seed):
        shape = [self.chance.choice([1, 2, 3, 4, 5, 7, 8]) for _ in range(self.chance.choice([1, 2, 2, 2, 3]))]
        seed, dtypes = seed + self.chance.randrange(1000), [*[torch.float32] * 5, torch.float64, torch.complex64]
        return drawn(shape, self.chance.choice(dtypes), seed)

    def _append(self, text, made, *before):
        self.body.append([*before, f"t{len(self.tensors)} = {text}"])
        self.tensors.append(made)

    def _step(self):
        chance, tensors = self.chance, self.tensors
        at = chance.choice([chance.randrange(len(tensors)), len(tensors) - 1])
        alike = [k for k, t in enumerate(tensors) if t.shape == tensors[at].shape]
        other = chance.choice([chance.randrange(len(tensors)), chance.choice(alike)])
        if chance.random() < 0.1:
            self._append(f"move(t{at}, {chance.randrange(1000)})", tensors[at].clone())
            return
        writing = chance.random() < 0.3
        text = chance.choice(_lines(IN_PLACE if writing else OPERATORS))
        dims, recorded = max(tensors[at].ndim, 1), not writing or chance.random() < 0.6
        d, e, n = chance.randrange(dims), chance.randrange(dims), chance.randrange(5)
        versions = [t._version for t in tensors]
        try:
            with torch.set_grad_enabled(recorded):
                made = eval(text, {**_ROOM, "x": tensors[at], "y": tensors[other], "d": d, "e": e, "n": n})
        except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError):
            if versions != [t._version for t in tensors]:
                raise RuntimeError("plain tensors were written to, and then refused") from None
            return
        names = f"x, y, d, e, n = t{at}, t{other}, {d}, {e}, {n}"
        writes, indent = versions != [t._version for t in tensors], "" if recorded else "    "
        head = [names] if recorded else [names, "with torch.no_grad():"]
        if writes and not all(map(tame, tensors)):
            raise RuntimeError("too large to go on with")
        if isinstance(made, torch.Tensor) and made is not tensors[at] and made.numel() < 3000 and tame(made):
            self.body.append([*head, f"{indent}t{len(tensors)} = {text}"])
            tensors.append(made)
        elif writes:
            self.body.append([*head, f"{indent}{text}"])


def play(rank, world, mesh_shape, seeds, steps, backend="aot_eager"):
    """On every rank: complaints about the programs of these seeds, and how many were right."""
    from torchshard import init_device_mesh

    warnings.filterwarnings("ignore")
    mesh, complaints, right = init_device_mesh("cpu", mesh_shape), [], 0
    for seed in seeds:
        try:
            program = Program(seed, steps)
            wanted = _played(program.function, program.leaves(), lambda t, _: t.clone())
            torch._dynamo.reset()
            compiled = torch.compile(program.function, backend=backend, fullgraph=True)
            _compare(_played(compiled, program.leaves(), lambda t, _: t.clone()), wanted, program)
        except Exception:  # of plain tensors: nothing to compare with
            continue
        try:
            right += _beside(program, mesh, seed, wanted, backend)
        except AssertionError as wrong:
            complaints.append(f"seed {seed}: {wrong}\n{program.source}")
    return complaints, right


def _beside(program, mesh, seed, wanted, backend):
    """Whether both ways to run it are right; not where one refuses it by name."""
    from torchshard import Replicate, Shard, distribute_tensor
    from torchshard.errors import TorchshardError

    chance = random.Random(seed + 1)
    placed = [drawn_placements(chance, t.ndim, mesh.ndim, not t.is_complex()) for t in program.values]

    def leaves():
        for t, needs, placements in zip(program.values, program.needs, placed, strict=True):
            whole = distribute_tensor(t, mesh, [Replicate()] * mesh.ndim)
            yield whole.redistribute(placements=placements).detach().requires_grad_(needs)

    def move(t, number):
        dims = [(number // 10**axis) % (t.ndim + 1) for axis in range(mesh.ndim)]
        return t.redistribute(placements=[Shard(dim) if dim < t.ndim else Replicate() for dim in dims]).clone()

    told = f"{placed}, gradients {program.needs}"
    with contextlib.suppress(TorchshardError):
        _compare(_played(program.function, [*leaves()], move), wanted, program, f"eager, {told}")
        torch._dynamo.reset()
        compiled = torch.compile(program.function, backend=backend, fullgraph=True)
        try:
            got = _played(compiled, [*leaves()], move)
        except Exception as error:
            if "  expected: " in str(error):  # an error of ours, inside of one of Dynamo
                return False
            raise AssertionError(f"compiled, {told}: {type(error).__name__}: {error}") from error
        _compare(got, wanted, program, f"compiled, {told}")
        return True
    return False


def _played(function, leaves, move):
    """Named results: what it returns, what it has made of its arguments, and their gradients."""
    results = function(*leaves, move)
    needing = [x for x in leaves if x.requires_grad]
    losses = [(doubles(y) * (k + 1)).square().mean() for k, y in enumerate(results) if y.requires_grad]
    grads = torch.autograd.grad(sum(losses), needing, allow_unused=True) if losses and needing else []
    return {
        **{f"result {k}": _seen(y) for k, y in enumerate(results)},
        **{f"argument {k}": _seen(x) for k, x in enumerate(leaves)},
        **{f"gradient {k}": None if g is None else _seen(g)[1:] for k, g in enumerate(grads)},
    }


def _seen(x):
    from torchshard import DTensor

    strides = [step for step, n in zip(x.stride(), x.shape, strict=True) if n > 1] if x.numel() > 1 else None
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    return (x.dtype, x.requires_grad, strides), x.shape, doubles(whole.detach()).clone()


def _compare(got, wanted, program, told=""):
    assert [*got] == [*wanted], f"{told}: {[*got]} for {[*wanted]}"
    limit = 5e-2 if "bfloat16" in program.source else 1e-3
    for name, right in wanted.items():
        found = got[name]
        assert (found is None) == (right is None), f"{told}: {name} is {found} for {right}"
        if right is None:
            continue
        assert found[:-1] == right[:-1], f"{told}: {name} is {found[:-1]} for {right[:-1]}"
        size = max(1.0, float(right[-1].abs().max())) if right[-1].numel() else 1.0
        if right[-1].isfinite().all():
            torch.testing.assert_close(
                found[-1], right[-1], rtol=0, atol=limit * size, msg=lambda text, name=name: f"{told}: {name}: {text}"
            )
