"""Random chains of operators, each on what others have made: DTensors do what plain tensors do.

After every step: values, dtype, shape, strides and whether there is a gradient; after a write those of all tensors, as
any may be a view of another; at the end gradients, and gradients of those.
"""

import functools
import random
import warnings

import torch
import torch.nn.functional as F  # for the chains

from tests.tensor.proving.tables import IN_PLACE, OPERATORS, lines


def play(rank, world, mesh_shape, seeds):
    """On every rank: the complaints about the chains of these seeds."""
    from torchshard import init_device_mesh

    mesh = init_device_mesh("cpu", mesh_shape)
    return played(Chain(mesh, seed) for seed in seeds)


def played(chains):
    """The complaints about some chains, each with its story."""
    warnings.filterwarnings("ignore")
    return [told + "\n  " + "\n  ".join(chain.story) for chain in chains if (told := chain.run())]


def drawn_placements(chance, ndim, axes, partial=True):
    """Placements for a tensor of so many dims, one an axis."""
    from torchshard import Partial, Replicate, Shard

    op = chance.choice(["sum", "avg", "max", "min"])  # there may be no two in one tensor

    def one():
        kind, dim = chance.random(), chance.randrange(max(ndim, 1))
        if ndim and kind < 0.6:
            return Shard(dim)
        return Partial(op) if partial and kind > 0.8 else Replicate()

    return [one() for _ in range(axes)]


class Over(Exception):
    """The chain cannot go on: plain tensors have come to an end of their own, or a write was refused."""


class Chain:
    """Pairs of a plain tensor and a DTensor, of which each step makes another, or to which it writes."""

    operators, in_place = OPERATORS, IN_PLACE
    dtypes = (*[torch.float32] * 5, torch.float64, torch.int64, torch.complex64)

    def __init__(self, mesh, seed):
        self.mesh, self.chance = mesh, random.Random(seed)
        self.story, self.pairs, self.leaves = [f"seed {seed}"], [], []

    def run(self):
        """What went wrong, or None."""
        try:
            self._begin()
            for _ in range(14):
                self._step()
            self._backward()
        except Over:
            pass
        except AssertionError as wrong:
            return str(wrong)
        return None

    def _begin(self):
        chance = self.chance
        for _ in range(2):
            shape = [chance.choice([1, 2, 3, 4, 5, 7, 8]) for _ in range(chance.choice([1, 2, 2, 2, 3]))]
            self._start(shape, chance.choice(self.dtypes), chance.random() < 0.6)
        if chance.random() < 0.5:
            self._start(self.pairs[0][0].shape, self.pairs[0][0].dtype, False)

    def _start(self, shape, dtype, needs_grad):
        from torchshard import Replicate, distribute_tensor

        values = drawn(shape, dtype, self.chance.randrange(10**6), whole=self.chance.random() < 0.5)
        placements = self._placements(values.ndim, partial=dtype.is_floating_point)
        split = distribute_tensor(values, self.mesh, [Replicate() if p.is_partial() else p for p in placements])
        split = split.redistribute(placements=placements).detach()
        plain = split.full_tensor().clone()
        if needs_grad and (dtype.is_floating_point or dtype.is_complex):
            self.leaves.append((plain.requires_grad_(), split.requires_grad_()))
        self.story.append(f"#{len(self.pairs)}: {tuple(shape)} {dtype} {placements} grad={plain.requires_grad}")
        self.pairs.append((plain, split))

    def _placements(self, ndim, partial):
        return drawn_placements(self.chance, ndim, self.mesh.ndim, partial)

    def _step(self):
        chance, pairs = self.chance, self.pairs
        at = chance.choice([chance.randrange(len(pairs)), len(pairs) - 1])
        alike = [k for k, (plain, _) in enumerate(pairs) if plain.shape == pairs[at][0].shape]
        other = chance.choice([chance.randrange(len(pairs)), chance.choice(alike)])
        kind, seed = chance.random(), chance.randrange(10**6)
        if kind < 0.12:
            placements = self._placements(pairs[at][0].ndim, partial=False)
            self.story.append(f"#{len(pairs)}: #{at} as {placements}")
            self._add(pairs[at][0].clone(), pairs[at][1].redistribute(placements=placements).clone())
            return
        dims = max(pairs[at][0].ndim, 1)
        names = {"d": chance.randrange(dims), "e": chance.randrange(dims), "n": chance.randrange(5)}
        code, text = chance.choice(_compiled(self.in_place if kind < 0.37 else self.operators))
        recorded = kind > 0.37 or chance.random() < 0.5

        def call(which):
            torch.manual_seed(seed)
            tensors = {"x": pairs[at][which], "y": pairs[other][which]}
            with torch.set_grad_enabled(recorded):
                return eval(code, {"torch": torch, "F": F, **tensors, **names})

        versions = [plain._version for plain, _ in pairs]
        try:
            plain = call(0)
        except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:
            if versions != [plain._version for plain, _ in pairs]:  # something was written
                raise Over from error
            return
        self.story.append(f"#{len(pairs)}: {text} x=#{at} y=#{other} {names}{'' if recorded else ' no_grad'}")
        writes = versions != [plain._version for plain, _ in pairs]
        try:
            split = self._right_or_refused(lambda: call(1))
        except Over:
            if writes:
                raise
            return
        if writes:
            self._compare_all()
        if plain is not pairs[at][0]:
            self._add(plain, split)

    def _right_or_refused(self, call):
        from torchshard.errors import TorchshardError

        try:
            return call()
        except TorchshardError as error:
            self.story.append("    refused")
            raise Over from error
        except Exception as error:
            # Some kernels take no notice of elements that lie on one another, others refuse to write to them.
            if "single memory location" in str(error) or "be at one place in memory" in str(error):
                raise Over from error
            raise AssertionError(f"{type(error).__name__}: {error}") from error

    def _add(self, plain, split):
        self._compare(plain, split)
        if isinstance(plain, torch.Tensor) and plain.numel() < 3000 and len(self.pairs) < 9 and tame(plain):
            self.pairs.append((plain, split))

    def _compare_all(self):
        for plain, split in self.pairs:
            self._compare(plain, split)
            if not tame(plain):
                raise Over

    def _compare(self, plain, split):
        """Assert that a DTensor is what the plain tensor is."""
        if not isinstance(plain, torch.Tensor):
            return
        try:
            wanted = {name: getattr(plain, name) for name in ("shape", "dtype", "requires_grad", "is_leaf")}
        except RuntimeError as error:  # a view that a write has made meaningless
            raise Over from error
        got = {name: getattr(split, name) for name in wanted}
        assert got == wanted, f"{got} for {wanted}"
        self._compare_strides(plain, split)
        values = self._whole(split).detach()
        limit = 5e-2 if plain.dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(values, plain.detach(), rtol=limit, atol=limit, equal_nan=True)

    def _compare_strides(self, plain, split):
        strides = [pair for *pair, n in zip(split.stride(), plain.stride(), plain.shape, strict=True) if n > 1]
        assert plain.numel() < 2 or all(a == b for a, b in strides), f"strides {split.stride()} for {plain.stride()}"

    def _whole(self, split):
        from torchshard import DTensor

        return split.full_tensor() if isinstance(split, DTensor) else split

    def _backward(self):
        plains, splits = ([pair[k] for pair in self.pairs if pair[0].requires_grad] for k in (0, 1))
        for name in ("gradients", "gradients of gradients"):
            self.story.append(name)
            try:
                plains = self._gradients(plains, [plain for plain, _ in self.leaves])
            except RuntimeError as error:  # something that was saved has been written to
                raise Over from error
            splits = self._right_or_refused(lambda of=splits: self._gradients(of, [split for _, split in self.leaves]))
            assert [g is None for g in plains] == [g is None for g in splits]
            for plain, split in zip(plains, splits, strict=True):
                if plain is not None and plain.isfinite().all():
                    got, wanted = doubles(self._whole(split).detach()), doubles(plain.detach())
                    size = max(float(wanted.abs().max()), 1.0) if plain.numel() else 1.0
                    limit = 5e-2 if any("bfloat16" in line for line in self.story) else 1e-3
                    torch.testing.assert_close(got, wanted, rtol=0, atol=limit * size)

    @staticmethod
    def _gradients(outputs, leaves):
        """Of the leaves, for a sum of squares; None for those that the outputs do not depend on."""
        outputs = [y for y in outputs if y is not None and y.requires_grad]
        if not outputs or not leaves:
            return [None] * len(leaves)
        loss = sum((doubles(y) * (k + 1)).square().mean() for k, y in enumerate(outputs))
        return torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=True)


@functools.cache
def _compiled(table):
    return [(compile(line, line, "eval"), line) for line in lines(table)]


def drawn(shape, dtype, seed, whole=False):
    """Random values; halves of whole numbers if `whole` says so, as which some are equal."""
    kind = torch.complex64 if dtype.is_complex else torch.float32
    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=kind)
    if whole:
        parts = torch.view_as_real(values) if dtype.is_complex else values
        parts.copy_((parts * 3).round() / 2)
    return values.to(dtype)


def doubles(x):
    """The numbers of a tensor, both parts of complex ones, in double precision."""
    return torch.view_as_real(x.to(torch.complex128).resolve_conj()) if x.is_complex() else x.double()


def tame(plain):
    """Whether the values are finite, and not too large to go on with."""
    return bool(plain.isfinite().all()) and float(doubles(plain.detach()).abs().sum()) < 1e5
