"""One sample in one placement of its operands, compared with eager torch: right, refused, wrong or an error."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.coverage.samples import Sample
from tests.tensor.proving.proof import place

UNINITIALISED = ("empty", "new_empty", "resize_")


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    forward, backward: "right", "refused", "wrong", "error"; None where there is none.
    text: what was wrong.
    gathers: all-gathers in the forward that bring as many elements together as the smallest split operand has; what
        statistics, flags and running means of a few elements take is less.
    """

    forward: str
    backward: str | None = None
    text: str = ""
    gathers: int = 0


def placements(sample: Sample, axes: int, cut: str = "") -> Iterator[tuple[Any, ...]]:
    """Placements for all operands: each alone and all together, whole, split along their dims, and Partial.

    Args:
        cut: how split dims are: in "units" or in "runs", of or as many as their lengths allow, in "levels", of both, or
            in blocks.
    """
    from torch.distributed.tensor import Partial, Replicate

    whole = (Replicate(),) * axes

    def split(t: torch.Tensor, *dims: int) -> tuple[Any, ...]:
        there = [d % t.ndim if t.ndim and -t.ndim <= d < t.ndim else None for d in dims]
        return tuple([Replicate() if d is None else _shard(d, t.shape[d], cut, k) for k, d in enumerate(there)])

    def terms(t: torch.Tensor, op: str) -> tuple[Any, ...]:
        return (Partial(op),) * axes if t.is_floating_point() and t.dtype.itemsize > 1 else whole

    ts = sample.tensors
    dims = [(0,) * axes, (1,) * axes, (-1,) * axes] if axes == 1 else [(0, 0), (0, 1), (1, 0), (-1, 0)]
    if cut == "levels":
        dims = [(0, 0), (1, 1), (-1, -1), (0, 1)]
    chosen = [
        tuple([whole for _ in ts]),
        *[tuple([split(t, *d) for t in ts]) for d in dims],
        *[tuple([split(t, *d) if k == 0 else whole for k, t in enumerate(ts)]) for d in dims[::2]],
        tuple([whole if k == 0 else split(t, *dims[0]) for k, t in enumerate(ts)]),
        tuple([terms(t, "sum") for t in ts]),
        tuple([terms(t, ("avg", "max", "min")[k % 3]) for k, t in enumerate(ts)]),
    ]
    return iter(dict.fromkeys(chosen))


def _shard(dim: int, length: int, cut: str, axis: int) -> Any:
    from torchshard import Shard, UnitShard

    divisor = next((n for n in (2, 3, 5, 7) if length % n == 0), 1)
    if not cut or not length or divisor == 1 or (cut == "levels" and divisor == length):
        return Shard(dim)
    if cut == "levels":  # the first axis splits the slower part of the dim, the next one the faster
        return UnitShard(dim, runs=divisor) if axis else UnitShard(dim, length // divisor)
    return UnitShard(dim, divisor) if cut == "units" else UnitShard(dim, runs=divisor)


def same(got: Any, want: Any, initialised: bool) -> None:
    """Raise AssertionError where two results differ."""
    from torchshard.tensor.dtensor import DTensor

    ours, theirs = tree_leaves(got), tree_leaves(want)
    assert len(ours) == len(theirs), f"{len(ours)} results for {len(theirs)}"
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(b, torch.Tensor):
            if isinstance(b, float):
                torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-3, atol=1e-4)
            else:
                assert (a, type(a)) == (b, type(b)), f"result {k}: {a!r} for {b!r}"
            continue
        assert isinstance(a, torch.Tensor), f"result {k}: a {type(a).__name__}"
        assert tuple(a.shape) == tuple(b.shape), f"result {k}: shape {tuple(a.shape)} for {tuple(b.shape)}"
        assert a.dtype == b.dtype, f"result {k}: dtype {a.dtype} for {b.dtype}"
        whole = a.detach().full_tensor() if isinstance(a, DTensor) else a.detach()
        if b.dtype.itemsize == 1 and b.dtype.is_floating_point:
            whole, b = whole.float(), b.float()
        assert tuple(whole.shape) == tuple(b.shape), f"result {k}: whole {tuple(whole.shape)} for {tuple(b.shape)}"
        if initialised:
            torch.testing.assert_close(
                whole, b.detach(), equal_nan=True, rtol=1e-3, atol=1e-4, msg=lambda m, k=k: f"result {k}: {m}"
            )


def try_one(sample: Sample, where: Sequence[Any], mesh: Any, gathered: list[int]) -> Outcome:
    """Run a sample in these placements of its operands; `gathered` gets the elements that each all-gather brings."""
    initialised = not any(word in sample.op for word in UNINITIALISED)
    placed = [place(t, mesh, list(p)) for t, p in zip(sample.tensors, where, strict=True)]
    plain = [
        _held(x, t) if any(q.is_partial() for q in x.placements) else _leaf(t)
        for x, t in zip(placed, sample.tensors, strict=True)
    ]
    given = [t.detach().clone() for t in plain]
    torch.manual_seed(1)
    want = sample.run(plain)
    written = [k for k, (t, old) in enumerate(zip(plain, given, strict=True)) if not torch.equal(t.detach(), old)]
    torch.manual_seed(1)
    split = [t.numel() for t, p in zip(plain, where, strict=True) if any(q.is_shard() for q in p)]
    gathered.clear()  # what placing the operands took
    try:
        got = sample.run(placed)
        gathers = sum(n >= min(split, default=0) for n in gathered)
        same(got, want, initialised)
        same([placed[k] for k in written], [plain[k] for k in written], initialised)  # as running statistics
    except Exception as error:
        return Outcome(_kind(error), None, _said(error))
    if not sample.differentiable or not initialised:
        return Outcome("right", None, "", gathers)
    return _backward(plain, placed, want, got, gathers)


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def _held(placed: Any, t: torch.Tensor) -> torch.Tensor:
    """What terms make together, which may be rounded in another way: eager torch gets that, as steps of it count."""
    whole = placed.detach().full_tensor()
    torch.testing.assert_close(whole, t.detach(), equal_nan=True)
    return whole.clone().requires_grad_(t.requires_grad)


def _backward(plain: Any, placed: Any, want: Any, got: Any, gathers: int) -> Outcome:
    pairs = [
        (a, b)
        for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True)
        if isinstance(b, torch.Tensor) and b.requires_grad
    ]
    leaves = [k for k, t in enumerate(plain) if t.requires_grad]
    if not pairs or not leaves:
        return Outcome("right", None, "", gathers)
    g = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(b.shape, generator=g, dtype=b.dtype) for _, b in pairs]
    try:
        wanted = torch.autograd.grad([b for _, b in pairs], [plain[k] for k in leaves], cotangents, allow_unused=True)
    except Exception:
        return Outcome("right", None, "", gathers)
    try:
        gave = torch.autograd.grad(
            [a for a, _ in pairs],
            [placed[k] for k in leaves],
            [_placed_as(a, c) for c, (a, _) in zip(cotangents, pairs, strict=True)],
            allow_unused=True,
        )
        for k, a, b in zip(leaves, gave, wanted, strict=True):
            assert (a is None) == (b is None), f"gradient {k} is {a}, not {b}"
        same([a for a in gave if a is not None], [b for b in wanted if b is not None], True)
    except Exception as error:
        return Outcome("right", _kind(error), _said(error), gathers)
    return Outcome("right", "right", "", gathers)


def _placed_as(result: Any, cotangent: torch.Tensor) -> Any:
    """A cotangent, on every rank alike, of the class of its result."""
    from torch.distributed.tensor import Replicate

    from torchshard import DTensor

    if not isinstance(result, DTensor):
        return cotangent
    return place(cotangent, result.device_mesh, [Replicate()] * result.device_mesh.ndim)


def _kind(error: Exception) -> str:
    from torchshard.errors import UnsupportedOperatorError

    if isinstance(error, UnsupportedOperatorError):
        return "refused"
    return "wrong" if type(error) is AssertionError else "error"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"
