"""Sharding specs and metadata, which are torch's own classes, as boxes and their owners; and a spec for grids."""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from torchshard._torch import default_group, group_ranks, is_registered, sharded_tensors
from torchshard.comm.circle import this_rank, world_size
from torchshard.comm.group import Group as Members
from torchshard.comm.living import living
from torchshard.errors import ShardingError
from torchshard.layout.boxes import Box
from torchshard.layout.holding import Holding
from torchshard.layout.pieces import piece

upstream = sharded_tensors()
Shard, ShardMetadata = upstream.Shard, upstream.ShardMetadata
ShardedTensorMetadata, TensorProperties = upstream.ShardedTensorMetadata, upstream.TensorProperties
ShardingSpec: Any = upstream.ShardingSpec
ChunkShardingSpec, EnumerableShardingSpec = upstream.ChunkShardingSpec, upstream.EnumerableShardingSpec


@dataclass
class GridShardingSpec(ShardingSpec):  # type: ignore[misc]
    """Several dims cut, each in pieces of ceil(n / parts).

    Args:
        parts: into how many pieces each dim is cut; 1 for a dim that is not.
        placements: where each part lies, such as "rank:0/cpu"; the last dim fastest.
    """

    parts: Sequence[int]
    placements: list[Any]

    def __post_init__(self) -> None:
        """Read placements that are text."""
        self.parts = tuple(self.parts)
        self.placements = [_placement(place) for place in self.placements]

    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: Any) -> Any:
        """Offsets, sizes and placement of every part of a tensor of these sizes.

        Raises:
            ShardingError: the grid has another number of dims than the tensor, or of parts than there are placements.
        """
        grid = list(itertools.product(*map(range, self.parts)))
        if len(self.parts) != len(tensor_sizes) or len(grid) != len(self.placements):
            raise ShardingError(
                "A grid does not fit its tensor or its placements.",
                expected=f"{len(tensor_sizes)} numbers of parts, and {len(grid)} placements",
                got=f"parts {tuple(self.parts)}, {len(self.placements)} placements",
            )
        shards = []
        for at, place in zip(grid, self.placements, strict=True):
            cut = [piece(n, p, k) for n, p, k in zip(tensor_sizes, self.parts, at, strict=True)]
            shards.append(ShardMetadata([start for start, _ in cut], [length for _, length in cut], place))
        return ShardedTensorMetadata(shards, torch.Size(tensor_sizes), tensor_properties)

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
        """Refused, as it would give one of torch's own ShardedTensors."""
        raise NotImplementedError("use torchshard.state_dict.to_sharded_tensor(tensor, spec=...)")


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, which copies of a tensor share: torch's staging of asynchronous checkpoints copies the rest.

    Attributes:
        process_group: as it was given; it may have been destroyed since.
        members: who was in it then; None where there is none.
        place: this rank and the number of all, then.
    """

    process_group: dist.ProcessGroup | None
    members: Members | None = None
    place: tuple[int, int] = (0, 1)

    @classmethod
    def of(cls, process_group: "dist.ProcessGroup | Group | None") -> "Group":
        """The group, with its members; as it is where they are known."""
        if isinstance(process_group, Group):
            return process_group
        if process_group is None:
            return cls(None, None, (this_rank(), world_size()))
        known = _members.get(process_group)
        if known is None:
            ranks, seat = tuple(group_ranks(process_group)), process_group.rank()
            made = weakref.ref(process_group)
            members = Members(process_group.group_name, len(ranks), seat, None, ranks, made)
            known = _members[process_group] = members, (this_rank(), world_size())
        return cls(process_group, *known)

    def living(self) -> dist.ProcessGroup | None:
        """The process group, or where it was destroyed the one of its name, which has the same ranks in their places.

        Raises:
            ShardingError: there is none like it.
        """
        group, members = self.process_group, self.members
        if group is None or members is None or is_registered(group):
            return group
        return living(members, "a ShardedTensor", _REMAKE)

    @property
    def decides(self) -> tuple[Any, ...]:
        """What of it decides about a graph: its name, who is in it, and who this rank is."""
        return None if self.members is None else (self.members.name, self.members.members), self.place[0]

    def __deepcopy__(self, memo: Any) -> "Group":
        return self


AnyGroup = dist.ProcessGroup | Group | None
_members: "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Members, tuple[int, int]]]" = weakref.WeakKeyDictionary()
_REMAKE = "take torchshard.state_dict.to_full(x) before destroy_process_group(), and to_sharded_tensor() of that later"


def group_given(group: Any) -> dist.ProcessGroup:
    """The process group that the user gave, or the default one.

    Raises:
        ShardingError: this rank is not in it, or it is none.
    """
    if group is None:
        return default_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ShardingError(
            "This rank is not in the process group.",
            expected="a group that it is in",
            got="what new_group() gives other ranks",
            where=f"rank {dist.get_rank()}",
            fix="make this call on the ranks of the group only",
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ShardingError(
            "This is no process group.",
            expected="a torch.distributed.ProcessGroup",
            got=repr(group),
            fix="mesh.get_group(), or torch.distributed.new_group(ranks)",
        )
    return group


def _placement(place: Any) -> Any:
    return place if isinstance(place, upstream.RemoteDevice) else upstream.RemoteDevice(place)


def metadata_of(spec: Any, size: Sequence[int], properties: Any) -> Any:
    """The metadata of a tensor of this size, cut as `spec` says.

    An empty last part lies at the end of the tensor; torch's ChunkShardingSpec would put it beyond.

    Raises:
        ShardingError: the spec does not fit the size, or is none.
    """
    if not isinstance(spec, ShardingSpec):
        raise ShardingError(
            "This is no sharding spec.",
            expected="a ChunkShardingSpec, an EnumerableShardingSpec or a GridShardingSpec",
            got=spec,
            fix='ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), of torch.distributed._shard.sharding_spec',
        )
    try:
        made = spec.build_metadata(torch.Size(size), tensor_properties=properties)
    except ValueError as error:
        raise ShardingError(
            "The sharding spec does not fit the tensor.",
            expected=f"a spec of parts that make up the shape {tuple(size)}",
            got=f"{spec}\n{error}",
        ) from error
    shards = [
        ShardMetadata(list(box.offset), list(box.size), shard.placement)
        for shard, box in zip(made.shards_metadata, boxes_of(made), strict=True)
    ]
    return ShardedTensorMetadata(shards, made.size, properties)


def boxes_of(metadata: Any) -> list[Box]:
    """The boxes of all parts, in the order of the metadata."""
    return [box_of(shard, metadata.size) for shard in metadata.shards_metadata]


def box_of(shard: Any, size: Sequence[int]) -> Box:
    """The box of one part; an empty one that lies beyond the tensor is moved to its end."""
    sizes = tuple(shard.shard_sizes)
    offsets = tuple(shard.shard_offsets)
    if 0 in sizes:
        offsets = tuple([min(o, n) for o, n in zip(offsets, size, strict=True)])
    return Box(offsets, sizes)


def holding_of(metadata: Any, ranks: Sequence[int]) -> Holding:
    """Who holds which part; `ranks` may hold nothing."""
    owners = [shard.placement.rank() for shard in metadata.shards_metadata]
    return Holding.of(metadata.size, zip(owners, boxes_of(metadata), strict=True), ranks)


def inferred_spec(metadata: Any) -> Any:
    """A ChunkShardingSpec where the parts are the pieces of one dim in order, else an EnumerableShardingSpec."""
    boxes, size = boxes_of(metadata), metadata.size
    placements = [shard.placement for shard in metadata.shards_metadata]
    for dim, n in enumerate(size):
        pieces = [piece(n, len(boxes), k) for k in range(len(boxes))]
        wanted = [
            Box((0,) * dim + (start,) + (0,) * (len(size) - dim - 1), (*size[:dim], length, *size[dim + 1 :]))
            for start, length in pieces
        ]
        if boxes == wanted:
            return ChunkShardingSpec(dim, placements)
    return EnumerableShardingSpec(metadata.shards_metadata)


def chunks(dim: int, ranks: Sequence[int], device: torch.device) -> Any:
    """One piece along `dim` for each of these ranks, on a device each."""
    return ChunkShardingSpec(dim, [place_alike(rank, device) for rank in ranks])


def flat_size(size: Sequence[Any]) -> torch.Size:
    """Sizes given as numbers or as one sequence."""
    dims = list(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else list(size)
    if not all(isinstance(n, int) for n in dims):
        known = (
            "" if None not in dims else "; where it is not known, ShardedTensor.from_local(tensor, dim) exchanges sizes"
        )
        raise TypeError(f"size has to be a sequence of ints, found: {dims}{known}")
    return torch.Size(dims)


def asking(shards: Sequence[Any], metadata: Any, requires_grad: bool) -> tuple[Sequence[Any], Any]:
    """The parts and the metadata of a tensor, or others around the same memory, that ask for gradients or do not."""
    properties = metadata.tensor_properties
    if properties.requires_grad == requires_grad:
        return shards, metadata
    changed = replace(metadata, tensor_properties=replace(properties, requires_grad=requires_grad))
    return [Shard(s.tensor.detach().requires_grad_(requires_grad), s.metadata) for s in shards], changed


def on_device(metadata: Any, device: torch.device) -> Any:
    """The same parts, each on this device of its rank."""
    shards = [
        ShardMetadata(list(s.shard_offsets), list(s.shard_sizes), place_alike(s.placement.rank(), device))
        for s in metadata.shards_metadata
    ]
    return replace(metadata, shards_metadata=shards)


def place_of(rank: int, device: torch.device | str) -> Any:
    """A device of a rank, in torch's words."""
    return upstream.RemoteDevice(f"rank:{rank}/{device}")


def place_alike(rank: int, device: torch.device) -> Any:
    """This device of this rank; of another rank, the one of the same number as that rank has on its host."""
    if device.index is not None and device.type not in ("cpu", "meta") and rank != this_rank():
        device = torch.device(device.type, rank % torch.get_device_module(device).device_count())
    return place_of(rank, device)


def device_here(metadata: Any) -> torch.device:
    """Where this rank's parts lie; of one that has none, the current device of the kind on which others have theirs."""
    places, here = [s.placement for s in metadata.shards_metadata], this_rank()
    mine = [place.device() for place in places if place.rank() == here]
    return mine[0] if mine else torch.device(places[0].device().type)
