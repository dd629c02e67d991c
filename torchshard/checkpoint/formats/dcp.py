"""Reading what torch.distributed.checkpoint writes: a folder with `.metadata` and files of many small archives.

`.metadata` is a pickle of the class Metadata: for each key the shape, type and boxes of a tensor (or the word that it
is an object), and for each box the file, offset and length of a torch.save archive that holds just that box; or the
file, the offset of its safetensors part, and the length of the box.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.entries import Entry, Index, ObjectEntry, Piece, TensorEntry, check_boxes
from torchshard.checkpoint.files import Files, is_there
from torchshard.checkpoint.formats.dcp_archives import Archives
from torchshard.checkpoint.formats.dcp_safetensors import Blocks
from torchshard.checkpoint.formats.joining import check_ranks, joined
from torchshard.checkpoint.pickles.alike import AlikeMachine
from torchshard.checkpoint.pickles.inert import Global, Record, record
from torchshard.checkpoint.pickles.torch_values import ALLOWED as TORCH_VALUES
from torchshard.checkpoint.pickles.torch_values import attribute, read_values, sizes
from torchshard.checkpoint.pickles.unpickle import load
from torchshard.checkpoint.text import printable
from torchshard.checkpoint.trees import Steps, contradiction, nest
from torchshard.checkpoint.zips import Archive, Stretch
from torchshard.errors import CheckpointError
from torchshard.layout import Box

METADATA = ".metadata"
_OF_RANK = re.compile(rf"__(\d{{1,6}}){re.escape(METADATA)}")


def is_part(path: Path) -> bool:
    """Whether a file has a name of those that make up a folder. With one piece in it, it looks like a whole archive."""
    return path.name.endswith((METADATA, ".distcp"))


def _path(*parts: Any) -> str:
    return "/".join([part for part in parts if isinstance(part, str)])


_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_METADATA = "torch.distributed.checkpoint.metadata"
# Until torch 2.2 the properties of a tensor were those of ShardedTensor.
_OLDER = tuple(
    [f"torch.distributed._shard.sharded_tensor.metadata.{name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING")]
)
_OLDER_PROPERTIES = _OLDER[0]
_PROPERTIES, _INDEX, _CHUNK = [
    f"{_METADATA}.{n}" for n in ("TensorProperties", "MetadataIndex", "ChunkStorageMetadata")
]
_TENSOR, _BYTES = [f"{_METADATA}.{n}" for n in ("TensorStorageMetadata", "BytesStorageMetadata")]
_ENCODINGS = (f"{_METADATA}._MEM_FORMAT_ENCODING", _OLDER[1])
_RECORDS = (
    *[
        f"{_METADATA}.{name}"
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ],
    _STORAGE_INFO,
    *_OLDER,
)  # fmt: skip
_PATHS = [
    f"{module}.{kind}" for module in ("pathlib", "pathlib._local") for kind in ("Path", "PosixPath", "WindowsPath")
]
ALLOWED: Mapping[str, Global] = MappingProxyType(
    {name: TORCH_VALUES[name] for name in TORCH_VALUES if not name.startswith("torch._utils.")}
    | {name: record(name) for name in _RECORDS}
    | {name: Global(name, _path) for name in _PATHS}
    | {"builtins.getattr": attribute(dict.fromkeys(_ENCODINGS, ()))}
)


def read(path: Path) -> Index | None:
    """The index of a checkpoint folder; None where there are no metadata.

    Ranks that saved without coordination (`use_collectives=False`) have metadata of their own.

    Raises:
        CheckpointError: damaged, incomplete, or stored in a way that is not read; names file and field.
    """
    files = Files(path)
    if is_there(path / METADATA):
        return _Reader(files, METADATA).index()
    ranks = {int(match[1]): match[0] for one in path.iterdir() if (match := _OF_RANK.fullmatch(one.name))}
    if not ranks:
        return None
    check_ranks(ranks, path)
    readers = {rank: _Reader(files, ranks[rank], whole=False) for rank in sorted(ranks)}
    parts = {rank: reader.entries() for rank, reader in readers.items()}
    entries = {key: entry for part in parts.values() for key, entry in part.items()}
    paths = {key: steps for rank, reader in readers.items() for key, steps in reader.paths(parts[rank]).items()}
    nest(entries, paths, path)  # says now if they contradict each other
    sized = {name: files.size(name) for reader in readers.values() for name in sorted(reader.used)}
    return joined("dcp", parts, lambda: nest(entries, paths, path), sized, files)


class _Reader:
    """Goes through the metadata of one folder, checking every field that is used.

    Args:
        files: of the folder.
        name: of the metadata.
        whole: whether all tensors have to be whole; those of one rank need not be.
    """

    def __init__(self, files: Files, name: str, *, whole: bool = True) -> None:
        self.files, self.whole = files, whole
        self.archives, self.blocks = Archives(self.files), Blocks(self.files)
        self.where = f"{files.root / name}"
        data = self.files.read(name, 0, self.files.size(name))
        metadata = load(data, ALLOWED, self.where, machine=AlikeMachine)
        self.metadata = self.expect(metadata, Record, "metadata", f"{_METADATA}.Metadata")
        self.stored = self.storage_infos()
        self.used = {name}
        self.kinds: dict[Record, tuple[str, tuple[int, ...], Sequence[Box]]] = {}

    def expect(self, value: Any, kind: type, field: str, name: str | None = None, key: str | None = None) -> Any:
        """The value of a field (of a key), if it is of the kind, and the record of the class, that it should be."""
        if not isinstance(value, kind) or (name is not None and getattr(value, "name", None) != name):
            raise CheckpointError(
                f"The field {field} is not as torch writes it.",
                expected=name or kind.__name__,
                got=printable(value),
                where=self.at(key),
            )
        return value

    def at(self, key: str | None) -> str:
        """The metadata file, and the key concerned, for errors."""
        return self.where if key is None else f"{self.where}: {printable(key)}"

    def storage_infos(self) -> dict[tuple[str, tuple[int, ...] | None], Record]:
        """What is known of each stored archive, by key and offset of the box."""
        stored = {}
        for index, info in self.expect(self.metadata.field("storage_data"), dict, "storage_data").items():
            index = self.expect(index, Record, "storage_data", _INDEX)
            key = self.expect(index.field("fqn"), str, "fqn")
            offset = index.field("offset")
            at = None if offset is None else sizes(offset, "offset", self.where)
            stored[key, at] = self.expect(info, Record, "storage_data", _STORAGE_INFO, key)
        return stored

    def index(self) -> Index:
        """Entries, nesting and files."""
        entries = self.entries()
        paths = self.paths(entries)
        nest(entries, paths, self.where)  # says now if they contradict each other
        version = self.metadata.field("version")
        return Index(
            "dcp",
            entries,
            lambda: nest(entries, paths, self.where),
            {name: self.files.size(name) for name in sorted(self.used)},
            {"version": version} if isinstance(version, str) else {},
            (self.files,),
        )

    def entries(self) -> dict[str, Entry]:
        """What is stored, by flat key."""
        described = self.expect(self.metadata.field("state_dict_metadata"), dict, "state_dict_metadata")
        entries: dict[str, Entry] = {}
        for key, description in described.items():
            self.expect(key, str, "state_dict_metadata")
            self.expect(description, Record, "state_dict_metadata", key=key)
            if description.name == _BYTES:
                entries[key] = self.object_entry(key)
            else:
                self.expect(description, Record, "state_dict_metadata", _TENSOR, key)
                entries[key] = self.tensor_entry(key, description)
            entries[key].key = key
        return entries

    def paths(self, entries: Mapping[str, Entry]) -> dict[str, Steps]:
        """Where each key was in the nested state dict; a key alone is its own place."""
        mapping = self.metadata.field("planner_data")
        mapping = {} if mapping is None else self.expect(mapping, dict, "planner_data")
        paths: dict[str, Steps] = {}
        for key in entries:
            path = self.expect(mapping.get(key, (key,)), tuple, "planner_data", key=key)
            for step in path:
                self.expect(step, str if type(step) is str else int, "planner_data", key=key)
            if ".".join(map(str, path)) != key:
                raise contradiction(key, path, self.where)
            paths[key] = path
        return paths

    def tensor_entry(self, key: str, description: Record) -> TensorEntry:
        """A tensor, its boxes checked to fit into their archives."""
        # Descriptions that are spelled alike are one.
        kind = self.kinds.get(description)
        if kind is None:
            kind = self.kinds[description] = self.kind(key, description)
        dtype, shape, boxes = kind
        return TensorEntry(dtype, shape, tuple([self.piece(key, box, dtype) for box in boxes]))

    def kind(self, key: str, description: Record) -> tuple[str, tuple[int, ...], Sequence[Box]]:
        """Type and shape of a tensor, and its boxes, checked to make it up where they have to."""
        where = self.at(key)
        shape = sizes(description.field("size"), "size", where)
        dtype = self.dtype(key, description)
        boxes: dict[Box, None] = {}
        for chunk in self.expect(description.field("chunks"), list, "chunks", key=key):
            chunk = self.expect(chunk, Record, "chunks", _CHUNK, key)
            box = Box(sizes(chunk.field("offsets"), "offsets", where), sizes(chunk.field("sizes"), "sizes", where))
            if len(box.offset) != len(shape) or len(box.size) != len(shape):
                raise CheckpointError("A box has another number of dims than its tensor.", got=box, where=where)
            # Ranks that hold nothing say so with an empty box; ranks that hold the same share one archive.
            if box.numel:
                boxes[box] = None
        if self.whole:
            check_boxes(shape, list(boxes), where)
        return dtype, shape, list(boxes)

    def dtype(self, key: str, description: Record) -> str:
        """The type's name; the other properties are not used since they say nothing about the bytes."""
        properties = self.expect(description.field("properties"), Record, "properties", key=key)
        if properties.name != _OLDER_PROPERTIES:
            self.expect(properties, Record, "properties", _PROPERTIES, key)
        state = self.expect(properties.state, tuple, "properties", key=key)
        dtype = self.expect(state[0] if state else None, Global, "properties", key=key).name.removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError("The type of a tensor is not read.", got=dtype, where=self.at(key))
        return str(dtype)

    def piece(self, key: str, box: Box, dtype: str) -> Piece:
        """A box and the way to its archive, which must be long enough to hold it."""
        file, offset, length = self.archive(key, box.offset)
        needed = math.prod(box.size) * DTYPES[dtype].itemsize
        if needed > length:
            raise CheckpointError(
                "A box is larger than the archive that holds it.",
                expected=f"{needed} bytes",
                got=f"{length} bytes",
                where=self.at(key),
            )
        if length == needed:  # an archive is longer than what it holds
            return Piece(box, partial(self.blocks.place, key, box, dtype, (file, offset)))
        return Piece(box, partial(self.archives.place, key, box.size, dtype, (file, offset, length)))

    def archive(self, key: str, offset: tuple[int, ...] | None) -> tuple[str, int, int]:
        """File, offset and length of the archive of a box; the file is there and long enough."""
        info = self.stored.get((key, offset))
        if info is None:
            raise CheckpointError("The metadata does not say where a box is stored.", got=offset, where=self.at(key))
        if info.field("transform_descriptors"):
            raise CheckpointError(
                "An entry is stored transformed, which is not read.",
                got=printable(info.field("transform_descriptors")),
                where=self.at(key),
                fix="Load it with torch.distributed.checkpoint and save it without extensions.",
            )
        file = self.expect(info.field("relative_path"), str, "relative_path", key=key)
        at, length = sizes((info.field("offset"), info.field("length")), "place (offset, length)", self.at(key))
        if at + length > self.files.size(file):
            raise CheckpointError(
                "A file is cut off.",
                expected=f"{at + length} bytes at least",
                got=f"{self.files.size(file)} bytes",
                where=f"{self.files.root / file}: {printable(key)}",
            )
        self.used.add(file)
        return file, at, length

    def object_entry(self, key: str) -> ObjectEntry:
        """An object, unread."""
        files, (file, offset, length) = self.files, self.archive(key, None)
        return ObjectEntry(lambda: read_values(Archive(Stretch(files, file, offset, length), key)), length)
