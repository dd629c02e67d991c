"""How a tensor goes from one mesh to another: reduced where it is Partial, then copied, each rank what it lacks.

The two meshes may share ranks, all or some of them, or none. What is Partial is reduced within the source mesh first,
to Replicate or straight to Shard; what shall be Partial becomes so within the target mesh, and what shall be replicated
there may come in pieces that its ranks gather. Of all such ways the soonest is taken.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchshard.layout.copies import Crossing, most_given
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
    return min(passages(source, target, shape, itemsize), key=lambda p: p.seconds)


def passages(source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> Iterator[Passage]:
    """All ways that `passage` chooses from."""
    starts = _whole_or_split(source, source.partial, len(shape))
    for start, end in itertools.product(starts, _whole_or_split(target, target.unsplit, len(shape))):
        crossing = Crossing(start, end, shape)
        lacked = crossing.most_lacked() * itemsize
        given = most_given(start, end, math.prod(start.largest(shape))) * itemsize if lacked else 0
        before, after = transition(source, start, shape, itemsize), transition(end, target, shape, itemsize)
        yield Passage(before, crossing, after, lacked, given)


def _whole_or_split(sharding: Sharding, axes: Sequence[int], ndim: int) -> Iterator[Sharding]:
    """With Replicate on what is Partial, or a dim split by all these axes; those in runs or units are left alone."""
    yield sharding.without_partial()
    for dim in range(ndim if axes else 0):
        if dim not in sharding.cuts:
            split = sharding
            for axis in axes:
                split = split.replace(axis, Shard(dim))
            yield split
