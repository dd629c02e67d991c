"""Who holds which part of one tensor, however that came about; and who copies what from whom to hold it otherwise.

Layouts, explicit lists of boxes, strided splits and whole tensors all become a Holding, so that a conversion between
any two of them is one thing: where the boxes of the target meet those of the source.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torchshard.errors import ShardingError
from torchshard.layout.boxes import Box, check_tiling, overlaps, whole
from torchshard.layout.cuts import boxes_of_all
from torchshard.layout.layout import Sharding


class Copy(NamedTuple):
    """A part that goes to, or comes from, the rank `peer`; which may be this one."""

    peer: int
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """The boxes of a tensor and their owners; boxes without elements are left out.

    Attributes:
        shape: of the whole tensor.
        owners: box -> the ranks that hold it, ascending. Distinct boxes have no element in common.
        ranks: who takes part, ascending; some may hold nothing.
    """

    shape: tuple[int, ...]
    owners: Mapping[Box, tuple[int, ...]]
    ranks: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], held: Iterable[tuple[int, Box]], ranks: Iterable[int] = ()) -> "Holding":
        """The holding in which each of these ranks has each of these boxes; `ranks` may have nothing."""
        owners: dict[Box, list[int]] = {}
        everyone = set(ranks)
        for rank, box in held:
            everyone.add(rank)
            if box.numel:
                owners.setdefault(box, []).append(rank)
        return Holding(tuple(shape), {b: tuple(sorted(set(r))) for b, r in owners.items()}, tuple(sorted(everyone)))

    @staticmethod
    def of_sharding(sharding: Sharding, shape: Sequence[int]) -> "Holding":
        """What the ranks of a mesh hold; terms of Partial axes count as values."""
        return Holding.of(shape, boxes_of_all(sharding, shape))

    @staticmethod
    def everywhere(shape: Sequence[int], ranks: Sequence[int]) -> "Holding":
        """All of it, on each of these ranks."""
        return Holding.of(shape, [(rank, whole(shape)) for rank in ranks])

    def check(self) -> None:
        """Check that each element is held, and in one box.

        Raises:
            ShardingError: names a box outside, two that overlap, or how many elements are missing.
        """
        check_tiling(self.shape, list(self.owners))

    def largest(self) -> int:
        """Elements of the largest box; the same on every rank."""
        return max((box.numel for box in self.owners), default=0)

    def parts_of(self, rank: int) -> list[Box]:
        """The boxes of one rank."""
        return [box for box, ranks in self.owners.items() if rank in ranks]


# Many tensors of a state dict share their holdings, so what follows from the last of them is kept.
_kept = lru_cache(maxsize=64)


@_kept
def listed(holding: Holding) -> str:
    """Each box with the ranks that hold it, as text; as long as there are ranks."""
    return "; ".join(f"{box} on {ranks}" for box, ranks in holding.owners.items())


@_kept
def receives(source: Holding, target: Holding, rank: int) -> list[Copy]:
    """What `rank` takes to hold its boxes of `target`, and from whom; in order of the parts' offsets.

    Raises:
        ShardingError: nobody holds a part that it needs.
    """
    boxes, wanted = list(source.owners), target.parts_of(rank)
    found = [Copy(_giver(source.owners[boxes[o.source]], rank), o.box) for o in overlaps(wanted, boxes)]
    if (lack := sum(box.numel for box in wanted) - sum(copy.box.numel for copy in found)) > 0:
        raise ShardingError(
            "Nobody holds a part of the tensor that is needed.",
            expected=f"boxes that cover the shape {source.shape}",
            got=f"{lack} elements missing for rank {rank}",
        )
    return sorted(found, key=_by_offset)


@_kept
def sends(source: Holding, target: Holding, rank: int) -> list[Copy]:
    """What `rank` gives to the ranks that take it from this one, itself left out; in order of the parts' offsets."""
    return sorted(_sends(source, target, rank), key=_by_offset)


@_kept
def lacking(source: Holding, target: Holding) -> bool:
    """Whether some rank of `target` does not hold all of its part in `source`; the same on every rank."""
    boxes, wanted = list(source.owners), list(target.owners)
    return any(
        not set(target.owners[wanted[o.target]]) <= set(source.owners[boxes[o.source]]) for o in overlaps(wanted, boxes)
    )


def _sends(source: Holding, target: Holding, rank: int) -> Iterator[Copy]:
    boxes, mine = list(target.owners), source.parts_of(rank)
    for o in overlaps(boxes, mine):
        owners = source.owners[mine[o.source]]
        for to in target.owners[boxes[o.target]]:
            if to != rank and _giver(owners, to) == rank:
                yield Copy(to, o.box)


def _giver(owners: Sequence[int], to: int) -> int:
    """Of the ranks that hold a part, the one that gives it to `to`: itself, else one whose number differs late.

    On meshes of powers of two this spreads the load over all replicas, and stays within a node where it can.
    """
    return owners[0] if len(owners) == 1 else min(owners, key=lambda owner: owner ^ to)


def _by_offset(copy: Copy) -> tuple[int, tuple[int, ...]]:
    return copy.peer, copy.box.offset
