"""Splits in runs, seen as plain splits: 12 items in 3 runs are a (3, 4) whose second dim is split.

So nothing that moves data knows of runs. A way between shardings is a list of hops, each a transition between plain
shardings of the tensor with its run dims unrolled; one hop, unless a dim is split on both sides and in different runs.
Then the axes that split it give it up in between.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchshard.layout.layout import Sharding
from torchshard.layout.placements import R, Shard
from torchshard.layout.transitions import Step, Transition, transition

Runs = Mapping[int, int]  # dim -> number of runs that it is unrolled into


@dataclass(frozen=True, slots=True)
class Hop:
    """A transition of the tensor with these dims unrolled."""

    runs: Runs
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


def route(source: Sharding, target: Sharding, shape: Sequence[int], itemsize: int, *, regular: bool = False) -> Route:
    """The cheapest way from `source` to `target`, two shardings of one mesh; see transitions.transition."""
    both = source.splits.keys() & target.splits.keys()
    conflicts = [dim for dim in both if source.runs.get(dim) != target.runs.get(dim)]
    shared = {d: runs for d, runs in {**source.runs, **target.runs}.items() if d not in conflicts}
    if not conflicts:
        return Route((_hop(source, target, shared, shape, itemsize, regular),))
    middle = without(source, conflicts)
    before = {**shared, **{d: source.runs[d] for d in conflicts if d in source.runs}}
    after = {**shared, **{d: target.runs[d] for d in conflicts if d in target.runs}}
    return Route(
        (
            _hop(source, middle, before, shape, itemsize, regular),
            _hop(middle, target, after, shape, itemsize, regular),
        )
    )


def unrolled(sharding: Sharding, runs: Runs) -> Sharding:
    """The plain sharding of the unrolled tensor; dims that are split have the runs that `runs` says."""
    if not runs:
        return sharding
    place = {dim: dim + sum(d < dim for d in runs) + (dim in runs) for dim in sharding.splits}
    placements = [Shard(place[p.dim]) if isinstance(p, Shard) else p for p in sharding.placements]
    return sharding.mesh.sharding(placements, {place[dim]: axes for dim, axes in sharding.splits.items()})


def unrolled_shape(shape: Sequence[int], runs: Runs) -> tuple[int, ...]:
    """The shape of a tensor, or of a part of it, with these dims unrolled."""
    lengths = [[runs[d], n // runs[d]] if d in runs else [n] for d, n in enumerate(shape)]
    return tuple([n for pair in lengths for n in pair])


def _hop(source: Sharding, target: Sharding, runs: Runs, shape: Sequence[int], itemsize: int, regular: bool) -> Hop:
    ends = unrolled(source, runs), unrolled(target, runs)
    return Hop(runs, transition(*ends, unrolled_shape(shape, runs), itemsize, regular=regular))


def without(sharding: Sharding, dims: Collection[int]) -> Sharding:
    """The sharding with these dims whole."""
    placements = [R if isinstance(p, Shard) and p.dim in dims else p for p in sharding.placements]
    return sharding.mesh.sharding(placements, {d: axes for d, axes in sharding.splits.items() if d not in dims})
