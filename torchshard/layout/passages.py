"""How a tensor goes from one mesh to another: reduced where it is Partial, then copied, each rank what it lacks.

The two meshes may share ranks, all or some of them, or none. What is Partial is reduced within the source mesh first,
to Replicate or straight to Shard, whichever moves fewer bytes; what shall be Partial becomes so within the target mesh.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torchshard.layout.copies import Crossing
from torchshard.layout.layout import Sharding
from torchshard.layout.placements import Shard
from torchshard.layout.transitions import Transition, transition


@dataclass(frozen=True, slots=True)
class Passage:
    """From a sharding of one mesh to one of another.

    Attributes:
        before: within the source mesh, until nothing is Partial.
        crossing: who copies what from whom.
        after: within the target mesh; masks only.
        lacked: bytes that a rank of the target mesh receives at most in the crossing.
    """

    before: Transition
    crossing: Crossing
    after: Transition
    lacked: int

    @property
    def nbytes(self) -> int:
        """Bytes that a rank receives at most, in all."""
        return self.before.nbytes + self.lacked + self.after.nbytes


def passage(source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> Passage:
    """The way from `source` to `target`, shardings of two meshes, for a tensor of this shape and item size.

    The same on every rank, as long as it is asked for the same.

    Raises:
        ShardingError: a target that is Partial in a way that cannot be made exactly.
    """
    end = target.without_partial()
    after = transition(end, target, shape, itemsize)
    found = []
    for start in _reduced(source, len(shape)):
        crossing = Crossing(start, end, shape)
        lacked = crossing.most_lacked() * itemsize
        found.append(Passage(transition(source, start, shape, itemsize), crossing, after, lacked))
    return min(found, key=lambda p: p.nbytes)


def _reduced(source: Sharding, ndim: int) -> Iterator[Sharding]:
    """What the source may be reduced to: Replicate on all Partial axes, or the same dim split by all of them."""
    yield source.without_partial()
    if source.partial:
        for dim in range(ndim):
            sharding = source
            for axis in source.partial:
                sharding = sharding.replace(axis, Shard(dim))
            yield sharding
