"""torch's own ShardedTensor."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def sharded_tensors() -> Any:
    """torch's ShardedTensor and the classes that describe one (torch.distributed._shard, 2.11-2.15).

    A namespace with ShardedTensor, Shard, ShardMetadata, ShardedTensorMetadata, TensorProperties, ShardingSpec,
    ChunkShardingSpec, EnumerableShardingSpec and RemoteDevice.
    """
    from types import SimpleNamespace

    import torch.distributed._shard.sharded_tensor
    import torch.distributed._shard.sharding_spec
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed.remote_device import _remote_device

    theirs: Any = torch.distributed._shard.sharded_tensor
    specs: Any = torch.distributed._shard.sharding_spec
    return SimpleNamespace(
        ShardedTensor=theirs.ShardedTensor,
        Shard=theirs.Shard,
        ShardMetadata=ShardMetadata,
        ShardedTensorMetadata=theirs.ShardedTensorMetadata,
        TensorProperties=theirs.TensorProperties,
        ShardingSpec=specs.ShardingSpec,
        ChunkShardingSpec=specs.ChunkShardingSpec,
        EnumerableShardingSpec=specs.EnumerableShardingSpec,
        RemoteDevice=_remote_device,
    )


def their_sharded_tensor(shards: Any, metadata: Any, spec: Any, group: Any) -> Any:
    """torch's ShardedTensor around these shards, which are neither copied nor compared between ranks (2.11-2.15)."""
    return sharded_tensors().ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, sharded_tensor_metadata=metadata, process_group=group, sharding_spec=spec
    )


def group_of_theirs(x: Any) -> Any:
    """The process group of one of torch's ShardedTensors (ShardedTensor._process_group, 2.11-2.15)."""
    return x._process_group


def is_sharded_tensor(x: Any) -> bool:
    """Whether this is torch's ShardedTensor (torch.distributed._shard, 2.11-2.15; FSDP1 makes them)."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    return isinstance(x, ShardedTensor)


def sharded_tensor(
    mine: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    boxes: Mapping[int, Any],
    device_type: str,
    devices: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """torch's ShardedTensor with one shard a rank at most (torch.distributed._shard, 2.11-2.15).

    Args:
        mine: this rank's shard, a tensor or a ShardedTensor; None where it has none.
        shape: global shape.
        dtype: of all shards.
        boxes: global rank -> offset and size of its shard, with elements.
        device_type: of all shards.
        devices: number of devices on a machine, to tell those of other ranks.
        group: the ranks that may have shards.
    """
    from torch.distributed._shard import sharded_tensor as theirs
    from torch.distributed._shard.metadata import ShardMetadata

    def metadata(rank: int, box: Any) -> Any:
        device = device_type if device_type == "cpu" else f"{device_type}:{rank % devices}"
        return ShardMetadata(list(box.offset), list(box.size), f"rank:{rank}/{device}")

    me = dist.get_rank()
    shards = [] if mine is None else [theirs.Shard(mine, metadata(me, boxes[me]))]  # type: ignore[attr-defined]
    properties = theirs.TensorProperties(dtype, torch.strided, False, torch.contiguous_format, False)  # type: ignore[attr-defined]
    whole = theirs.ShardedTensorMetadata(  # type: ignore[attr-defined]
        [metadata(rank, box) for rank, box in boxes.items()], torch.Size(shape), properties
    )
    made = theirs.ShardedTensor._init_from_local_shards_and_global_metadata(shards, whole, process_group=group)  # type: ignore[attr-defined]
    return cast(Tensor, made)


def around(outer: Any, inner: Tensor, device_type: str, devices: int) -> Tensor:
    """torch's ShardedTensor `outer` with `inner` for its one local shard, its metadata on another type of devices.

    Optimizer states may have been brought to another device than the parameters whose sharding they have.
    """
    from types import SimpleNamespace

    boxes = {
        shard.placement.rank(): SimpleNamespace(offset=shard.shard_offsets, size=shard.shard_sizes)
        for shard in outer.metadata().shards_metadata
    }
    return sharded_tensor(inner, outer.size(), outer.dtype, boxes, device_type, devices, outer._process_group)
