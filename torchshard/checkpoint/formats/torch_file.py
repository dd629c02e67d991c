"""The single file of torch.save (the zip format of torch 1.6 and later): reading and writing.

An archive: `data.pkl` is the pickled object with tensors described over numbered records `data/0`, `data/1`, ...;
small records name the format's version, the byte order and the alignment. See zips.py for the frame.
"""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchshard.checkpoint import zips
from torchshard.checkpoint.entries import Index, TensorEntry, flatten
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats.out import OutFile, Slot
from torchshard.checkpoint.pickles.inert import RefusedGlobal
from torchshard.checkpoint.pickles.torch_values import read_values
from torchshard.checkpoint.pickles.write import dump
from torchshard.checkpoint.zips import Archive
from torchshard.errors import CheckpointError


def read(path: Path) -> Index:
    """The index of a file.

    Raises:
        CheckpointError: damaged, or holding more than tensors and plain data; names what.
    """
    files = Files(path.parent)
    archive = Archive(files, path.name)
    if "constants.pkl" in archive.members or "data.pkl" not in archive.members:
        raise CheckpointError(
            "This is a zip archive, but not one that torch.save made of a state dict.",
            expected="a member data.pkl and none constants.pkl, which TorchScript has",
            where=path,
        )
    tree = read_values(archive)
    return Index("torch", flatten(tree, path), lambda: tree, {path.name: files.size(path.name)}, {})


def write(index: Index) -> OutFile:
    """The file that torch.load reads as the nested state dict.

    Tensors that lie at one place of the source, as tied weights of a torch.save file do, stay one.

    Raises:
        CheckpointError: an object that is not plain data; names its key.
    """
    numbered = _Numbered()
    try:
        data = dump(index.tree(), numbered.number)
    except RefusedGlobal as error:
        fix = "Save again without it, or convert to safetensors, which leaves out all but tensors."
        raise RefusedGlobal(error.name, error.where, fix) from error
    small = [("data.pkl", data), (".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")]
    tensors = numbered.entries
    sizes = [(name, len(body)) for name, body in small]
    sizes += [(f"data/{i}", entry.nbytes) for i, entry in enumerate(tensors)]
    records = zips.lay_out([*sizes, ("version", 2)])
    bodies = [body for _, body in small]

    def finish(crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        ends = [*records[: len(bodies)], records[-1]]
        for record, body in zip(ends, [*bodies, b"3\n"], strict=True):
            yield record.payload, body
        yield from zips.frame(records, [*map(zlib.crc32, bodies), *crcs, zlib.crc32(b"3\n")])

    payloads = [record.payload for record in records[len(bodies) : -1]]
    slots = tuple([Slot(entry, at) for entry, at in zip(tensors, payloads, strict=True)])
    return OutFile(slots, records[-1].end + zips.frame_size(records), True, finish)


class _Numbered:
    """Gives each tensor the number of its record."""

    def __init__(self) -> None:
        self.entries: list[TensorEntry] = []
        self.numbers: dict[object, int] = {}

    def number(self, entry: TensorEntry) -> int:
        key: object = id(entry)
        if len(entry.pieces) == 1:
            place = entry.pieces[0].place()
            key = (entry.files.root, place.extent.file, place.start, place.stride, entry.shape, entry.dtype)
        if key not in self.numbers:
            self.numbers[key] = len(self.entries)
            self.entries.append(entry)
        return self.numbers[key]
