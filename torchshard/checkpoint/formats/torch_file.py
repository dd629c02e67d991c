"""The single file of torch.save (the zip format of torch 1.6 and later): reading and writing.

An archive: `data.pkl` is the pickled object with tensors described over numbered records `data/0`, `data/1`, ...;
small records name the format's version, the byte order and the alignment. See zips.py for the frame.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchshard.checkpoint import zips
from torchshard.checkpoint.entries import Index, TensorEntry, check_boxes
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats import torch_legacy
from torchshard.checkpoint.formats.out import Options, OutFile, Output, unsaid, whole_slot
from torchshard.checkpoint.formats.parts import index_file, named, parts_of
from torchshard.checkpoint.moving.checksums import crc32
from torchshard.checkpoint.pickles.inert import RefusedGlobal
from torchshard.checkpoint.pickles.sharded_values import ALLOWED
from torchshard.checkpoint.pickles.torch_values import read_values
from torchshard.checkpoint.pickles.write import View, dump
from torchshard.checkpoint.sharing import overlapping, stretch
from torchshard.checkpoint.text import printable
from torchshard.checkpoint.trees import flatten
from torchshard.checkpoint.zips import Archive, Stretch
from torchshard.errors import CheckpointError
from torchshard.layout import contiguous_stride

_STEM = "pytorch_model"


def read(files: Files, name: str) -> Index:
    """The index of a file.

    Raises:
        CheckpointError: damaged, holding more than tensors and plain data, or only a part of a tensor; names what.
    """
    index = read_part(files, name)
    about = f"{files.root / name}: "
    for key, entry in index.entries.items():
        if isinstance(entry, TensorEntry):
            check_boxes(entry.shape, entry.boxes, about + printable(key), fix=_ALL_RANKS)
    return index


_ALL_RANKS = "The file holds one rank's part: open the files of all ranks, as in open('folder/model_rank*.pt')."


def read_part(files: Files, name: str) -> Index:
    """The index of a file that may hold only one rank's part of some tensors."""
    zipped = files.read(name, 0, min(4, files.size(name))) == b"PK\3\4"
    tree = _read_archive(files, name) if zipped else torch_legacy.read_values(files, name, ALLOWED)
    entries = flatten(tree, files.root / name)
    return Index("torch", entries, lambda: tree, {name: files.size(name)}, {}, (files,))


def _read_archive(files: Files, name: str) -> object:
    archive = Archive(Stretch(files, name))
    if "constants.pkl" in archive.members or "data.pkl" not in archive.members:
        raise CheckpointError(
            "This is a zip archive, but not one that torch.save made of a state dict.",
            expected="a member data.pkl and none constants.pkl, which TorchScript has",
            where=files.root / name,
        )
    return read_values(archive, ALLOWED)


_BESIDE = ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little"))
_VERSION = b"3\n"
_FIRST = 1 + len(_BESIDE)  # number of the first record of a tensor


@dataclass(frozen=True, eq=False)
class ArchivePlan:
    """An archive that is to lie somewhere in a file; its places are counted from its own start.

    Args:
        pickle: its record data.pkl.
        records: all of it, that one first.
    """

    pickle: bytes
    records: Sequence[zips.Record]

    @functools.cached_property
    def nbytes(self) -> int:
        """Its length."""
        return self.records[-1].end + zips.frame_size(self.records)

    def payload(self, i: int) -> int:
        """Where the bytes of a tensor begin."""
        return self.records[_FIRST + i].payload

    def finish(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """All bytes that are no tensor's, with their places; takes the crc32 of each tensor."""
        if len(crcs) != 1:
            yield from self._around(crcs)
            return
        crc = crcs[0].to_bytes(4, "little")
        for start, run, at in self._around_one:
            yield start, run[:at] + crc + run[at + 4 :]

    def _around(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        before, after = [self.pickle, *[body for _, body in _BESIDE]], _VERSION
        bodies = itertools.chain(before, itertools.repeat(None, len(crcs)), [after])
        return zips.around(self.records, bodies, itertools.chain(map(crc32, before), crcs, [crc32(after)]))

    @functools.cached_property
    def _around_one(self) -> list[tuple[int, bytes, int]]:
        """Of one tensor: what is before and after it, and where in these its checksum stands."""
        places = zips.crc_places(self.records, _FIRST)
        return [(start, run, place - start) for (start, run), place in zip(self._around([0]), places, strict=True)]


def write(index: Index, options: Options) -> Output:
    """The file that torch.load reads as the nested state dict; or parts under flat names, with an index.

    Tensors that overlap in the source, as tied weights of a torch.save file do, stay views of one storage where they
    are in one file. In parts, objects are in the first.

    Raises:
        CheckpointError: an object that is not plain data; names its key.
    """
    try:
        if options.shard_size is None:
            return Output((_file("", index.tree()),), unsaid=unsaid(index, notes=True, dicts=False))
        sizes = {key: entry.nbytes if isinstance(entry, TensorEntry) else 0 for key, entry in index.entries.items()}
        parts = parts_of(sizes, options.shard_size)
        files = [_file(name, {key: index.entries[key] for key in keys}) for name, keys in named(_STEM, ".bin", parts)]
        tensors = {key: entry for key, entry in index.entries.items() if isinstance(entry, TensorEntry)}
        files.append(index_file(f"{_STEM}.bin.index.json", _STEM, ".bin", parts, tensors))
        apart = [group for group in overlapping(tensors) if not any(set(group) <= set(part) for part in parts)]
        return Output(tuple(files), apart=tuple(apart), unsaid=unsaid(index, notes=True, dicts=True))
    except RefusedGlobal as error:
        fix = "Save again without it, leave it out (exclude), or convert to safetensors, which holds only tensors."
        raise RefusedGlobal(error.name, error.where, fix) from error


def _file(name: str, tree: object) -> OutFile:
    archive, tensors = lay_out(tree, weights_only=True)
    slots = tuple([whole_slot(entry, archive.payload(i)) for i, entry in enumerate(tensors)])
    return OutFile(name, slots, archive.nbytes, (archive.pickle,), archive.finish)


def lay_out(
    tree: object, *, weights_only: bool = False, key: object = None
) -> tuple[ArchivePlan, Sequence[TensorEntry]]:
    """The archive that torch.load reads as `tree`, and the tensors of its records.

    Args:
        tree: plain data, with entries anywhere inside.
        weights_only: whether torch.load(weights_only=True) is to read it.
        key: of the tree, for errors.

    Raises:
        CheckpointError: something that is not plain data.
    """
    numbered = _Numbered()
    data = dump(tree, numbered.view, weights_only=weights_only, key=key)
    if numbered.join():
        data = dump(tree, numbered.view, weights_only=weights_only, key=key)
    sizes = [("data.pkl", len(data)), *[(name, len(body)) for name, body in _BESIDE]]
    sizes += [(f"data/{i}", entry.nbytes) for i, entry in enumerate(numbered.records)]
    sizes.append(("version", len(_VERSION)))
    return ArchivePlan(data, zips.lay_out(sizes)), numbered.records


@functools.lru_cache(maxsize=4096)
def of_tensor(dtype: str, shape: tuple[int, ...]) -> ArchivePlan:
    """The archive of one tensor; a checkpoint folder has one for each, most of them alike."""
    return lay_out(TensorEntry(dtype, shape, ()))[0]


class _Numbered:
    """Gives each tensor its record: one of its own, unless tensors that overlap were joined."""

    def __init__(self) -> None:
        self.records: list[TensorEntry] = []
        self.views: dict[object, View] = {}

    def view(self, entry: TensorEntry) -> View:
        """The tensor's record, and how it lies there."""
        key: object = id(entry)
        if len(entry.pieces) == 1:
            place = entry.pieces[0].place()
            key = (place.extent[:2], place.start, place.stride, entry.shape, entry.dtype, entry.stored_dtype)
        if key not in self.views:
            shape = entry.shape
            self.views[key] = View(len(self.records), math.prod(shape), 0, shape, contiguous_stride(shape))
            self.records.append(entry)
        return self.views[key]

    def join(self) -> bool:
        """Put tensors that overlap in the source into one record; False if none do."""
        groups = overlapping(dict(enumerate(self.records)))
        if not groups:
            return False
        before, joined = self.records, set().union(*groups)
        alone = {i: number for number, i in enumerate([i for i in range(len(before)) if i not in joined])}
        self.records = [before[i] for i in alone]
        views = {i: view._replace(record=alone[i]) for view in self.views.values() if (i := view.record) in alone}
        for group in groups:
            flat, starts = stretch([before[i] for i in group])
            for i, first in zip(group, starts, strict=True):
                stride = before[i].pieces[0].place().stride
                views[i] = View(len(self.records), flat.shape[0], first, before[i].shape, stride)
            self.records.append(flat)
        self.views = {key: views[view.record] for key, view in self.views.items()}
        return True
