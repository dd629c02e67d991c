"""How a tensor goes from one mesh to another: reduced where it is Partial, then copied, each rank what it lacks.

The two meshes may share ranks, all or some of them, or none. What is Partial is reduced within the source mesh first,
to Replicate or straight to Shard; what shall be Partial becomes so within the target mesh, and what shall be replicated
there may come in pieces that its ranks gather. Of all such ways the soonest is taken.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from torchshard.layout.copies import Crossing
from torchshard.layout.cost import DEFAULT_LINK
from torchshard.layout.layout import Sharding
from torchshard.layout.placements import Shard
from torchshard.layout.transitions import Transition, transition


@dataclass(frozen=True, slots=True)
class Passage:
    """The way of a tensor from one mesh to another.

    Attributes:
        before: within the source mesh, until nothing is Partial.
        crossing: who copies what from whom.
        after: within the target mesh, to what replicates or is Partial there.
        lacked: bytes that a rank of the target mesh receives at most in the crossing.
        given: bytes that a rank of the source mesh gives to others at most in the crossing.
    """

    before: Transition
    crossing: Crossing
    after: Transition
    lacked: int
    given: int

    @property
    def nbytes(self) -> int:
        """Bytes that a rank receives at most, in all."""
        return self.before.nbytes + self.lacked + self.after.nbytes

    @property
    def seconds(self) -> float:
        """Time by the cost model, if all links are alike."""
        rounds = self.crossing.target.mesh.size - 1 if self.lacked else 0
        crossing = DEFAULT_LINK.seconds(2 if self.lacked else 0, rounds, max(self.lacked, self.given))
        ends = ((self.before, self.crossing.source), (self.after, self.crossing.target))
        return crossing + sum(way.seconds([DEFAULT_LINK] * end.mesh.ndim) for way, end in ends)


def passage(source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> Passage:
    """The way from `source` to `target`, shardings of two meshes, for a tensor of this shape and item size.

    The same on every rank, as long as it is asked for the same.

    Raises:
        ShardingError: a target that is Partial in a way that cannot be made exactly.
    """
    found = []
    for start, end in itertools.product(_reduced(source, len(shape)), _split(target, len(shape))):
        crossing = Crossing(start, end, shape)
        lacked = crossing.most_lacked() * itemsize
        given = crossing.most_given(math.prod(start.largest(shape))) * itemsize if lacked else 0
        ends = transition(source, start, shape, itemsize), transition(end, target, shape, itemsize)
        found.append(Passage(ends[0], crossing, ends[1], lacked, given))
    return min(found, key=lambda p: p.seconds)


def _reduced(source: Sharding, ndim: int) -> Iterator[Sharding]:
    """What the source may be reduced to: Replicate on all Partial axes, or the same dim split by all of them."""
    yield source.without_partial()
    if source.partial:
        for dim in range(ndim):
            sharding = source
            for axis in source.partial:
                sharding = sharding.replace(axis, Shard(dim))
            yield sharding


def _split(target: Sharding, ndim: int) -> Iterator[Sharding]:
    """What the target may be made of: itself, or what all its axes split, so that each piece comes once.

    Then the ranks of the target give it to one another; else those of the source give it to each of them.
    """
    end = target.without_partial()
    yield end
    replicating = [a for a, p in enumerate(end.placements) if not isinstance(p, Shard)]
    for dim in range(ndim if replicating else 0):
        sharding = end
        for axis in replicating:
            sharding = sharding.replace(axis, Shard(dim))
        yield sharding
