"""Proof of operators: every case, in placements of its operands that are drawn, equals eager torch on full tensors."""

import itertools
import random
import warnings

import torch

from tests.tensor.proving.cases import GROUPS


def operands(case, seed=0):
    """Full plain tensors for a case."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for k, shape in enumerate(case.shapes):
        if case.integers and k in case.integers:
            made.append(torch.randint(0, case.integers[k], shape, generator=g))
        elif k in case.booleans:
            made.append(torch.rand(shape, generator=g) > 0.4)
        else:
            t = exact(shape, g)
            made.append(t.abs() if case.positive else t)
    return made


def exact(shape, generator):
    """Random numbers that are never zero, and whose sums are exact in float32."""
    return (torch.randn(shape, generator=generator).mul(512).round() * 2 + 1) / 1024


def placements_of(tensor, case):
    """What one axis may do to an operand."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    kinds = [Replicate(), *[Shard(d) for d in range(tensor.ndim)]]
    if case.partial and tensor.is_floating_point():
        kinds += [Partial(op) for op in ("sum", "avg", "max", "min")]
    return kinds


def trials(case, tensors, axes, limit, seed):
    """Placements for all operands: all combinations where they are few, a sample of them otherwise."""
    per_operand = [list(itertools.product(placements_of(t, case), repeat=axes)) for t in tensors]
    per_operand = [[ps for ps in options if _mixes(ps)] for options in per_operand]
    count = 1
    for options in per_operand:
        count *= len(options)
    if count <= limit:
        return list(itertools.product(*per_operand))
    draw = random.Random(seed)
    return [tuple(draw.choice(options) for options in per_operand) for _ in range(limit)]


def _mixes(placements):
    ops = {p.reduce_op for p in placements if p.is_partial()}
    return len(ops) <= 1 or ops == {"sum", "avg"}


def place(tensor, mesh, placements):
    """A leaf DTensor of these values; Partial terms differ from rank to rank, and only together make them."""
    from torch.distributed.tensor import Replicate

    from torchshard import DTensor

    term = tensor.detach().clone()
    g = torch.Generator().manual_seed(tensor.numel())
    for axis, p in enumerate(placements):
        if p.is_partial():
            drawn = [exact(term.shape, g) for _ in range(mesh.size(axis))]
            noise = [torch.empty_like(term).copy_(t) for t in drawn]  # all terms lie in memory in one order
            term = _terms(term, p.reduce_op, noise)[mesh.get_local_rank(axis)]
            g.manual_seed(100 * axis + mesh.get_local_rank(axis))
    terms = [p if p.is_partial() else Replicate() for p in placements]
    placed = DTensor.from_local(term, mesh, terms).redistribute(placements=placements)
    return placed.detach().requires_grad_(tensor.requires_grad)


def _terms(value, op, noise):
    """One tensor a rank, of which the reduction is `value`."""
    if op in ("max", "min"):
        sign = 1 if op == "max" else -1
        holder = torch.arange(value.numel()).view(value.shape) % len(noise)
        return [torch.where(holder == k, value, value - sign * e.abs()) for k, e in enumerate(noise)]
    scale = len(noise) if op == "avg" else 1
    return [value * scale - sum(noise[1:]), *noise[1:]]


def prove(case, mesh, limit, seed=0):
    """Compare; returns (number of comparisons, list of complaints)."""
    from torch.distributed.tensor import Replicate

    from torchshard.tensor.dtensor import DTensor

    full = operands(case)
    whole = [Replicate()] * mesh.ndim
    done, bad = 0, []
    for trial in trials(case, full, mesh.ndim, limit, seed):
        label = f"{case.name} {trial}"
        plain = [t.clone().requires_grad_(case.grad and t.is_floating_point()) for t in full]
        placed = [place(t, mesh, list(p)) for t, p in zip(plain, trial, strict=True)]
        try:
            want, got = case.run(*plain), case.run(*placed)
            if not isinstance(got, DTensor):
                raise AssertionError(f"the result is a {type(got).__name__}")
            same(got, want)
            if case.grad:
                g = torch.randn(want.shape, dtype=want.dtype)
                want.backward(g)
                (got * place(g, mesh, whole)).sum().backward()
                for k, (p, t) in enumerate(zip(placed, plain, strict=True)):
                    if t.requires_grad:
                        assert (p.grad is None) == (t.grad is None), f"gradient {k} is {p.grad}, not {t.grad}"
                        if t.grad is not None:
                            same(p.grad, t.grad, f"gradient of operand {k}: ")
            done += 1
        except Exception as error:
            bad.append(f"{label}: {type(error).__name__} {str(error)[:400]}")
    return done, bad


def same(got, want, what=""):
    """The DTensor has the metadata and the values of the plain tensor."""
    assert got.shape == want.shape, f"{what}shape {tuple(got.shape)} for {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}dtype {got.dtype} for {want.dtype}"
    layout = got._spec
    assert tuple(got._local_tensor.shape) == tuple(layout.local_shape), f"{what}local shape against {layout}"
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if want.dtype in (torch.float16, torch.bfloat16) else {}
    torch.testing.assert_close(got.full_tensor(), want, msg=lambda m: f"{what}{layout}: {m}", **tolerance)


def prove_group(rank, world, mesh_shape, group, limit):
    """On every rank: prove all cases of a group. Returns (comparisons, complaints)."""
    return prove_all(GROUPS[group], mesh_shape, limit)


def prove_all(cases, mesh_shape, limit):
    """On every rank: prove these cases. Returns (comparisons, complaints)."""
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", mesh_shape)
    done, bad = 0, []
    for case in cases:
        n, complaints = prove(case, mesh, limit)
        done += n
        bad += complaints
    return done, bad
