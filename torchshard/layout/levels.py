"""How axes split one dim: at one level, or at several, one within the other.

`(B, T)` flattened, B split by one axis and T by another, is a dim of two levels. The axis of B splits units of T items;
what it leaves has whole runs of T items, each of which the axis of T splits. So each level is a cut of the dim and the
axes that split it so, and the runs of a level are made of pieces of the level before.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchshard.errors import ShardingError
from torchshard.layout.pieces import Interval, largest_piece, nested_piece
from torchshard.layout.placements import Cut, Placements, Shard


class Level(NamedTuple):
    """A cut of a dim, and the axes that split it, the first to split first."""

    cut: Cut
    axes: tuple[int, ...]


def levels_of(placements: Placements, axes: Sequence[int]) -> tuple[Level, ...]:
    """The levels of the dim that these axes split in this order, the outermost first.

    Raises:
        ShardingError: no order of them lies one within the other, however long the dim is.
    """
    found: dict[Cut, tuple[int, ...]] = {}
    for axis in axes:
        p = placements[axis]
        if isinstance(p, Shard):
            cut = Cut(p.runs, p.unit)
            found[cut] = (*found.get(cut, ()), axis)
    cuts = sorted(found)
    for outer, inner in itertools.pairwise(cuts):
        if inner.runs % outer.runs or inner.runs == outer.runs:
            raise ShardingError(
                "All axes that split a dim split it in the same number of runs, and in the same units; or some split"
                " runs of what others leave.",
                expected=f"{str(outer) or 'neither runs nor units'} for all, or so many runs more as there are pieces"
                " of that",
                got=placements,
            )
    return tuple([Level(cut, found[cut]) for cut in cuts])


def may_nest(n: int, cuts: Sequence[Cut]) -> bool:
    """Whether the cuts of a dim of n items, the outermost first, lie one within the other."""
    if any(n % cut.apart for cut in cuts):
        return False
    return all(n and inner.runs % (n // outer.unit) == 0 for outer, inner in itertools.pairwise(cuts))


def length_at(n: int, levels: Iterable[Level], mesh_shape: Sequence[int], coordinate: Sequence[int]) -> int:
    """How many of n items a coordinate holds."""
    held = n
    for k, (cut, axes) in enumerate(levels):
        run, runs = _runs(n, cut, held if k else None)
        held = runs * nested_piece(run, [mesh_shape[a] for a in axes], [coordinate[a] for a in axes], cut.unit)[1]
    return held


def largest_length(n: int, levels: Iterable[Level], mesh_shape: Sequence[int]) -> int:
    """How many items the coordinate holds that has most of them."""
    held = n
    for k, (cut, axes) in enumerate(levels):
        run, runs = _runs(n, cut, held if k else None)
        held = runs * largest_piece(run, [mesh_shape[a] for a in axes], cut.unit)
    return held


def _runs(n: int, cut: Cut, held: int | None) -> tuple[int, int]:
    """The length of a run of n items, and how many runs there are where so many items are held; None for all."""
    if cut.runs == 1:
        return n, 1
    run = n // cut.runs
    return run, cut.runs if held is None else held // run


def intervals_at(
    n: int, levels: Iterable[Level], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> list[Interval]:
    """What a coordinate holds of n items, in order of storage: one interval, or one for each run."""
    held = [(0, n)]
    for k, (cut, axes) in enumerate(levels):
        start, length = nested_piece(
            _runs(n, cut, None)[0], [mesh_shape[a] for a in axes], [coordinate[a] for a in axes], cut.unit
        )
        found = []
        for at, size in held:
            run, runs = _runs(n, cut, size if k else None)
            found += [(at + i * run + start, length) for i in range(runs)]
        held = found
    return held


def lengths_unrolled(n: int, cuts: Sequence[Cut]) -> list[int]:
    """The dims of which n items, seen so that each cut splits a dim of its own, are made; see `place_of`."""
    first, *inner = cuts
    lengths, outer = [*[first.runs] * (first.runs > 1), n // first.apart], first
    for cut in inner:
        lengths += cut.runs // (n // outer.unit), n // cut.apart
        outer = cut
    return [*lengths, *[outer.unit] * (outer.unit > 1)]


def place_of(k: int, cuts: Sequence[Cut]) -> int:
    """Which of `lengths_unrolled` cut number k splits."""
    return 2 * k + (cuts[0].runs > 1)


def dims_unrolled(cuts: Sequence[Cut]) -> int:
    """How many `lengths_unrolled` there are."""
    return place_of(len(cuts) - 1, cuts) + 1 + (cuts[-1].unit > 1)


def merged(n: int, levels: Sequence[Level], mesh_shape: Sequence[int]) -> tuple[Level, ...]:
    """As few levels as leave the same pieces: where each rank has one piece of a level, the next splits that."""
    found: list[Level] = []
    for level in levels:
        if found:
            (runs, unit), axes = found[-1]
            ranks = math.prod([mesh_shape[a] for a in axes])
            if ranks * runs * unit == n and level.cut.runs == runs * ranks:
                found[-1] = Level(Cut(runs, level.cut.unit), (*axes, *level.axes))
                continue
        found.append(level)
    return tuple(found)
