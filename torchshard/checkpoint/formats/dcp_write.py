"""Writing what torch.distributed.checkpoint reads: `.metadata`, and for each rank files of many small archives.

Tensors are cut by mesh and placements, as the ranks of that mesh would have saved them: each box once, by the first
rank that holds it. What is not cut goes to the rank that has least to write.
"""

import functools
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torchshard.checkpoint.entries import Index, ObjectEntry, TensorEntry, whole_box
from torchshard.checkpoint.formats.dcp import METADATA
from torchshard.checkpoint.formats.out import Options, OutFile, Output, Slot, unsaid, whole_slot
from torchshard.checkpoint.formats.torch_file import ArchivePlan, lay_out, of_tensor
from torchshard.checkpoint.pickles.inert import LAYOUT, Global, Record, Size
from torchshard.checkpoint.pickles.write import Alike, Call, Pairs, View, dump
from torchshard.checkpoint.sharing import overlapping
from torchshard.checkpoint.text import printable, said_of
from torchshard.checkpoint.trees import Steps, leaves, nest
from torchshard.errors import CheckpointError, ShardingError
from torchshard.layout import Box, Mesh, Placement
from torchshard.layout.cuts import boxes_of_all

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_NAMES = frozenset(
    [f"{_MODULE}.{name}" for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta",
    )] + [_STORAGE_INFO]
)  # fmt: skip


class _Item(NamedTuple):
    """What is stored by itself: a box of a tensor, or an object."""

    key: str
    value: object
    box: Box | None


class _Archive(NamedTuple):
    """Where an item is stored: its archive, from which byte of a file on, and the tensors in it."""

    key: str
    box: Box | None
    start: int
    plan: ArchivePlan
    slots: tuple[Slot, ...]


@dataclass(slots=True)
class _Rank:
    """The files of one rank: a list of archives each."""

    number: int
    limit: int | None
    files: list[list[_Archive]] = field(default_factory=list)
    end: int = 0
    nbytes: int = 0

    def add(self, item: _Item) -> None:
        """Put an archive behind the others."""
        if not self.files or (self.limit is not None and self.end + _size(item) > self.limit and self.files[-1]):
            self.files.append([])
            self.end = 0
        key, value, box = item
        if isinstance(value, TensorEntry) and box is not None:
            plan = of_tensor(value.dtype, box.size)
            slots = [Slot(value, self.end + plan.payload(0), box)]
        else:
            plan, tensors = lay_out(value, key=key)
            slots = [whole_slot(entry, self.end + plan.payload(i)) for i, entry in enumerate(tensors)]
        self.files[-1].append(_Archive(key, box, self.end, plan, tuple(slots)))
        self.nbytes += plan.nbytes
        self.end += plan.nbytes

    def name(self, i: int) -> str:
        """Of the file of this number."""
        return f"__{self.number}_{i}.distcp"


def _size(item: _Item) -> int:
    return item.box.numel * item.value.itemsize if item.box and isinstance(item.value, TensorEntry) else 0


def write(index: Index, options: Options) -> Output:
    """The folder that torch.distributed.checkpoint loads.

    Raises:
        CheckpointError: an object that is not plain data, placements that do not fit, or keys of dicts that are one as
            text; names the key.
    """
    mesh = options.mesh or Mesh((1,))
    ranks = [_Rank(rank, options.shard_size) for rank in range(mesh.size)]
    chunks: dict[str, list[Box]] = {}
    anywhere: list[_Item] = []
    found = list(_leaves(index))
    placements = said_of([key for key, _, value in found if isinstance(value, TensorEntry)], options.placements)
    for key, _, value in found:
        if not isinstance(value, TensorEntry):
            anywhere.append(_Item(key, value, None))
            continue
        boxes = _boxes(key, value, mesh, placements.get(key))
        chunks[key] = [box for box, _ in boxes]
        for box, number in boxes:
            item = _Item(key, value, box)
            if number is None:
                anywhere.append(item)
            else:
                ranks[number].add(item)
    least = [(rank.nbytes, rank.number) for rank in ranks]
    heapq.heapify(least)
    for item in sorted(anywhere, key=_size, reverse=True):
        rank = ranks[least[0][1]]
        rank.add(item)
        heapq.heapreplace(least, (rank.nbytes, rank.number))
    files = [file for rank in ranks for file in _files(rank)]
    body = _metadata(found, chunks, ranks)
    files.append(OutFile(METADATA, (), len(body), (body,), lambda crcs: iter([(0, body)])))
    tensors = {key: value for key, _, value in found if isinstance(value, TensorEntry)}
    lost = unsaid(index, notes=True, dicts=True)
    return Output(tuple(files), apart=tuple(overlapping(tensors)), unsaid=lost)


def _leaves(index: Index) -> list[tuple[str, Steps, object]]:
    """Key, place and value of all that is stored on its own, as torch flattens a state dict: not into tuples."""
    found: dict[str, tuple[str, Steps, object]] = {}
    tree = index.tree()
    for path, value in leaves(tree, "the state dict", as_torch=True) if tree else ():
        key = ".".join(map(str, path))
        if key in found:
            raise CheckpointError("Two entries have the same dotted name.", got=printable(key))
        found[key] = key, path, value
    there = ObjectEntry(lambda: None)
    # As text, keys of one dict may be one (0 and "0"): then a reader would not know what is whose.
    nest(dict.fromkeys(found, there), {key: path for key, path, _ in found.values()}, "keys, which become text")
    return list(found.values())


def _boxes(
    key: str, entry: TensorEntry, mesh: Mesh, placements: Sequence[Placement] | None
) -> list[tuple[Box, int | None]]:
    """The boxes of a tensor, each with the first rank that holds it; None: any may write it."""
    if placements is None or mesh.size == 1:
        return [(whole_box(entry), None)]
    try:
        layout = mesh.sharding(placements).layout(entry.shape, (1,) * len(entry.shape), None)
    except ShardingError as error:
        raise CheckpointError(
            f"The placements do not fit: {error.what}",
            expected=error.expected,
            got=error.got,
            where=printable(key),
            fix="placements for this key before those of globs that match it:"
            f" '{printable(key)}={','.join(['R'] * len(placements))}'",
        ) from error
    first: dict[Box, int] = {}
    for rank, box in boxes_of_all(layout.sharding, layout.shape):
        if box.numel or not entry.nbytes:
            first.setdefault(box, rank)
    return list(first.items()) if len(first) > 1 else [(box, None) for box in first]


def _files(rank: _Rank) -> Iterator[OutFile]:
    for i, archives in enumerate(rank.files):
        slots = tuple([slot for archive in archives for slot in archive.slots])
        nbytes = archives[-1].start + archives[-1].plan.nbytes
        objects = [archive.plan.pickle for archive in archives if archive.box is None]
        yield OutFile(rank.name(i), slots, nbytes, objects, partial(_finish, archives))


def _finish(archives: Sequence[_Archive], crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    at = 0
    for _, _, start, plan, slots in archives:
        for place, body in plan.finish(crcs[at : at + len(slots)]):
            yield start + place, body
        at += len(slots)


# --- .metadata ---------------------------------------------------------------------------------------------------


def _metadata(
    found: Sequence[tuple[str, Steps, object]], chunks: Mapping[str, Sequence[Box]], ranks: Sequence[_Rank]
) -> bytes:
    fields = {
        "state_dict_metadata": Pairs(lambda: _described(found, chunks)),
        "planner_data": Pairs(lambda: ((key, path) for key, path, _ in found)),
        "storage_data": Pairs(lambda: _stored(ranks)),
        "storage_meta": None,
        "version": "1.0.0",
    }

    def view(entry: TensorEntry) -> View:
        raise AssertionError("metadata holds no tensors")

    return dump(_record(f"{_MODULE}.Metadata", fields), view, _NAMES, shared=False)


def _described(
    found: Sequence[tuple[str, Steps, object]], chunks: Mapping[str, Sequence[Box]]
) -> Iterator[tuple[str, object]]:
    """Each key and what is stored of it."""
    alike = functools.lru_cache(maxsize=4096)(_tensor)
    an_object = Alike(_record(f"{_MODULE}.BytesStorageMetadata", None))
    for key, _, value in found:
        if isinstance(value, TensorEntry):
            yield key, alike(value.dtype, value.shape, tuple(chunks[key]))
        else:
            yield key, an_object


def _tensor(dtype: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> Alike:
    parts = [
        _record(f"{_MODULE}.ChunkStorageMetadata", {"offsets": Size(box.offset), "sizes": Size(box.size)})
        for box in boxes
    ]
    fields = {"properties": _properties(dtype), "size": Size(shape), "chunks": parts}
    return Alike(_record(f"{_MODULE}.TensorStorageMetadata", fields))


def _properties(dtype: str) -> Record:
    layout = Record(LAYOUT, ("torch.strided",))
    memory_format = Call(f"{_MODULE}._MEM_FORMAT_ENCODING", (0,))
    return _record(f"{_MODULE}.TensorProperties", (Global(f"torch.{dtype}"), layout, False, memory_format, False))


def _stored(ranks: Sequence[_Rank]) -> Iterator[tuple[Record, Record]]:
    """Each key with the offset of a box, and where that is."""
    for rank in ranks:
        for i, archives in enumerate(rank.files):
            name = rank.name(i)
            for key, box, start, plan, _ in archives:
                offset = None if box is None else Size(box.offset)
                index = _record(f"{_MODULE}.MetadataIndex", {"fqn": key, "offset": offset, "index": None})
                info = {"relative_path": name, "offset": start, "length": plan.nbytes}
                yield index, _record(_STORAGE_INFO, info)


def _record(name: str, state: object) -> Record:
    made = Record(name, ())
    made.state = state
    return made
