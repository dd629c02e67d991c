"""How torch.distributed.checkpoint saves and loads a ShardedTensor: its checkpointable protocol."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import WriteItem

from torchshard.layout.boxes import Box
from torchshard.tensor.checkpointing import items, named_by
from torchshard.tensor.sharded.moving import parts
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor


def write_items(x: ShardedTensor, name: str) -> list[WriteItem]:
    """What this rank writes of `x`: each of its parts."""
    return items(name, x.size(), TensorProperties(dtype=x.dtype, requires_grad=x.requires_grad), chunks(x))


def chunks(x: ShardedTensor) -> list[ChunkStorageMetadata]:
    """Offsets and sizes of what this rank holds."""
    return [ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.size)) for box, _ in _named(x)]


def shard(x: ShardedTensor, index: Any) -> Tensor:
    """The part that begins at the offsets of an index."""
    return named_by(index, _named(x), "x.local_shards()")


def _named(x: ShardedTensor) -> list[tuple[Box, Tensor]]:
    """This rank's parts, which go by their offsets: without the empty ones, which may lie where another begins.

    Of a tensor without elements all are empty, and all alike.
    """
    return [(box, part) for box, part in parts(x) if box.numel or not x.numel()]
