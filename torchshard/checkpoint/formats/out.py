"""What a writer hands to the runner: where the bytes of each tensor go, and how the rest of the file is made."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchshard.checkpoint.entries import TensorEntry


class Slot(NamedTuple):
    """The stretch of a file that will hold a tensor, the last dim fastest; `offset` is its first byte."""

    entry: TensorEntry
    offset: int


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
