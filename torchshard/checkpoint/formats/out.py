"""What a writer hands to the runner: where the bytes of each tensor go, and how the rest of the file is made."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchshard.checkpoint.entries import TensorEntry
from torchshard.layout import Box, whole


class Slot(NamedTuple):
    """A stretch of a file that will hold a box of a tensor, the last dim fastest.

    Args:
        entry: the tensor.
        offset: first byte in the file.
        part: the box; None is the full tensor.
    """

    entry: TensorEntry
    offset: int
    part: Box | None = None

    @property
    def box(self) -> Box:
        """The box of the tensor that goes here."""
        return whole(self.entry.shape) if self.part is None else self.part

    @property
    def nbytes(self) -> int:
        """Length of the stretch."""
        return self.box.numel * self.entry.itemsize


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file to be written. All offsets are known before the first byte is read.

    Args:
        slots: the tensors, in the order of their offsets.
        nbytes: size of the whole file.
        checksums: whether `finish` needs them.
        finish: takes the crc32 of each slot (zeros where not needed) and gives everything else as (offset, bytes).
        left_out: keys that the format cannot hold, each with the reason in brackets where it is not plain data.
    """

    slots: tuple[Slot, ...]
    nbytes: int
    checksums: bool
    finish: Callable[[Sequence[int]], Iterator[tuple[int, bytes]]]
    left_out: tuple[str, ...] = ()


def crc_of(data: bytes) -> int:
    """crc32 of a small body."""
    return zlib.crc32(data)
