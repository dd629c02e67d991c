"""The safetensors format: reading and writing.

Eight bytes of header length, a header in JSON (for each tensor its type, shape and byte range), then the tensors one
after another without gaps. Only tensors, under flat names; no objects.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchshard.checkpoint.dtypes import DTYPES, FROM_SAFETENSORS
from torchshard.checkpoint.entries import Entry, Extent, Index, Piece, Place, TensorEntry
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats.json_text import parse
from torchshard.checkpoint.formats.out import Options, OutFile, Output, unsaid, whole_slot
from torchshard.checkpoint.formats.parts import index_file, named, parts_of
from torchshard.checkpoint.pickles.inert import RefusedGlobal
from torchshard.checkpoint.pickles.torch_values import sizes
from torchshard.checkpoint.sharing import overlapping
from torchshard.checkpoint.text import printable
from torchshard.checkpoint.trees import spread
from torchshard.errors import CheckpointError
from torchshard.layout import Box, contiguous_stride, whole

HEADER_LIMIT = 100_000_000  # bytes, as in the reference implementation
_METADATA = "__metadata__"
SHARDING = "DCP_SHARDING_INFO"
OF_PIECES = (SHARDING, "DCP_VERSION")  # what torch.distributed.checkpoint says of pieces of tensors
_PAGE = 4096  # bytes: tensors begin at a page of the file, so that pages are written, and mapped, as a whole


def read(files: Files, name: str, start: int = 0) -> Index:
    """The index of a file, or of what follows `start` in it.

    Raises:
        CheckpointError: damaged, or a header that contradicts itself or the file; names the field.
    """
    path, end = files.root / name, files.size(name)
    total = end - start
    length = int.from_bytes(files.read(name, start, min(8, total)), "little")
    if total < 8 or length > min(HEADER_LIMIT, total - 8):
        raise CheckpointError(
            "The safetensors header is longer than the file or the format allows.",
            expected=f"at most {min(HEADER_LIMIT, max(0, total - 8))} bytes",
            got=printable(length),
            where=path,
        )
    header = parse(files.read(name, start + 8, length), "safetensors header", path)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(map(_is_text, [*metadata, *metadata.values()])):
        raise CheckpointError("The safetensors metadata is not text.", where=f"{path}: {_METADATA}")
    entries: dict[str, Entry] = {}
    extent = Extent(files, name, start + 8 + length, total - 8 - length)
    about = f"{path}: "
    for key in list(header):
        entries[key] = _entry(extent, key, header.pop(key), about)  # one takes the place of the other
    _check_ranges(entries, path, extent.offset, end)
    tree: dict[str, Entry] = dict(entries)
    notes = {name: text for name, text in metadata.items() if name not in OF_PIECES}
    return Index("safetensors", entries, lambda: tree, {name: end}, metadata, (files,), notes)


def _entry(data: Extent, key: str, fields: Any, about: str) -> TensorEntry:
    where = about + printable(key)
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise CheckpointError("A tensor has no type, shape or byte range.", got=printable(fields), where=where)
    code = fields["dtype"]
    dtype = FROM_SAFETENSORS.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise CheckpointError("The type of a tensor is not read.", got=printable(code), where=where)
    shape = sizes(fields["shape"], "shape", where)
    span = sizes(fields["data_offsets"], "data_offsets", where)
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if len(span) != 2 or span[1] - span[0] != nbytes:
        raise CheckpointError(
            "The byte range of a tensor does not fit its shape.",
            expected=f"{printable(nbytes)} bytes for {dtype} {shape}",
            got=printable(span),
            where=where,
        )
    start = data.offset + span[0]
    box, stride = _in_order(shape)
    place = Place(Extent(data.files, data.file, start, nbytes), start, stride)
    pieces = (Piece(box, place),) if nbytes else ()
    return TensorEntry(dtype, box.size, pieces, key)


@functools.lru_cache(maxsize=4096)
def _in_order(shape: tuple[int, ...]) -> tuple[Box, tuple[int, ...]]:
    """Box and strides of a full tensor, the same objects for all tensors of a shape."""
    return whole(shape), contiguous_stride(shape)


def _check_ranges(entries: dict[str, Entry], path: Path, data_at: int, total: int) -> None:
    """Check that the tensors follow one another without gap or overlap up to the end of the file."""
    spans = [
        (piece.place().extent, key)
        for key, entry in entries.items()
        if isinstance(entry, TensorEntry)
        for piece in entry.pieces
    ]
    end = data_at
    for extent, key in sorted(spans, key=lambda span: span[0].offset):
        if extent.offset != end:
            raise CheckpointError(
                "The byte ranges of the tensors overlap or leave a gap.",
                expected=f"a start at {end - data_at}",
                got=extent.offset - data_at,
                where=f"{path}: {printable(key)}",
            )
        end += extent.nbytes
    if end != total:
        raise CheckpointError(
            "The file is not as long as its header says.", expected=f"{end} bytes", got=f"{total} bytes", where=path
        )


def write(index: Index, options: Options) -> Output:
    """The file, or parts with an index, that hold the tensors under their dotted names, those inside of objects too.

    Wider types come first in a file, so that each tensor is aligned to its type. Each file has the notes of the source.

    Raises:
        CheckpointError: a type or a name that the format cannot hold; names the key.
    """
    tensors, left_out = _tensors(index)
    apart = tuple(overlapping(tensors))
    notes, lost = index.notes, unsaid(index, notes=False, dicts=True)
    if options.shard_size is None:
        return Output((_file("", tensors, notes),), tuple(left_out), apart, lost)
    parts = parts_of({key: entry.nbytes for key, entry in tensors.items()}, options.shard_size)
    named_parts = named("model", ".safetensors", parts)
    files = [_file(name, {key: tensors[key] for key in keys}, notes) for name, keys in named_parts]
    files.append(index_file("model.safetensors.index.json", "model", ".safetensors", parts, tensors))
    return Output(tuple(files), tuple(left_out), apart, lost)


def _file(name: str, tensors: dict[str, TensorEntry], notes: Mapping[str, str]) -> OutFile:
    order = sorted(tensors, key=lambda key: -tensors[key].itemsize)
    head = _header(order, tensors, notes)
    at = len(head)
    slots = []
    for key in order:
        slots.append(whole_slot(tensors[key], at))
        at += tensors[key].nbytes
    return OutFile(name, tuple(slots), at, (head,), lambda crcs: iter([(0, head)]))


def _tensors(index: Index) -> tuple[dict[str, TensorEntry], list[str]]:
    """Tensors by name, and the names of what else there is."""
    tensors: dict[str, TensorEntry] = {}
    left_out = []
    for key, entry in index.entries.items():
        if isinstance(entry, TensorEntry):
            found: list[tuple[str, object]] = [(key, entry)]
        else:
            try:
                value = entry.value()
            except RefusedGlobal as error:
                left_out.append(f"{key} ({printable(error.name)})")
                continue
            found = list(spread(key, value))
        for name, leaf in found:
            if not isinstance(leaf, TensorEntry):
                left_out.append(name)
            elif name in tensors:
                raise CheckpointError("Two tensors have the same dotted name.", got=printable(name))
            else:
                tensors[name] = leaf
    return tensors, left_out


def _header(order: Sequence[str], tensors: dict[str, TensorEntry], notes: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {_METADATA: {"format": "pt", **notes}}
    at = 0
    for key in order:
        entry = tensors[key]
        code = DTYPES[entry.dtype].safetensors
        if code is None or key == _METADATA or not _is_text(key):
            what = f"the type {entry.dtype}" if code is None else "this name"
            raise CheckpointError(f"safetensors cannot hold {what}.", where=printable(key), fix="Convert to torch.")
        header[key] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    body = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-(8 + len(body)) % _PAGE)
    if len(body) > HEADER_LIMIT:
        raise CheckpointError(
            "The header would be longer than safetensors allows.", expected=f"{HEADER_LIMIT} bytes", got=len(body)
        )
    return len(body).to_bytes(8, "little") + body


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
