"""Writing what torch.distributed.checkpoint reads: `.metadata`, and for each rank files of many small archives.

Tensors are cut by mesh and placements, as the ranks of that mesh would have saved them: each box once, by the first
rank that holds it. What is not cut goes to the rank that has least to write.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchshard.checkpoint.entries import Index, ObjectEntry, TensorEntry
from torchshard.checkpoint.formats.dcp import METADATA
from torchshard.checkpoint.formats.out import Options, OutFile, Output, unsaid
from torchshard.checkpoint.formats.torch_file import ArchivePlan, lay_out
from torchshard.checkpoint.pickles.inert import LAYOUT, Global, Record, Size
from torchshard.checkpoint.pickles.write import Call, View, dump
from torchshard.checkpoint.sharing import overlapping
from torchshard.checkpoint.text import printable, said_of
from torchshard.checkpoint.trees import Steps, leaves, nest
from torchshard.errors import CheckpointError, ShardingError
from torchshard.layout import Box, Mesh, Placement, whole

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_NAMES = frozenset(
    [f"{_MODULE}.{name}" for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta",
    )] + [_STORAGE_INFO]
)  # fmt: skip


class _Item(NamedTuple):
    """What one archive holds: a box of a tensor, or an object."""

    key: str
    value: object
    box: Box | None


@dataclass(slots=True)
class _Rank:
    """The files of one rank: a list of archives each."""

    number: int
    limit: int | None
    files: list[list[tuple[_Item, int, ArchivePlan]]] = field(default_factory=list)
    end: int = 0
    nbytes: int = 0

    def add(self, item: _Item) -> None:
        """Put an archive behind the others."""
        if not self.files or (self.limit is not None and self.end + _size(item) > self.limit and self.files[-1]):
            self.files.append([])
            self.end = 0
        plan = lay_out(item.value, self.end, item.box)
        self.files[-1].append((item, self.end, plan))
        self.nbytes += plan.end - self.end
        self.end = plan.end

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
    places: dict[str, Steps] = {}
    anywhere: list[_Item] = []
    found = list(_leaves(index))
    placements = said_of([key for key, _, value in found if isinstance(value, TensorEntry)], options.placements)
    for key, path, value in found:
        places[key] = path
        if not isinstance(value, TensorEntry):
            anywhere.append(_Item(key, value, None))
            continue
        boxes = _boxes(key, value, mesh, placements.get(key))
        chunks[key] = [box for box, _ in boxes]
        for box, rank in boxes:
            item = _Item(key, value, box)
            if rank is None:
                anywhere.append(item)
            else:
                ranks[rank].add(item)
    for item in sorted(anywhere, key=_size, reverse=True):
        min(ranks, key=lambda rank: rank.nbytes).add(item)
    files = [file for rank in ranks for file in _files(rank)]
    body = _metadata(found, chunks, places, ranks)
    files.append(OutFile(METADATA, (), len(body), lambda crcs: iter([(0, body)])))
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
        return [(whole(entry.shape), None)]
    try:
        layout = mesh.sharding(placements).layout(entry.shape, (1,) * len(entry.shape), None)
    except ShardingError as error:
        raise CheckpointError(
            f"The placements do not fit: {error.what}", expected=error.expected, got=error.got, where=printable(key)
        ) from error
    first: dict[Box, int] = {}
    for rank, box in zip(mesh.ranks, layout.boxes(), strict=True):
        if box.numel or not entry.nbytes:
            first.setdefault(box, rank)
    return list(first.items()) if len(first) > 1 else [(box, None) for box in first]


def _files(rank: _Rank) -> Iterator[OutFile]:
    for i, archives in enumerate(rank.files):
        slots = tuple([slot for _, _, plan in archives for slot in plan.slots])
        nbytes = archives[-1][2].end
        yield OutFile(rank.name(i), slots, nbytes, _finisher([plan for _, _, plan in archives]))


def _finisher(plans: Sequence[ArchivePlan]) -> Callable[[Sequence[int]], Iterator[tuple[int, bytes]]]:
    def finish(crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        at = 0
        for plan in plans:
            yield from plan.finish(crcs[at : at + len(plan.slots)])
            at += len(plan.slots)

    return finish


# --- .metadata ---------------------------------------------------------------------------------------------------


def _metadata(
    found: Sequence[tuple[str, Steps, object]],
    chunks: Mapping[str, Sequence[Box]],
    places: Mapping[str, Steps],
    ranks: Sequence[_Rank],
) -> bytes:
    described = {key: _described(value, chunks.get(key, ())) for key, _, value in found}
    stored: dict[Any, Any] = {}
    for rank in ranks:
        for i, archives in enumerate(rank.files):
            for item, start, plan in archives:
                info = {"relative_path": rank.name(i), "offset": start, "length": plan.end - start}
                stored[_index_of(item)] = _record(_STORAGE_INFO, info)
    fields = {
        "state_dict_metadata": described,
        "planner_data": dict(places),
        "storage_data": stored,
        "storage_meta": None,
        "version": "1.0.0",
    }

    def view(entry: TensorEntry) -> View:
        raise AssertionError("metadata holds no tensors")

    return dump(_record(f"{_MODULE}.Metadata", fields), view, _NAMES, shared=False)


def _described(value: object, boxes: Sequence[Box]) -> Record:
    if not isinstance(value, TensorEntry):
        return _record(f"{_MODULE}.BytesStorageMetadata", None)
    parts = [
        _record(f"{_MODULE}.ChunkStorageMetadata", {"offsets": Size(box.offset), "sizes": Size(box.size)})
        for box in boxes
    ]
    fields = {"properties": _properties(value.dtype), "size": Size(value.shape), "chunks": parts}
    return _record(f"{_MODULE}.TensorStorageMetadata", fields)


def _properties(dtype: str) -> Record:
    layout = Record(LAYOUT, ("torch.strided",))
    memory_format = Call(f"{_MODULE}._MEM_FORMAT_ENCODING", (0,))
    return _record(f"{_MODULE}.TensorProperties", (Global(f"torch.{dtype}"), layout, False, memory_format, False))


def _index_of(item: _Item) -> Record:
    offset = None if item.box is None else Size(item.box.offset)
    return _record(f"{_MODULE}.MetadataIndex", {"fqn": item.key, "offset": offset, "index": None})


def _record(name: str, state: object) -> Record:
    made = Record(name, ())
    made.state = state
    return made
