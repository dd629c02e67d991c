"""Boxes: the part of a tensor that a rank holds, as offsets and sizes; and lists of them, whoever made them.

Layouts, explicit sharding specs, files of a checkpoint and flattened parameters all become lists of boxes; what moves
from where to where is then the intersection of two lists.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchshard.errors import ShardingError


class Box(NamedTuple):
    """Offsets and sizes, one of each a dim; a scalar has the box ((), ())."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        """First index after the box, a dim."""
        return tuple([o + s for o, s in zip(self.offset, self.size, strict=True)])

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global tensor."""
        return tuple([slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True)])

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """The box as an index into a tensor that holds `outer`, of which it is a part."""
        return tuple(
            [slice(o - base, o - base + s) for o, s, base in zip(self.offset, self.size, outer.offset, strict=True)]
        )

    def meet(self, other: "Box") -> "Box | None":
        """The common part; None where there is no common element."""
        offset, size = [], []
        for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True):
            start = a if a > b else b
            length = min(a + n, b + m) - start
            if length <= 0:
                return None
            offset.append(start)
            size.append(length)
        return Box(tuple(offset), tuple(size))


def joined(intervals: Iterable[Sequence[tuple[int, int]]]) -> list[tuple[Box, Box]]:
    """The boxes of a tensor of which a part is made, each with where it lies in the part.

    Args:
        intervals: start and length of what the part has of each dim, one behind another.
    """
    by_dim = []
    for held in intervals:
        starts = itertools.accumulate([length for _, length in held], initial=0)
        by_dim.append([(start, at, length) for (start, length), at in zip(held, starts, strict=False)])
    found = []
    for cut in itertools.product(*by_dim):
        start, at, size = zip(*cut, strict=True) if cut else ((), (), ())
        found.append((Box(start, size), Box(at, size)))
    return found


def whole(shape: Sequence[int]) -> Box:
    """The box of the full tensor."""
    return Box((0,) * len(shape), tuple(shape))


class Overlap(NamedTuple):
    """A target box, a source box (by their positions in the two lists) and their common part."""

    target: int
    source: int
    box: Box


def overlaps(targets: Sequence[Box], sources: Sequence[Box]) -> Iterator[Overlap]:
    """All pairs of boxes with a common element, grouped by nothing in particular.

    Boxes are grouped by their interval on one dim, the groups swept in order of start, and each pair of groups that
    meets is split further by the next dim; so for grids the time goes with the result and the distinct intervals.
    """
    target_ids = [i for i, b in enumerate(targets) if b.numel]
    source_ids = [i for i, b in enumerate(sources) if b.numel]
    if target_ids and source_ids:
        ndim = len(targets[target_ids[0]].offset)
        yield from _sweep(targets, sources, target_ids, source_ids, list(range(ndim)))


def _sweep(
    targets: Sequence[Box], sources: Sequence[Box], target_ids: list[int], source_ids: list[int], dims: list[int]
) -> Iterator[Overlap]:
    if not dims or len(target_ids) * len(source_ids) <= 4:
        for t in target_ids:
            for s in source_ids:
                if (box := targets[t].meet(sources[s])) is not None:
                    yield Overlap(t, s, box)
        return
    grouped = [(d, _by_interval(targets, target_ids, d), _by_interval(sources, source_ids, d)) for d in dims]
    # The dim that tells most boxes apart first: the rest is then small.
    dim, target_groups, source_groups = max(grouped, key=lambda g: len(g[1]) * len(g[2]))
    rest = [d for d in dims if d != dim]
    active: list[tuple[tuple[int, int], list[int]]] = []
    ahead = 0
    for (start, stop), members in target_groups:
        while ahead < len(source_groups) and source_groups[ahead][0][0] < stop:
            active.append(source_groups[ahead])
            ahead += 1
        active = [group for group in active if group[0][1] > start]
        for (begin, _), others in active:
            if begin < stop:
                yield from _sweep(targets, sources, members, others, rest)


def _by_interval(boxes: Sequence[Box], ids: list[int], dim: int) -> list[tuple[tuple[int, int], list[int]]]:
    groups: dict[tuple[int, int], list[int]] = {}
    for i in ids:
        start = boxes[i].offset[dim]
        groups.setdefault((start, start + boxes[i].size[dim]), []).append(i)
    return sorted(groups.items())


_CUT = 8  # dims: there are two corners for each of them


def tiles(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether the boxes hold every element of a tensor of `shape` exactly once.

    Sizes may not be negative, and where more than 8 dims are cut the answer is False.

    How often each element is held follows from the differences of that number along all dims. These are not zero at
    corners of boxes only, and must cancel but for those at the corners of the tensor. So time goes with the corners.
    """
    if 0 in shape:
        return not any(box.numel for box in boxes)
    cut = [d for d, n in enumerate(shape) if any(box.offset[d] or box.size[d] != n for box in boxes)]
    if len(cut) > _CUT:
        return False
    signs = [math.prod(ends) for ends in itertools.product((1, -1), repeat=len(cut))]
    held: dict[tuple[int, ...], int] = {}
    for times, some in ((1, boxes), (-1, (whole(shape),))):
        for offset, size in some:
            corners = itertools.product(*[(offset[d], offset[d] + size[d]) for d in cut])
            for corner, sign in zip(corners, signs, strict=True):
                held[corner] = held.get(corner, 0) + times * sign
    return not any(held.values())


def check_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Check that the boxes hold every element of a tensor of `shape` exactly once.

    Raises:
        ShardingError: names the box outside, the two boxes that overlap, or how many elements no box holds.
    """
    bounds = whole(shape)
    for box in boxes:
        if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(box.offset, box.size, shape, strict=True)):
            raise ShardingError("A box lies outside of its tensor.", expected=f"within {bounds}", got=box)
    if tiles(shape, boxes):
        return
    for one in overlaps(boxes, boxes):
        if one.target != one.source:
            raise ShardingError(
                "Two boxes hold the same elements.",
                expected="each element once",
                got=f"{boxes[one.target]} and {boxes[one.source]}",
            )
    held = sum(box.numel for box in boxes)
    if held != bounds.numel:
        raise ShardingError(
            "Boxes are missing.",
            expected=f"{bounds.numel} elements of shape {tuple(shape)}",
            got=f"{held} in {len(boxes)} boxes",
        )
