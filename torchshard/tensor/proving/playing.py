"""All ranks of a mesh played in one process: what each would hold of a full tensor, and whether what they hold is one.

    parts = spread(full, sharding, generator)      one tensor a rank, in the order of mesh.ranks
    assert complaint(parts, sharding, full) is None

The terms of a Partial are random numbers that only together make the value, so that a rule that reads one of them as
if it were the value is found out.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from torchshard.comm.reducing import prepare
from torchshard.errors import UnsupportedOperatorError
from torchshard.layout.cuts import cuts_of, unrolled, unrolled_shape
from torchshard.layout.layout import Sharding
from torchshard.layout.placements import Partial, Placement
from torchshard.tensor.layout import dense_stride

_FOLD: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

# Relative and absolute: sums of terms are rounded otherwise than the value. Other dtypes are exact.
_TOLERANCE = {
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float32: (2e-6, 1e-5),
    torch.complex64: (2e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
}


def has_terms(dtype: torch.dtype, op: str) -> bool:
    """Whether `spread` can write a tensor of this dtype as terms of this reduction."""
    if dtype.is_floating_point:
        return op in ("sum", "avg", "max", "min")
    if dtype.is_complex:
        return dtype is not torch.complex32 and op in ("sum", "avg")  # torch has hardly any kernels for that one
    return dtype is not torch.bool and op in ("sum", "max", "min")


def spread(full: Tensor, sharding: Sharding, generator: torch.Generator) -> list[Tensor]:
    """The part of each rank, in the order of mesh.ranks; dense, its dims in the memory order of `full`.

    Args:
        full: the whole tensor.
        sharding: its Partials are such that `has_terms`.
        generator: where the terms come from.
    """
    mesh = sharding.mesh
    terms: dict[tuple[int, ...], Tensor] = {(): full}
    for parts, placement in zip(mesh.shape, sharding.placements, strict=True):
        terms = {
            (*coordinate, k): term
            for coordinate, value in terms.items()
            for k, term in enumerate(_terms(value, placement, parts, generator))
        }
    return [_cut(terms[c], c, sharding) for c in mesh.coordinates()]


def _terms(value: Tensor, placement: Placement, parts: int, generator: torch.Generator) -> list[Tensor]:
    """What stands for `value` at each coordinate of an axis: itself, or terms of it."""
    if not isinstance(placement, Partial):
        return [value] * parts
    drawn = [noise(value, generator) for _ in range(parts)]
    if placement.op in ("max", "min"):
        sign = 1 if placement.op == "max" else -1
        holder = torch.arange(value.numel(), device=value.device).view(value.shape) % parts
        return [torch.where(holder == k, value, value - sign * e.abs()) for k, e in enumerate(drawn)]
    scale = parts if placement.op == "avg" else 1
    return [value * scale - sum(drawn[1:]), *drawn[1:]]


def noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers of the shape and dtype of `like`, never zero, whose sums are exact in float32."""
    if not (like.is_floating_point() or like.is_complex()):
        drawn = torch.randint(1, 4, like.shape, generator=generator, device=generator.device)
    else:
        drawn = (torch.randn(like.shape, generator=generator, device=generator.device).mul(512).round() * 2 + 1) / 1024
    return drawn.to(like)


def _cut(full: Tensor, coordinate: tuple[int, ...], sharding: Sharding) -> Tensor:
    part = _part(full, coordinate, sharding)
    if part.shape == full.shape:
        return full
    return torch.empty_strided(
        part.shape, dense_stride(part.shape, full.stride()), dtype=full.dtype, device=full.device
    ).copy_(part)


def _part(full: Tensor, coordinate: tuple[int, ...], sharding: Sharding) -> Tensor:
    """The elements of one coordinate."""
    shape = unrolled_shape(full.shape, cuts := cuts_of(sharding))
    part = full.reshape(shape)[unrolled(sharding, cuts).box(shape, coordinate).slices]
    return part.reshape(sharding.part(full.shape, coordinate))


def reduced(terms: Sequence[Tensor], op: str) -> Tensor:
    """The value of terms, one a rank, by the steps that a transport would take.

    Raises:
        UnsupportedOperatorError: the reduction has no meaning for the dtype.
    """
    prepared = [prepare(term, op, len(terms)) for term in terms]
    _, name, finish = prepared[0]
    return finish(reduce(_FOLD[name], [term for term, _, _ in prepared]))


def tolerance(dtypes: Iterable[torch.dtype]) -> tuple[float, float]:
    """Relative and absolute tolerance for results of operands of these dtypes: those of the coarsest."""
    return max([_TOLERANCE.get(dtype, (0.0, 0.0)) for dtype in dtypes])


def complaint(
    parts: Sequence[Tensor], sharding: Sharding, expected: Tensor, close: tuple[float, float] | None
) -> str | None:
    """What is wrong with these parts as those of `expected`; None where nothing is.

    Args:
        parts: one a rank, in the order of mesh.ranks.
        sharding: what they are said to be; Partial axes are reduced before values are compared.
        expected: the full tensor; NaN equals NaN.
        close: relative and absolute tolerance; None: compare shape and dtype only.
    """
    mesh = sharding.mesh
    held = dict(zip(mesh.coordinates(), parts, strict=True))
    for c, part in held.items():
        if tuple(part.shape) != (shape := sharding.part(expected.shape, c)):
            return f"rank {c}: expected a part of shape {shape}, got {tuple(part.shape)}"
        if part.dtype != expected.dtype:
            return f"rank {c}: expected {expected.dtype}, got {part.dtype}"
    if close is None:
        return None
    within = close[0], close[1] * max([_largest(t) for t in (*parts, expected)])
    try:
        for axis in reversed(sharding.partial):
            held = _reduced_along(held, axis, sharding)
    except UnsupportedOperatorError as error:
        return f"the result cannot be reduced: {error.what}"
    for c, part in held.items():
        if (found := _difference(part, _part(expected, c, sharding), *within)) is not None:
            return f"rank {c}: {found}"
    return None


def _reduced_along(
    held: Mapping[tuple[int, ...], Tensor], axis: int, sharding: Sharding
) -> dict[tuple[int, ...], Tensor]:
    placement = sharding.placements[axis]
    assert isinstance(placement, Partial), f"axis {axis} of {sharding} is not Partial"
    totals = {
        c: reduced([held[(*c[:axis], k, *c[axis + 1 :])] for k in range(sharding.mesh.shape[axis])], placement.op)
        for c in held
        if c[axis] == 0
    }
    return {c: totals[(*c[:axis], 0, *c[axis + 1 :])] for c in held}


def _largest(x: Tensor) -> float:
    """The largest finite magnitude in a tensor of floats; 1 at least, and bounded, so that one does not excuse all."""
    if not (x.is_floating_point() or x.is_complex()) or not x.numel():
        return 1.0
    sizes = x.abs().to(torch.float64).nan_to_num(1.0, 1.0, 1.0)
    return min(max(1.0, float(sizes.max())), 1e4)


def _difference(got: Tensor, expected: Tensor, rtol: float, atol: float) -> str | None:
    """The first element that differs by more than rounding."""
    if not (expected.is_floating_point() or expected.is_complex()):
        rtol = atol = 0.0
    if expected.is_floating_point() and expected.itemsize == 1:  # of which nothing is reckoned
        got, expected = got.float(), expected.float()
    close = torch.isclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    if bool(close.all()):
        return None
    at = (~close).nonzero()[0].tolist()
    where = f"element {tuple(at)}" if at else "the value"
    count = math.prod(close.shape) - int(close.sum())
    return f"{where} is {got[tuple(at)].item()}, expected {expected[tuple(at)].item()} ({count} elements differ)"
