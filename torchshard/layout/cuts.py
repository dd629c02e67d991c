"""Splits in runs and in units, seen as plain splits: 24 items in 2 runs of units of 4 are a (2, 3, 4), its 3 split.

So nothing that moves data knows of them. A way between shardings is a list of hops, each a transition between plain
shardings of the tensor with its cut dims unrolled; one hop, unless a dim is split on both sides and cut differently.
Then the axes that split it give it up in between; or, where all parts are boxes, what a rank lacks is copied.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchshard.layout.boxes import Box, joined, whole
from torchshard.layout.cost import DEFAULT_LINK
from torchshard.layout.layout import Sharding
from torchshard.layout.pieces import Interval, is_even, nested_piece
from torchshard.layout.placements import WHOLE, Cut, R, Shard
from torchshard.layout.transitions import Step, Transition, exchange, transition

Cuts = Mapping[int, Cut]  # of the dims that are unrolled


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
    both = source.splits.keys() & target.splits.keys()
    conflicts = [dim for dim in both if source.cuts.get(dim) != target.cuts.get(dim)]
    shared = {d: cut for d, cut in {**source.cuts, **target.cuts}.items() if d not in conflicts}
    if not conflicts:
        return Route((_hop(source, target, shared, shape, itemsize, regular),))
    middle = without(source, conflicts)
    before = {**shared, **{d: source.cuts[d] for d in conflicts if d in source.cuts}}
    after = {**shared, **{d: target.cuts[d] for d in conflicts if d in target.cuts}}
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
        rest = _hop(near.target, target, target.cuts, shape, itemsize, regular)
        found.append(Route((Hop({}, near), rest)))
    return min(found, key=lambda way: way.seconds)


def unrolled(sharding: Sharding, cuts: Cuts) -> Sharding:
    """The plain sharding of the unrolled tensor; dims that are split are cut as `cuts` says."""
    if not cuts:
        return sharding
    place = {}
    for dim in sharding.splits:
        before = [length > 1 for d, cut in cuts.items() if d < dim for length in cut]
        place[dim] = dim + sum(before) + (dim in cuts and cuts[dim].runs > 1)
    placements = [Shard(place[p.dim]) if isinstance(p, Shard) else p for p in sharding.placements]
    return sharding.mesh.sharding(placements, {place[dim]: axes for dim, axes in sharding.splits.items()})


def unrolled_shape(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """The shape of a tensor, or of a part of it, with these dims unrolled."""
    lengths = []
    for d, n in enumerate(shape):
        runs, unit = cuts.get(d, WHOLE)
        lengths += [n for n, kept in ((runs, runs > 1), (n // (runs * unit), True), (unit, unit > 1)) if kept]
    return tuple(lengths)


def without(sharding: Sharding, dims: Collection[int]) -> Sharding:
    """The sharding with these dims whole."""
    placements = [R if isinstance(p, Shard) and p.dim in dims else p for p in sharding.placements]
    return sharding.mesh.sharding(placements, {d: axes for d, axes in sharding.splits.items() if d not in dims})


def intervals(sharding: Sharding, shape: Sequence[int], coordinate: Sequence[int]) -> list[list[Interval]]:
    """What a coordinate holds of each dim, in order of storage: one interval, or one a run."""
    held = [[(0, n)] for n in shape]
    for dim, axes in sharding.splits.items():
        runs, unit = sharding.cuts.get(dim, WHOLE)
        run, sizes = shape[dim] // runs, [sharding.mesh.shape[a] for a in axes]
        start, length = nested_piece(run, sizes, [coordinate[a] for a in axes], unit)
        held[dim] = [(k * run + start, length) for k in range(runs)]
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
