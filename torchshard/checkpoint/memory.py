"""Memory that a checkpoint is loaded into: which values go where, and whether they are all there at the end."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchshard.checkpoint.entries import TensorEntry
from torchshard.checkpoint.moving.plan import blocks
from torchshard.checkpoint.moving.reading import read_box_into
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError
from torchshard.layout import Box

if TYPE_CHECKING:
    from torch import Tensor

_STAGE = 16 * 2**20  # bytes that pass through memory at a time on their way to a device


class Part(NamedTuple):
    """A box of a tensor of the checkpoint, and the memory that is to hold it."""

    key: str
    entry: TensorEntry
    box: Box
    local: "Tensor"


def stages(box: Box, itemsize: int) -> Iterator[tuple[Box, int]]:
    """The box in runs of some MiB, each with the bytes before it."""
    at = 0
    for block in blocks(box, _STAGE // itemsize):
        yield block, at
        at += block.numel * itemsize


def check_shared(parts: Sequence[Part], path: Path) -> None:
    """Raise CheckpointError where a part is no longer there, since another one has gone to the same memory.

    Only parts whose memory may be that of others are read again.
    """
    for group in _near(parts):
        for part in group:
            if not _is_there(part):
                raise CheckpointError(
                    "Tensors of the state dict share memory, and the checkpoint has different values for them.",
                    got=", ".join(printable(other.key) for other in group),
                    where=path,
                    fix="Leave all but one of them out of the state dict, or give each memory of its own.",
                )


def _near(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Groups of parts that reach into one another's stretch of memory, in their order."""
    of_storage = defaultdict(list)
    for number, part in enumerate(parts):
        of_storage[part.local.device, part.local.untyped_storage().data_ptr()].append((*_stretch(part.local), number))
    for found in of_storage.values():
        group: list[int] = []
        end = 0
        for first, last, number in sorted(found):
            if first >= end:
                if len(group) > 1:
                    yield [parts[at] for at in sorted(group)]
                group = []
            group.append(number)
            end = max(end, last)
        if len(group) > 1:
            yield [parts[at] for at in sorted(group)]


def _stretch(x: "Tensor") -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the first one after it."""
    start = int(x.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start * x.itemsize, (start + reach + 1) * x.itemsize


def _is_there(part: Part) -> bool:
    """Whether the memory holds what the checkpoint has."""
    import torch

    from torchshard._torch import bytes_of

    _, entry, box, local = part
    for block, _ in stages(box, entry.itemsize):
        stage = bytearray(block.numel * entry.itemsize)
        read_box_into(entry, block, memoryview(stage))
        held = local[block.within(box)].resolve_conj().resolve_neg().contiguous().cpu()
        if not torch.equal(bytes_of(held), torch.frombuffer(stage, dtype=torch.uint8)):
            return False
    return True
