"""What a writer hands over to be moved: files, where the bytes of each tensor go in them, and how the rest is made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.entries import Index, TensorEntry, whole_box
from torchshard.checkpoint.trees import attributes
from torchshard.layout import Box, Mesh, Placement


class Slot(NamedTuple):
    """The stretch of a file that will hold a box of a tensor, the last dim fastest; `offset` is its first byte."""

    entry: TensorEntry
    offset: int
    box: Box

    @property
    def nbytes(self) -> int:
        """Length of the stretch."""
        return self.box.numel * DTYPES[self.entry.dtype].itemsize


def unsaid(index: Index, *, notes: bool, dicts: bool) -> tuple[str, ...]:
    """Names of what is known beside keys and values, and is lost: attributes of tensors always.

    Args:
        index: what is written.
        notes: whether its notes are lost, all but the one that says a format.
        dicts: whether attributes of dicts are, such as the `_metadata` of a module's state dict.
    """
    lost = [name for name in index.notes if notes and name != "format"]
    lost += attributes(index.tree(), "the state dict") if dicts else ()
    for key, entry in index.entries.items():
        if isinstance(entry, TensorEntry):
            lost += [f"{key}.{name}" for name in entry.attributes]
    return tuple(lost)


def whole_slot(entry: TensorEntry, offset: int) -> Slot:
    """A slot for all of a tensor."""
    return Slot(entry, offset, whole_box(entry))


@dataclass(frozen=True, slots=True)
class Options:
    """What a writer may be told.

    Args:
        shard_size: bytes of tensors a file, at most; the destination is then a folder. None is one file.
        mesh: ranks for which a dcp folder is cut; None is one.
        placements: glob of keys to placements on the mesh, the first that matches; others are not cut.
    """

    shard_size: int | None = None
    mesh: Mesh | None = None
    placements: Mapping[str, Sequence[Placement]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file to be written. All offsets are known before the first byte is read.

    Args:
        name: relative to the destination; "" where the destination is this one file.
        slots: the tensors, in the order of their offsets.
        nbytes: size of the whole file.
        said: what it says beside the tensors: names, and all that is no tensor.
        finish: takes the crc32 of each slot and gives everything else as (offset, bytes).
    """

    name: str
    slots: tuple[Slot, ...]
    nbytes: int
    said: Sequence[bytes]
    finish: Callable[[Sequence[int]], Iterator[tuple[int, bytes]]]


@dataclass(frozen=True, slots=True)
class Output:
    """All files of a destination.

    Args:
        files: one named "" or several with names.
        left_out: keys that the format cannot hold, each with the reason in brackets where it is not plain data.
        apart: groups of keys whose tensors share memory in the source, and will not.
        unsaid: names of what the source says beside keys and values, and the format has no place for.
    """

    files: tuple[OutFile, ...]
    left_out: tuple[str, ...] = ()
    apart: tuple[Sequence[str], ...] = ()
    unsaid: tuple[str, ...] = ()

    @property
    def is_folder(self) -> bool:
        """Whether the destination is a folder."""
        return any(file.name for file in self.files)

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum([file.nbytes for file in self.files])

    @property
    def slots(self) -> list[Slot]:
        """Those of all files."""
        return [slot for file in self.files for slot in file.slots]
