"""Boxes of a regular sharding: dims split by axes, as pure functions of sizes and coordinates.

`splits` says for each sharded dim which axes split it, the first one first; axes in no split replicate. `units` says
of dims whose items stay together in units how long these are.
Cost: a few integer operations a dim for one coordinate; one tuple a rank for all of them.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from torchshard.layout.boxes import Box
from torchshard.layout.pieces import nested_piece, nested_pieces, piece

Splits = Mapping[int, tuple[int, ...]]
Units = Mapping[int, int]
Coordinate = tuple[int, ...]
Holders = Iterator[tuple[Coordinate, Box]]
NO_UNITS: Units = {}


def box_at(
    shape: Sequence[int], splits: Splits, mesh_shape: Sequence[int], coordinate: Sequence[int], units: Units = NO_UNITS
) -> Box:
    """The part of a tensor of global `shape` held at `coordinate`.

    Axes split in the order that `splits` gives: each splits what the axes before it left, in ceil(n / parts) pieces
    with a short or empty tail (as torch.chunk does).
    """
    offset, size = [0] * len(shape), list(shape)
    for dim, axes in splits.items():
        place = [mesh_shape[a] for a in axes], [coordinate[a] for a in axes]
        offset[dim], size[dim] = nested_piece(shape[dim], *place, units.get(dim, 1))
    return Box(tuple(offset), tuple(size))


def boxes(shape: Sequence[int], splits: Splits, mesh_shape: Sequence[int], units: Units = NO_UNITS) -> list[Box]:
    """The boxes of all coordinates, the last axis fastest (the order of a mesh's ranks)."""
    tables = [_pieces_by_rank(n, splits.get(d, ()), mesh_shape, units.get(d, 1)) for d, n in enumerate(shape)]
    if not tables:
        return [Box((), ())] * math.prod(mesh_shape)
    starts = zip(*[[start for start, _ in table] for table in tables], strict=True)
    lengths = zip(*[[length for _, length in table] for table in tables], strict=True)
    return list(map(Box, starts, lengths))


def _pieces_by_rank(n: int, axes: tuple[int, ...], mesh_shape: Sequence[int], unit: int) -> list[tuple[int, int]]:
    """For every rank in order, its interval of a dim of length n."""
    pieces = nested_pieces(n, [mesh_shape[a] for a in axes], unit)
    strides = _strides(axes, mesh_shape)
    ranks = [0]
    for axis, parts in enumerate(mesh_shape):
        stride = strides.get(axis, 0)
        ranks = [at + k * stride for at in ranks for k in range(parts)]
    return [pieces[at] for at in ranks]


def _strides(axes: tuple[int, ...], mesh_shape: Sequence[int]) -> dict[int, int]:
    """How far one step along each axis moves in the list of nested pieces."""
    strides, step = {}, 1
    for axis in reversed(axes):
        strides[axis] = step
        step *= mesh_shape[axis]
    return strides


def holders(
    shape: Sequence[int],
    splits: Splits,
    mesh_shape: Sequence[int],
    box: Box,
    fixed: Mapping[int, int],
    units: Units = NO_UNITS,
) -> Holders:
    """Coordinates that hold a part of `box`, with that part; `fixed` pins axes to a coordinate.

    Found dim by dim by division, so it costs what it returns; each replicating axis that is not fixed multiplies that.
    """
    if not box.numel:
        return
    found = []
    for dim, axes in splits.items():
        low, high = box.offset[dim], box.offset[dim] + box.size[dim]
        found.append(list(_meeting(shape[dim], axes, mesh_shape, low, high, fixed, units.get(dim, 1))))
    free = [a for a in range(len(mesh_shape)) if not any(a in axes for axes in splits.values())]
    choices = [[fixed[a]] if a in fixed else range(mesh_shape[a]) for a in free]
    coordinate = [0] * len(mesh_shape)
    for picked in itertools.product(*found):
        offset, size = list(box.offset), list(box.size)
        for (dim, axes), (ks, start, length) in zip(splits.items(), picked, strict=True):
            offset[dim], size[dim] = start, length
            for a, k in zip(axes, ks, strict=True):
                coordinate[a] = k
        part = Box(tuple(offset), tuple(size))
        for ks in itertools.product(*choices):
            for a, k in zip(free, ks, strict=True):
                coordinate[a] = k
            yield tuple(coordinate), part


def _meeting(
    n: int, axes: tuple[int, ...], mesh_shape: Sequence[int], low: int, high: int, fixed: Mapping[int, int], unit: int
) -> Iterator[tuple[Coordinate, int, int]]:
    """Pieces of one dim that meet [low, high): (coordinates on `axes`, start, length) of the common part."""
    if low >= high:
        return
    if not axes:
        yield (), low, high - low
        return
    axis, *inner = axes
    step = piece(n, mesh_shape[axis], 0, unit)[1]
    for k in range(low // step, (high - 1) // step + 1):
        if fixed.get(axis, k) == k:
            start, length = piece(n, mesh_shape[axis], k, unit)
            below = max(low - start, 0), min(high - start, length)
            for ks, at, common in _meeting(length, tuple(inner), mesh_shape, *below, fixed, unit):
                yield (k, *ks), start + at, common
