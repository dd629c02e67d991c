"""Reading folders of safetensors (or torch.save) files, as Hugging Face lays them out.

With an index: `model.safetensors.index.json` or `pytorch_model.bin.index.json` says which file holds which key.
Without: all `*.safetensors` of the folder. Files that torch.distributed.checkpoint wrote in this format say in their
metadata where each tensor lies in the full one (DCP_SHARDING_INFO); their pieces are put together.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchshard.checkpoint.entries import Entry, Index, TensorEntry, check_boxes, common_notes, narrowed
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats import safetensors, torch_file
from torchshard.checkpoint.formats.json_text import parse
from torchshard.checkpoint.formats.safetensors import SHARDING
from torchshard.checkpoint.pickles.torch_values import sizes
from torchshard.checkpoint.text import listed, printable
from torchshard.errors import CheckpointError

INDEX_SUFFIX = ".index.json"
_ONE_RANK = "shard-"
_INCOMPLETE = (
    "Copy the missing files, if not all are here. Of several parts that a rank holds of one tensor torch "
    "keeps the last: save again, in torch's own format, and convert that."
)
_INDEX_LIMIT = 2**28  # bytes of an index
_PART = re.compile(rf"(?:{_ONE_RANK}\d+-)?(.*)-(\d+)-of-(\d+)\.safetensors\Z", re.DOTALL)


def find_index(folder: Path) -> Path | None:
    """The index of a folder; that of safetensors where there are two.

    Raises:
        CheckpointError: several of one kind.
    """
    found = sorted(path for path in folder.iterdir() if path.name.endswith(INDEX_SUFFIX))
    best = [path for path in found if path.name.endswith(f".safetensors{INDEX_SUFFIX}")] or found
    if len(best) > 1:
        names = ", ".join(path.name for path in best)
        raise CheckpointError("The folder holds several indices.", got=names, where=folder, fix="Open one of them.")
    return best[0] if best else None


def find_parts(folder: Path) -> list[Path]:
    """The safetensors files of a folder without an index."""
    return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")


def read_indexed(files: Files, name: str) -> Index:
    """The index of the files that an index file names.

    Raises:
        CheckpointError: a damaged index, a file missing or lacking a key, or damaged itself.

    Warns:
        UserWarning: names what the files hold beyond the keys that the index has for them.
    """
    path, size = files.root / name, files.size(name)
    if size > _INDEX_LIMIT:
        raise CheckpointError("The index is out of all proportion.", got=f"{size} bytes", where=path)
    index = parse(files.read(name, 0, size), "index", path)
    wanted = index.get("weight_map")
    if not isinstance(wanted, dict) or not all(isinstance(name, str) for name in wanted.values()):
        raise CheckpointError("The index has no weight_map from keys to files.", where=path)
    parts = {part: _part(files, part) for part in sorted(set(wanted.values()))}
    entries: dict[str, Entry] = {}
    for key, part in wanted.items():
        entry = parts[part].entries.get(key)
        if entry is None:
            raise CheckpointError(
                "A file lacks a key that the index says it holds.", got=printable(key), where=files.root / part
            )
        entries[key] = entry
    more = [f"{part}: {key}" for part, its in parts.items() for key in its.entries if wanted.get(key) != part]
    warn_of_left_out(more)
    metadata = index.get("metadata")
    facts = {key: str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}
    return _index(files, entries, parts, {name: size}, facts)


def warn_of_left_out(names: Sequence[str]) -> None:
    """Say what an index does not name, if anything."""
    if names:
        warnings.warn(f"not in the index, and left out: {listed(names)}", stacklevel=5)


def _part(files: Files, name: str) -> Index:
    if name.endswith(".safetensors"):
        return of_whole_tensors(safetensors.read(files, name), files.root / name)
    return torch_file.read(files, name)


def read_folder(paths: list[Path]) -> Index:
    """The index of all safetensors files of a folder.

    Raises:
        CheckpointError: a part missing, a key in two files, or pieces that do not make up their tensor.
    """
    _check_all_there(paths)
    files = Files(paths[0].parent, found=[path.name for path in paths])
    parts = {path.name: safetensors.read(files, path.name) for path in paths}
    cut = [name for name, part in parts.items() if SHARDING in part.metadata]
    if cut and len(cut) < len(parts):
        raise CheckpointError(
            "Some files hold pieces of tensors, and some do not.", got=f"{SHARDING} in {cut[0]}", where=files.root
        )
    entries = _of_pieces(parts, files.root) if cut else _of_whole(parts, files.root)
    return _index(files, entries, parts, {}, {})


def of_whole_tensors(index: Index, path: Path) -> Index:
    """The index of a safetensors file that is opened alone.

    Raises:
        CheckpointError: it holds pieces of tensors, as one rank writes them.
    """
    if SHARDING not in index.metadata:
        return index
    if path.name.startswith(_ONE_RANK):
        raise CheckpointError("The file holds one rank's pieces of tensors.", where=path, fix="Open its folder.")
    _of_pieces({path.name: index}, path.parent)
    return replace(index, metadata={key: text for key, text in index.metadata.items() if key != SHARDING})


def _check_all_there(paths: list[Path]) -> None:
    """Names such as model-00001-of-00003 say how many files there are; a rank writes those that it has pieces for."""
    sets: dict[tuple[str, str], set[int]] = {}
    for path in paths:
        if match := _PART.match(path.name):
            sets.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (head, count), numbers in sets.items():
        if len(numbers) != int(count):
            raise CheckpointError(
                "A part is missing.", expected=f"{int(count)} files {head}-*", got=len(numbers), where=paths[0].parent
            )


def _of_whole(parts: Mapping[str, Index], folder: Path) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name, part in parts.items():
        for key, entry in part.entries.items():
            if key in entries:
                raise CheckpointError("Two files hold the same key.", got=printable(key), where=folder / name)
            entries[key] = entry
    return entries


def _of_pieces(parts: Mapping[str, Index], folder: Path) -> dict[str, Entry]:
    """Tensors put together; the full shape is as far as their pieces reach."""
    found: dict[str, list[tuple[tuple[int, ...], TensorEntry]]] = {}
    for name, part in parts.items():
        offsets = parse(part.metadata[SHARDING].encode(), f"field {SHARDING}", folder / name)
        for key, entry in part.entries.items():
            assert isinstance(entry, TensorEntry), "safetensors holds tensors only"
            found.setdefault(key, []).append(
                (saved_offset(offsets.get(key), entry, f"{folder / name}: {printable(key)}"), entry)
            )
    entries: dict[str, Entry] = {}
    for key, pieces in found.items():
        entries[key] = _assembled(pieces, f"{folder}: {printable(key)}")
    return entries


def saved_offset(fields: Any, entry: TensorEntry, where: str) -> tuple[int, ...]:
    """Where a piece begins in its tensor, by what torch.distributed.checkpoint says of its key."""
    offset = sizes(fields.get("saved_offsets") if isinstance(fields, dict) else None, "saved_offsets", where)
    if len(offset) != len(entry.shape):
        raise CheckpointError("The offset of a piece has another number of dims.", got=offset, where=where)
    return offset


def _assembled(parts: list[tuple[tuple[int, ...], TensorEntry]], where: str) -> TensorEntry:
    first = parts[0][1]
    if any(entry.dtype != first.dtype or len(entry.shape) != len(first.shape) for _, entry in parts):
        raise CheckpointError("The pieces of a tensor differ in type or number of dims.", where=where)
    shape = tuple([max(o[d] + entry.shape[d] for o, entry in parts) for d in range(len(first.shape))])
    pieces = {
        offset: narrowed(piece, piece.box, offset, first.itemsize) for offset, entry in parts for piece in entry.pieces
    }
    made = replace(first, shape=shape, pieces=tuple(pieces.values()))
    check_boxes(shape, made.boxes, where, _INCOMPLETE)
    return made


def _index(
    files: Files, entries: dict[str, Entry], parts: Mapping[str, Index], more: dict[str, int], metadata: dict[str, str]
) -> Index:
    for key, entry in entries.items():
        entry.key = key
    tree: dict[str, Entry] = dict(entries)
    sized = {**more, **{name: size for part in parts.values() for name, size in part.files.items()}}
    kinds = {part.format for part in parts.values()} or {"safetensors"}
    notes = common_notes(parts.values())
    return Index(f"{' and '.join(sorted(kinds))}, in parts", entries, lambda: tree, sized, metadata, (files,), notes)
