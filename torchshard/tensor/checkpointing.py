"""How torch.distributed.checkpoint saves and loads a DTensor: its checkpointable protocol, with torch's metadata.

A tensor is written by every rank that holds a part (the planner drops replicas), as chunks named by their offsets. An
empty part lies at the end of the tensor along the dims where it is empty, as torch has it.
"""

from collections.abc import Iterable, Sequence

from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torchshard._torch import keeps_one_part
from torchshard.errors import ShardingError
from torchshard.layout.boxes import Box
from torchshard.layout.cuts import boxes_at
from torchshard.tensor.calls import guards
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.layout import SEVERED
from torchshard.tensor.moving.pending import arrived
from torchshard.unsupported import unsupported


def write_items(x: DTensor, name: str) -> list[WriteItem]:
    """What this rank writes of `x`; nothing on a rank outside of the mesh.

    All ranks ask, and the planner then has some of them read: a severed view is brought up to date here.
    """
    guards.refresh(x)
    properties = TensorProperties.create_from_tensor(x._local_tensor)
    properties.requires_grad = x.requires_grad
    return items(name, x.size(), properties, chunks(x))


def items(
    name: str, size: Size, properties: TensorProperties, chunks: Iterable[ChunkStorageMetadata]
) -> list[WriteItem]:
    """Write items of a tensor of this size, one for each of these chunks.

    Raises:
        ShardingError: there are several, and the writer would keep one of them, as torch's of safetensors do.
    """
    chunks = list(chunks)
    if len(chunks) > 1 and keeps_one_part():
        raise ShardingError(
            f"This rank holds {len(chunks)} parts of {name}, of which a file of safetensors would keep one.",
            expected="one part of a tensor a rank, as torch's writer names them by the tensor",
            got=[f"offsets {list(chunk.offsets)}, sizes {list(chunk.sizes)}" for chunk in chunks],
            where=name,
            fix="save in torch's own format, and then `torchshard convert FOLDER NEW --to safetensors`",
        )
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in chunks
    ]


def chunks(x: DTensor) -> list[ChunkStorageMetadata]:
    """Offsets and sizes of what this rank holds; nothing on a rank outside of the mesh.

    Raises:
        ShardingError: `x` is Partial: no rank holds its values.
    """
    layout = x._spec
    if layout.sharding.partial:
        raise ShardingError(
            "A Partial tensor cannot be saved or loaded: no rank holds its values.",
            expected="Shard(dim) or Replicate() on every axis",
            got=layout,
            fix="x.redistribute(placements=[Replicate()] * mesh.ndim)",
        )
    return [ChunkStorageMetadata(offsets=Size(_offset(x, box)), sizes=Size(box.size)) for box, _ in _held(x)]


def _held(x: DTensor) -> list[tuple[Box, Box]]:
    """The boxes that this rank holds, each with where it lies in the local tensor."""
    layout, at = x._spec, x._spec.mesh.coordinate
    return [] if at is None else boxes_at(layout.sharding, layout.shape, at)


def _offset(x: DTensor, box: Box) -> list[int]:
    return [o if n else whole for o, n, whole in zip(*box, x.shape, strict=True)]


def targets(x: DTensor) -> list[ChunkStorageMetadata]:
    """Offsets and sizes of what this rank loads into.

    Raises:
        UnsupportedOperatorError: as `chunks`, by another class: where torch asks, it drops what a ValueError says. Or
            `x` is a severed view, as what is read into its parts would not reach its base.
    """
    try:
        found = chunks(x)
    except ShardingError as error:
        told = {"expected": error.expected, "got": error.got, "fix": error.fix}
        raise unsupported(error.what, **told) from None
    if x._spec.marks & SEVERED:
        raise unsupported(
            "A view that had to be moved cannot be loaded into: it shares no memory with its base.",
            expected="a DTensor of its own, or a view whose base is split along other dims",
            got=f"a view, {x._spec}",
            fix="load into view.clone(), then view.copy_(it); torchshard.parallel.fsdp.load does so",
        )
    return found


def shard(x: DTensor, index: MetadataIndex) -> Tensor:
    """What an index names of the local tensor: all of it, or one of its runs. No rank is asked: not all come here."""
    chunks(x)
    local, held = arrived(x._local_tensor), _held(x)
    if len(held) == 1:
        return local
    return named_by(index, [(box, local[inside.slices]) for box, inside in held], "x.__create_chunk_list__()")


def named_by(index: MetadataIndex, parts: Sequence[tuple[Box, Tensor]], source: str) -> Tensor:
    """The part of this rank that begins at the offsets of an index.

    Args:
        index: by which torch asks for it.
        parts: those that there are.
        source: what tells their offsets, for the message.

    Raises:
        ShardingError: there is none.
    """
    for box, part in parts:
        if index.offset is not None and box.offset == tuple(index.offset):
            return part
    raise ShardingError(
        "This rank has no part with these offsets.",
        expected=f"the offsets of one of {[box for box, _ in parts]}",
        got=index.offset,
        where=index.fqn,
        fix=f"MetadataIndex(name, offsets), with offsets of {source}",
    )
