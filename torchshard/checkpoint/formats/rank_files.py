"""Reading sets of torch.save files, one of each rank (`model_rank0.pt`, ...), as one checkpoint.

Distributed tensors are put together from the parts that the ranks hold. What is the same on all ranks that have it, be
it one (of a pipeline's stage, of experts), is taken once. What differs without saying how (a generator's state, a local
buffer) is kept once a rank, as `key.rank0`, ...
"""

import copy
import functools
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchshard.checkpoint.entries import Entry, Index, ObjectEntry, Piece, TensorEntry, check_boxes
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats import torch_file
from torchshard.checkpoint.pickles.inert import OrderedDict
from torchshard.checkpoint.regrouping import DROPPED, Regrouped
from torchshard.checkpoint.text import printable
from torchshard.checkpoint.trees import same
from torchshard.errors import CheckpointError
from torchshard.layout import Box

_RANK = re.compile(r"(.*?rank[_-]?)(\d{1,6})(\D*)\Z", re.DOTALL)
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")


def find(folder: Path) -> list[Path]:
    """The files of a folder that are one of each rank, in the order of ranks; none where there are none.

    Raises:
        CheckpointError: two sets, or a set with a hole.
    """
    sets: dict[tuple[str, str], dict[int, Path]] = {}
    for path in folder.iterdir():
        if path.suffix in SUFFIXES and (match := _RANK.match(path.name)):
            sets.setdefault((match[1], match[3]), {})[int(match[2])] = path
    if len(sets) > 1:
        names = ", ".join(sorted(f"{head}*{tail}" for head, tail in sets))
        raise CheckpointError(
            "The folder holds several sets of files.", got=names, where=folder, fix="Open one by its pattern."
        )
    return ordered([path for files in sets.values() for path in files.values()])


def ordered(paths: Sequence[Path]) -> list[Path]:
    """The paths by rank.

    Raises:
        CheckpointError: a name without a rank, a rank twice or missing.
    """
    ranks: dict[int, Path] = {}
    for path in paths:
        match = _RANK.match(path.name)
        if match is None or int(match[2]) in ranks:
            raise CheckpointError(
                "The files are not one of each rank.", expected="names such as model_rank0.pt", got=path.name
            )
        ranks[int(match[2])] = path
    missing = sorted(set(range(len(ranks))) - ranks.keys())
    if missing:
        raise CheckpointError(
            "The file of a rank is missing.",
            expected=f"rank {missing[0]}",
            got=f"{len(ranks)} files",
            where=paths[0].parent,
        )
    return [ranks[rank] for rank in sorted(ranks)]


def read(paths: Sequence[Path]) -> Index:
    """The index of all files together.

    Raises:
        CheckpointError: a file is damaged, or the parts do not make up a tensor.

    Warns:
        UserWarning: names what differs from rank to rank without saying how.
    """
    files = Files(paths[0].parent, found=[path.name for path in paths])
    parts = [torch_file.read_part(files, path.name) for path in paths]
    merged: dict[str, dict[int, Entry]] = {}
    for path, part in zip(paths, parts, strict=True):
        for key, entry in part.entries.items():
            merged.setdefault(key, {})[int(_RANK.match(path.name)[2])] = entry  # type: ignore[index]
    alike: dict[str, Entry] = {}
    different: dict[str, dict[int, Entry]] = {}
    for key, entries in merged.items():
        one = _merged(key, list(entries.values()), files.root)
        if one is None:
            different[key] = entries
        else:
            one.key = key
            alike[key] = one
    if different:
        names = ", ".join(printable(key) for key in list(different)[:10]) + (" ..." if len(different) > 10 else "")
        warnings.warn(f"different on each rank, and kept once a rank: {names}", stacklevel=4)
    return _index(files, parts, alike, different)


def _index(
    files: Files, parts: Sequence[Index], alike: dict[str, Entry], different: dict[str, dict[int, Entry]]
) -> Index:
    entries = dict(alike)
    apart: dict[str, Entry] = {}
    for key, its in different.items():
        for rank, entry in its.items():
            entry.key = f"{key}.rank{rank}"
            entries[entry.key] = apart[entry.key] = entry

    def tree() -> object:
        nested = functools.reduce(_united, [part.tree() for part in parts])
        made = Regrouped(nested, lambda key, leaf: alike.get(key, DROPPED), files.root)
        for key, entry in entries.items():
            if key not in made.paths or key in apart:
                made.add(key, entry)
        return made.made()

    sized = {name: size for part in parts for name, size in part.files.items()}
    return Index("torch, one file a rank", entries, tree, sized, {"ranks": str(len(parts))}, (files,))


def _united(a: Any, b: Any) -> Any:
    """The nesting of two ranks: what the first has, and what it lacks of the second."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return a
    made = copy.copy(a)
    made.update({key: _united(a[key], value) if key in a else value for key, value in b.items()})
    if isinstance(made, OrderedDict) and isinstance(b, OrderedDict):
        made.attributes = _united(made.attributes or {}, b.attributes or {}) or None  # as _metadata
    return made


def _merged(key: str, entries: Sequence[Entry], where: Path) -> Entry | None:
    """One entry from those of the ranks that have it; None where they differ without saying how."""
    first = entries[0]
    if isinstance(first, ObjectEntry):
        objects = [entry for entry in entries if isinstance(entry, ObjectEntry)]
        alike = len(objects) == len(entries) and all(same(first.value(), other.value()) for other in objects[1:])
        return first if alike else None
    tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
    if len(tensors) != len(entries):
        return None
    distributed = first.sharding is not None or any(
        math.prod(e.shape) != sum(b.numel for b in e.boxes) for e in tensors
    )
    if not distributed and all(_holds_all(entry) for entry in tensors):
        return first if all(_same_values(first, other) for other in tensors[1:]) else None
    if len({(entry.shape, entry.dtype) for entry in tensors}) > 1:
        got = ", ".join(f"{entry.dtype} {entry.shape}" for entry in tensors[:4])
        raise CheckpointError("Ranks hold parts of different tensors under one key.", got=got, where=f"{where}: {key}")
    pieces: dict[Box, Piece] = {}
    for piece in [piece for entry in tensors for piece in entry.pieces]:
        pieces.setdefault(piece.box, piece)  # of replicas, the first rank's
    made = replace(first, pieces=tuple(pieces.values()))
    check_boxes(made.shape, made.boxes, f"{where}: {printable(key)}")
    return made


def _holds_all(entry: TensorEntry) -> bool:
    return math.prod(entry.shape) == sum([box.numel for box in entry.boxes])


def _same_values(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether two whole tensors of different files hold the same, by the checksums of their storages where stored."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if not a.pieces:
        return not b.pieces
    ours, theirs = a.pieces[0].place(), b.pieces[0].place()
    sums = [_fingerprint(place) for place in (ours, theirs)]
    if None not in sums and sums[0] == sums[1]:
        return True
    from torchshard.checkpoint.moving.reading import same_bytes

    return same_bytes(a, b)


def _fingerprint(place: Any) -> tuple[Any, ...] | None:
    extent = place.extent
    return None if extent.crc32 is None else (extent.crc32, extent.nbytes, place.start - extent.offset, place.stride)
