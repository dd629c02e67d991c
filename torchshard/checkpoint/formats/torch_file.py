"""The single file of torch.save (the zip format of torch 1.6 and later): reading and writing.

An archive: `data.pkl` is the pickled object with tensors described over numbered records `data/0`, `data/1`, ...;
small records name the format's version, the byte order and the alignment. See zips.py for the frame.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchshard.checkpoint import zips
from torchshard.checkpoint.entries import Index, TensorEntry, check_pieces
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats import torch_legacy
from torchshard.checkpoint.formats.out import Options, OutFile, Output, Slot, unsaid, whole_slot
from torchshard.checkpoint.formats.parts import index_file, named, parts_of
from torchshard.checkpoint.moving.checksums import crc32
from torchshard.checkpoint.pickles.inert import RefusedGlobal
from torchshard.checkpoint.pickles.sharded_values import ALLOWED
from torchshard.checkpoint.pickles.torch_values import read_values
from torchshard.checkpoint.pickles.write import View, dump
from torchshard.checkpoint.sharing import overlapping, stretch
from torchshard.checkpoint.text import printable
from torchshard.checkpoint.trees import flatten
from torchshard.checkpoint.zips import Archive
from torchshard.errors import CheckpointError
from torchshard.layout import Box, contiguous_stride

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
            check_pieces(entry.shape, entry.pieces, about + printable(key), fix=_ALL_RANKS)
    return index


_ALL_RANKS = "The file holds one rank's part: open the files of all ranks, as in open('folder/model_rank*.pt')."


def read_part(files: Files, name: str) -> Index:
    """The index of a file that may hold only one rank's part of some tensors."""
    zipped = files.read(name, 0, min(4, files.size(name))) == b"PK\3\4"
    tree = _read_archive(files, name) if zipped else torch_legacy.read_values(files, name, ALLOWED)
    entries = flatten(tree, files.root / name)
    return Index("torch", entries, lambda: tree, {name: files.size(name)}, {}, (files,))


def _read_archive(files: Files, name: str) -> object:
    archive = Archive(files, name)
    if "constants.pkl" in archive.members or "data.pkl" not in archive.members:
        raise CheckpointError(
            "This is a zip archive, but not one that torch.save made of a state dict.",
            expected="a member data.pkl and none constants.pkl, which TorchScript has",
            where=files.root / name,
        )
    return read_values(archive, ALLOWED)


_FEW = 8  # records; a checkpoint folder holds one small archive a tensor, most of them alike
_alike = functools.lru_cache(maxsize=256)(zips.lay_out)


_BESIDE = ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little"))
_VERSION = b"3\n"


class ArchivePlan(NamedTuple):
    """An archive that is to lie in a file.

    Args:
        start: its first byte there.
        end: the first byte after it.
        slots: where its tensors go.
        pickle: its record data.pkl.
        records: all of it, that one first, places counted from `start`.
    """

    start: int
    end: int
    slots: tuple[Slot, ...]
    pickle: bytes
    records: Sequence[zips.Record]

    def finish(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """All bytes that are no tensor's, with their places in the file; takes the crc32 of each slot."""
        bodies = [self.pickle, *[body for _, body in _BESIDE]]
        for record, body in zip([*self.records[: len(bodies)], self.records[-1]], [*bodies, _VERSION], strict=True):
            yield self.start + record.payload, body
        for at, body in zips.frame(self.records, [*map(crc32, bodies), *crcs, crc32(_VERSION)]):
            yield self.start + at, body


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
    archive = lay_out(tree, 0, weights_only=True)
    return OutFile(name, archive.slots, archive.end, archive.finish)


def lay_out(tree: object, start: int, box: Box | None = None, *, weights_only: bool = False) -> ArchivePlan:
    """The archive that torch.load reads as `tree`.

    Args:
        tree: plain data, with entries anywhere inside.
        start: its first byte in the file.
        box: of the tensor that `tree` is, where only this part of it is stored.
        weights_only: whether torch.load(weights_only=True) is to read it.

    Raises:
        CheckpointError: something that is not plain data.
    """
    numbered = _Numbered(box)
    shared = not isinstance(tree, TensorEntry)
    data = dump(tree, numbered.view, grads=box is None, weights_only=weights_only, shared=shared)
    if box is None and numbered.join():
        data = dump(tree, numbered.view, weights_only=weights_only)
    slots = [whole_slot(entry, 0) if box is None else Slot(entry, 0, box) for entry in numbered.records]
    sizes = [("data.pkl", len(data)), *[(name, len(body)) for name, body in _BESIDE]]
    first = len(sizes)
    sizes += [(f"data/{i}", slot.nbytes) for i, slot in enumerate(slots)]
    sizes.append(("version", len(_VERSION)))
    records = zips.lay_out(sizes) if len(sizes) > _FEW else _alike(tuple(sizes))
    placed = [Slot(entry, start + r.payload, box) for (entry, _, box), r in zip(slots, records[first:-1], strict=True)]
    return ArchivePlan(start, start + records[-1].end + zips.frame_size(records), tuple(placed), data, records)


class _Numbered:
    """Gives each tensor its record: one of its own, unless tensors that overlap were joined."""

    def __init__(self, box: Box | None) -> None:
        self.box = box
        self.records: list[TensorEntry] = []
        self.views: dict[object, View] = {}

    def view(self, entry: TensorEntry) -> View:
        """The tensor's record, and how it lies there."""
        key: object = id(entry)
        if len(entry.pieces) == 1:
            place = entry.pieces[0].place()
            key = (place.extent[:2], place.start, place.stride, entry.shape, entry.dtype, entry.stored_dtype)
        if key not in self.views:
            shape = entry.shape if self.box is None else self.box.size
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
