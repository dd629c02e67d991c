"""Who copies which box from whom, where a tensor changes its sharding without a regular collective.

The answer for one rank costs what it returns, so that it can be asked on meshes of any size. Nothing is copied twice to
one rank, and a rank that has a part itself takes it from itself.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchshard.layout.boxes import Box
from torchshard.layout.grid import Coordinate
from torchshard.layout.layout import Sharding
from torchshard.layout.placements import Shard

Part = tuple[Coordinate, Box]

MANY = 64  # above so many ranks, what moves is bounded instead of counted


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies within one mesh, from `source` to `target`: two shardings of it with the same Partial axes.

    Along axes on which the source is Partial, and on those that replicate before and after, a rank takes from ranks of
    its own coordinate. Where one axis replicates before and another one after, several ranks hold a piece and several
    want it: these are spread over those, and none gives more than `most_given` says. So every copy stays between
    ranks that differ only on axes which the change concerns.
    """

    source: Sharding
    target: Sharding
    shape: tuple[int, ...]

    def receives(self, coordinate: Coordinate) -> list[Part]:
        """What the rank at `coordinate` takes: from which coordinate, and which box."""
        box = self.target.box(self.shape, coordinate)
        pieces = self.source.holders(self.shape, box, {a: coordinate[a] for a in self.source.unsplit})
        return [(self._chosen(coordinate, at), part) for at, part in pieces] if self._replicas else list(pieces)

    def sends(self, coordinate: Coordinate) -> list[Part]:
        """What the rank at `coordinate` gives: to which coordinate, and which box."""
        box, replicas = self.source.box(self.shape, coordinate), self._replicas
        same = {a: coordinate[a] for a in self.source.unsplit if a not in replicas}
        asked = self.target.holders(self.shape, box, same)
        return (
            [(to, part) for to, part in asked if self._chosen(to, coordinate) == coordinate]
            if replicas
            else list(asked)
        )

    @property
    def _rivals(self) -> Sequence[int]:
        """Axes along which ranks want the same, and do not hold the same."""
        return [a for a in self.target.unsplit if type(self.source.placements[a]) is Shard]

    @property
    def _replicas(self) -> Sequence[int]:
        """Axes along which ranks hold the same before, and not after; none where nobody wants the same."""
        return [a for a in self.source.unsplit if type(self.target.placements[a]) is Shard] if self._rivals else []

    def _chosen(self, to: Coordinate, at: Coordinate) -> Coordinate:
        """Of the replicas of the piece at `at`, the coordinate from which the rank at `to` takes it."""
        replicas = self._replicas
        chosen = [to[a] if a in replicas else k for a, k in enumerate(at)]
        if tuple(chosen) == to:
            return to
        turn = _number(to, self.source.mesh.shape, self._rivals)
        for a in reversed(replicas):
            turn, k = divmod(turn, n := self.source.mesh.shape[a])
            chosen[a] = (to[a] + k) % n
        return tuple(chosen)

    def most_lacked(self, axes: Sequence[int]) -> int:
        """The most elements that a rank does not hold yet; all it will hold where there are too many ranks to ask each.

        Args:
            axes: those that the change concerns.
        """
        mesh, most = self.source.mesh, 0
        if math.prod([mesh.shape[a] for a in axes]) > MANY:
            return math.prod(self.target.largest(self.shape))
        coordinate = [0] * mesh.ndim  # elsewhere 0, where parts are largest
        for place in itertools.product(*[range(mesh.shape[a]) for a in axes]):
            for a, k in zip(axes, place, strict=True):
                coordinate[a] = k
            wanted = self.target.box(self.shape, coordinate)
            held = wanted.meet(self.source.box(self.shape, coordinate))
            most = max(most, wanted.numel - (held.numel if held else 0))
        return most


@dataclass(frozen=True, slots=True)
class Crossing:
    """Copies between two meshes, which may share ranks; neither sharding is Partial.

    A rank that is in both meshes and holds a part itself takes it from itself; the others are spread over the replicas,
    those that want the same part one after another.
    """

    source: Sharding
    target: Sharding
    shape: tuple[int, ...]

    def receives(self, coordinate: Coordinate) -> list[Part]:
        """What the rank at `coordinate` of the target mesh takes: from which coordinate of the source, which box."""
        box = self.target.box(self.shape, coordinate)
        pieces = self.source.holders(self.shape, box, dict.fromkeys(self.source.unsplit, 0))
        return [(self._chosen(coordinate, at), part) for at, part in pieces]

    def sends(self, coordinate: Coordinate) -> list[Part]:
        """What the rank at `coordinate` of the source mesh gives: to which coordinate of the target, which box."""
        box = self.source.box(self.shape, coordinate)
        asked = self.target.holders(self.shape, box, {})
        return [(to, part) for to, part in asked if self._chosen(to, coordinate) == coordinate]

    def most_lacked(self) -> int:
        """The most elements that a rank of the target mesh does not hold yet.

        All that it will hold where there are too many ranks to ask each.
        """
        source, target = self.source.mesh, self.target.mesh
        if target.size > MANY:
            return math.prod(self.target.largest(self.shape))
        most = 0
        for to, rank in zip(target.coordinates(), target.ranks, strict=True):
            wanted, own = self.target.box(self.shape, to), source.coordinate_of(rank)
            held = None if own is None else wanted.meet(self.source.box(self.shape, own))
            most = max(most, wanted.numel - (held.numel if held else 0))
        return most

    def _chosen(self, to: Coordinate, at: Coordinate) -> Coordinate:
        """Of the replicas of the piece at `at`, the coordinate from which the target rank at `to` takes it."""
        free = self.source.unsplit
        own = self.source.mesh.coordinate_of(self.target.mesh.ranks[self.target.mesh.linear(to)])
        if own is not None and all(own[a] == k for a, k in enumerate(at) if a not in free):
            return own
        alike = self.target.unsplit
        others = [a for a in range(self.target.mesh.ndim) if a not in alike]
        chosen, turn = list(at), _number(to, self.target.mesh.shape, [*others, *alike])
        for a in reversed(free):
            turn, chosen[a] = divmod(turn, self.source.mesh.shape[a])
        return tuple(chosen)


def most_given(source: Sharding, target: Sharding, part: int) -> int:
    """How much a rank gives to others at most, if its part is `part`: each piece is spread over those that hold it."""
    return part * -(-target.replicas // source.replicas)


def _number(coordinate: Coordinate, mesh_shape: Sequence[int], axes: Sequence[int]) -> int:
    """The coordinates on these axes as one number; along the last one they follow one another."""
    number = 0
    for a in axes:
        number = number * mesh_shape[a] + coordinate[a]
    return number
