"""Splits in runs and in units, seen as plain splits: 24 items in 2 runs of units of 4 are a (2, 3, 4), its 3 split.

So nothing that moves data knows of them; nor of dims that axes split at several levels (levels.py), each of whose cuts
then splits a dim of its own. A way between shardings is a list of hops, each a transition between plain shardings of
the tensor with its cut dims unrolled; one hop, unless a dim is split on both sides and cut differently. Then the axes
that split it give it up in between; or, where all parts are boxes, what a rank lacks is copied.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchshard.layout.boxes import Box, joined, whole
from torchshard.layout.cost import DEFAULT_LINK
from torchshard.layout.layout import Sharding
from torchshard.layout.levels import dims_unrolled, intervals_at, lengths_unrolled, merged, place_of
from torchshard.layout.pieces import Interval, is_even
from torchshard.layout.placements import WHOLE, Cut, Placement, R, Shard
from torchshard.layout.transitions import Step, Transition, exchange, transition

Cuts = Mapping[int, Sequence[Cut]]  # of the dims that are unrolled, those of all levels


@dataclass(frozen=True, slots=True)
class Hop:
    """A transition of the tensor with these dims unrolled."""

    cuts: Cuts
    transition: Transition


@dataclass(frozen=True, slots=True)
class Route:
    """All of the way from one sharding to another."""

    hops: tuple[Hop, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The collectives, of all hops."""
        return tuple([step for hop in self.hops for step in hop.transition.steps])

    @property
    def nbytes(self) -> int:
        """Bytes that a rank receives at most."""
        return sum(hop.transition.nbytes for hop in self.hops)

    @property
    def seconds(self) -> float:
        """Time by the cost model."""
        return sum(hop.transition.seconds([DEFAULT_LINK] * hop.transition.source.mesh.ndim) for hop in self.hops)


def route(source: Sharding, target: Sharding, shape: Sequence[int], itemsize: int, *, regular: bool = False) -> Route:
    """The cheapest way from `source` to `target`, two shardings of one mesh; see transitions.transition."""
    for dim in source.splits.keys() & target.splits.keys():
        source, target = _told_alike(source, target, dim, shape), _told_alike(target, source, dim, shape)
    before, after = cuts_of(source), cuts_of(target)
    conflicts, shared = [], {**before, **after}
    for dim in source.splits.keys() & target.splits.keys():
        few, many = sorted((before.get(dim, (WHOLE,)), after.get(dim, (WHOLE,))), key=len)
        if not set(few) <= set(many):
            conflicts.append(dim)
        if dim in shared:
            shared[dim] = many
    shared = {d: cuts for d, cuts in shared.items() if d not in conflicts}
    if not conflicts:
        return Route((_hop(source, target, shared, shape, itemsize, regular),))
    middle = without(source, conflicts)
    before, after = ({**shared, **{d: cuts[d] for d in conflicts if d in cuts}} for cuts in (before, after))
    found = [
        Route(
            (
                _hop(source, middle, before, shape, itemsize, regular),
                _hop(middle, target, after, shape, itemsize, regular),
            )
        )
    ]
    if source.boxed and target.boxed and not regular:
        near = exchange(source, target, tuple(shape), itemsize)
        rest = _hop(near.target, target, cuts_of(target), shape, itemsize, regular)
        found.append(Route((Hop({}, near), rest)))
    return min(found, key=lambda way: way.seconds)


def cuts_of(sharding: Sharding) -> Cuts:
    """The cuts of all dims that are split in runs or in units, or at several levels."""
    return {dim: tuple([cut for cut, _ in sharding.levels[dim]]) for dim in sharding.cuts}


def unrolled(sharding: Sharding, cuts: Cuts) -> Sharding:
    """The plain sharding of the unrolled tensor; dims that are split at one level are cut there as `cuts` says."""
    if not cuts:
        return sharding
    placements: list[Placement] = list(sharding.placements)
    splits = {}
    for dim, levels in sharding.levels.items():
        start = dim + sum([dims_unrolled(cuts[d]) - 1 for d in cuts if d < dim])
        for cut, axes in levels:
            among = cuts.get(dim, (cut,))
            place = start + (place_of(among.index(cut) if len(among) > 1 else 0, among) if dim in cuts else 0)
            splits[place] = axes
            for axis in axes:
                placements[axis] = Shard(place)
    return sharding.mesh.sharding(placements, splits)


def unrolled_shape(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """The shape of a tensor, or of a part of one that is split at one level, with these dims unrolled."""
    lengths: list[int] = []
    for d, n in enumerate(shape):
        lengths += lengths_unrolled(n, cuts[d]) if d in cuts else [n]
    return tuple(lengths)


def rolled_dims(cuts: Cuts) -> list[tuple[int, int]]:
    """The first and the last dim to flatten, one dim after another, to undo `unrolled_shape`."""
    return [(dim, dim + dims_unrolled(cuts[dim]) - 1) for dim in sorted(cuts)]


def _told_alike(sharding: Sharding, other: Sharding, dim: int, shape: Sequence[int]) -> Sharding:
    """The sharding by the cuts of another one with several levels, or by one of them, if pieces stay the same."""
    mesh, levels, others = sharding.mesh, sharding.levels[dim], other.levels[dim]
    if len(others) == 1:
        return sharding
    placements = list(sharding.placements)
    if merged(shape[dim], levels, mesh.shape) == merged(shape[dim], others, mesh.shape):
        for axis in sharding.splits[dim]:
            placements[axis] = other.placements[axis]
        return mesh.sharding(placements, {**sharding.splits, dim: other.splits[dim]})
    if len(levels) > 1:
        return sharding
    cut, axes = levels[0]
    sizes = [mesh.shape[a] for a in axes]
    for also, _ in others:
        if is_as(Shard(dim, *cut), Shard(dim, *also), shape[dim], sizes):
            for axis in axes:
                placements[axis] = Shard(dim, *also)
            return mesh.sharding(placements, dict(sharding.splits))
    return sharding


def without(sharding: Sharding, dims: Collection[int]) -> Sharding:
    """The sharding with these dims whole."""
    placements = [R if isinstance(p, Shard) and p.dim in dims else p for p in sharding.placements]
    return sharding.mesh.sharding(placements, {d: axes for d, axes in sharding.splits.items() if d not in dims})


def intervals(sharding: Sharding, shape: Sequence[int], coordinate: Sequence[int]) -> list[list[Interval]]:
    """What a coordinate holds of each dim, in order of storage: one interval, or one a run."""
    held = [[(0, n)] for n in shape]
    for dim, levels in sharding.levels.items():
        held[dim] = intervals_at(shape[dim], levels, sharding.mesh.shape, coordinate)
    return held


def boxes_at(sharding: Sharding, shape: Sequence[int], coordinate: Sequence[int]) -> list[tuple[Box, Box]]:
    """The boxes that a coordinate holds, each with where it lies in its part: one, or one for each run.

    A part without elements is one empty box.
    """
    if sharding.boxed:
        box = sharding.box(shape, coordinate)
        return [(box, whole(box.size))]
    held = intervals(sharding, shape, coordinate)
    empty = any(sum(length for _, length in its) == 0 for its in held)
    return joined([its[:1] for its in held] if empty else held)


def boxes_of_all(sharding: Sharding, shape: Sequence[int]) -> list[tuple[int, Box]]:
    """Each rank of the mesh with each box that it holds, in the order of mesh.ranks."""
    mesh = sharding.mesh
    if sharding.boxed:
        return [*zip(mesh.ranks, sharding.boxes(shape), strict=True)]
    places = zip(mesh.ranks, mesh.coordinates(), strict=True)
    return [(rank, box) for rank, at in places for box, _ in boxes_at(sharding, shape, at)]


def is_as(now: Shard, wanted: Shard, n: int, sizes: Sequence[int]) -> bool:
    """Whether axes of these sizes leave the same pieces of a dim of n items by two splits of it: units even out."""
    if now is wanted:
        return True
    if (now.dim, now.runs) != (wanted.dim, wanted.runs):
        return False
    return all(is_even(n, [p.runs * p.unit, *sizes]) for p in (now, wanted))


def _hop(source: Sharding, target: Sharding, cuts: Cuts, shape: Sequence[int], itemsize: int, regular: bool) -> Hop:
    ends = unrolled(source, cuts), unrolled(target, cuts)
    return Hop(cuts, transition(*ends, unrolled_shape(shape, cuts), itemsize, regular=regular))
