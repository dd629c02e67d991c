"""torch's way to write another order of axes on one dim, `_StridedShard(dim, split_factor)`, and what it means.

There an axis with split factor f first cuts what the axes to its left left into f pieces (as if axes to its right had
split already), then each of these in its own parts, and holds its piece of every one, joined. Where sizes divide evenly
that is the same as a nesting order in which axes to the right come first. Where they do not, the pieces are others and
need not be intervals. So it is an order only where all pieces agree, and a list of intervals otherwise.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

from torchshard.errors import ShardingError
from torchshard.layout.levels import Level
from torchshard.layout.pieces import Interval, is_even, nested_piece, piece
from torchshard.layout.placements import Cut


def strided_intervals(
    n: int, factors: Mapping[int, int], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> list[Interval]:
    """What torch's strided split leaves of n items at `coordinate`, in order of storage.

    Args:
        n: length of the dim.
        factors: axis -> split factor (1 for a plain Shard) of the axes that split the dim.
        mesh_shape: sizes of all axes.
        coordinate: where.
    """
    held = [(0, n)]
    for axis in sorted(factors):
        count = sum(length for _, length in held)
        kept: list[Interval] = []
        for k in range(factors[axis]):
            start, length = piece(count, factors[axis], k)
            at, size = piece(length, mesh_shape[axis], coordinate[axis])
            kept += _select(held, start + at, size)
        held = kept
    return _joined(held)


def _select(held: Sequence[Interval], start: int, length: int) -> list[Interval]:
    """Items [start, start + length) of the concatenation of some intervals."""
    selected, stop = [], start + length
    for low, n in held:
        a, b = max(start, 0), min(stop, n)
        if a < b:
            selected.append((low + a, b - a))
        start, stop = start - n, stop - n
    return selected


def _joined(held: Sequence[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, length in held:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + length
        else:
            joined.append((start, length))
    return joined


def split_factors(order: Sequence[int], mesh_shape: Sequence[int]) -> dict[int, int]:
    """Axis -> split factor for a nesting order: the sizes of the axes to its right that split before it."""
    return {axis: math.prod([mesh_shape[a] for a in order[:at] if a > axis]) for at, axis in enumerate(order)}


def order_from_factors(n: int, factors: Mapping[int, int], mesh_shape: Sequence[int]) -> tuple[int, ...] | None:
    """The nesting order that gives the same pieces of n items as these split factors; None where none does."""
    axes = sorted(factors)
    for order in itertools.permutations(axes):
        if split_factors(order, mesh_shape) == dict(factors) and _agree(n, order, factors, mesh_shape):
            return order
    return None


def factors_from_order(n: int, order: Sequence[int], mesh_shape: Sequence[int]) -> dict[int, int]:
    """The split factors that give the same pieces of n items as this nesting order.

    Raises:
        ShardingError: torch's split of n items gives other pieces.
    """
    factors = split_factors(order, mesh_shape)
    if not _agree(n, order, factors, mesh_shape):
        raise ShardingError(
            "torch has no placement for this nesting order: its _StridedShard would hold other pieces.",
            expected=f"a length that the axes of sizes {[mesh_shape[a] for a in order]} divide",
            got=f"length {n}, split by the axes {tuple(order)} in this order",
            fix="redistribute to the default order (left to right) first",
        )
    return factors


def _agree(n: int, order: Sequence[int], factors: Mapping[int, int], mesh_shape: Sequence[int]) -> bool:
    sizes = [mesh_shape[a] for a in order]
    if list(order) == sorted(order) or is_even(n, sizes):
        return True
    coordinate = [0] * len(mesh_shape)
    for place in itertools.product(*map(range, sizes)):
        for a, k in zip(order, place, strict=True):
            coordinate[a] = k
        start, length = nested_piece(n, sizes, place)
        if strided_intervals(n, factors, mesh_shape, coordinate) != ([(start, length)] if length else []):
            return False
    return True


def factors_from_levels(n: int, levels: Sequence[Level], mesh_shape: Sequence[int]) -> dict[int, int] | None:
    """Axis -> split_factor of torch's `_StridedShard`, 1 for Shard; None where torch has no such placements.

    There each axis splits what those to its left have left: a factor counts the runs that are left of what is outside.
    """
    factors: dict[int, int] = {}
    for k, (cut, axes) in enumerate(levels):
        if n // cut.apart % math.prod([mesh_shape[a] for a in axes]) or list(axes) != sorted(axes):
            return None
        for axis in axes:
            before = [mesh_shape[a] for level in levels[:k] for a in level.axes if a < axis]
            factors[axis] = cut.runs // math.prod(before)
    return factors


def levels_from_factors(n: int, factors: Mapping[int, int], mesh_shape: Sequence[int]) -> dict[int, Cut] | None:
    """Axis -> how it cuts a dim of n items by torch's factors, the inverse of `factors_from_levels`; None if none does.

    The dim is seen as segments, of so many items and so many left, each split by axes of its own.
    """
    segments: list[tuple[int, int, tuple[int, ...]]] = [(n, n, ())]
    for axis in sorted(factors):
        slower, at = factors[axis], 0
        while at < len(segments) and slower >= segments[at][1] and slower % segments[at][1] == 0:
            slower, at = slower // segments[at][1], at + 1
        if at == len(segments) or segments[at][1] % slower:
            return None
        items, left, axes = segments[at]
        if slower > 1:
            segments[at : at + 1] = [(slower * (items // left), slower, axes), (left // slower, left // slower, ())]
            (items, left, axes), at = segments[at + 1], at + 1
        if left % mesh_shape[axis]:
            return None
        segments[at] = items, left // mesh_shape[axis], (*axes, axis)
    lengths = [items for items, _, _ in segments]
    return {
        axis: Cut(math.prod(lengths[:k]), math.prod(lengths[k + 1 :]))
        for k, (_, _, axes) in enumerate(segments)
        for axis in axes
    }
