"""What each of many ranks has saved for itself, as one checkpoint.

Distributed tensors are put together from the parts that the ranks hold. What is the same on all ranks that have it, be
it one (of a pipeline's stage, of experts), is taken once. What differs without saying how (a generator's state, a local
buffer) is kept once a rank, as `key.rank0`, ...
"""

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchshard.checkpoint.entries import Entry, Index, ObjectEntry, Piece, TensorEntry, check_boxes
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.regrouping import DROPPED, Regrouped
from torchshard.checkpoint.text import listed, printable
from torchshard.checkpoint.trees import same
from torchshard.errors import CheckpointError
from torchshard.layout import Box


def check_ranks(ranks: Collection[int], folder: Path | None) -> None:
    """Raise CheckpointError where the files of these ranks have a hole."""
    missing = sorted(set(range(len(ranks))) - set(ranks))
    if missing:
        raise CheckpointError(
            "The file of a rank is missing.", expected=f"rank {missing[0]}", got=f"{len(ranks)} files", where=folder
        )


def joined(
    kind: str,
    ranks: Mapping[int, Mapping[str, Entry]],
    nested: Callable[[], object],
    sized: dict[str, int],
    files: Files,
) -> Index:
    """The index of all ranks together.

    Args:
        kind: of the files.
        ranks: what each rank has.
        nested: makes a state dict with all keys of all ranks.
        sized: names and sizes of the files.
        files: that they are read through.

    Raises:
        CheckpointError: the parts do not make up a tensor.

    Warns:
        UserWarning: names what differs from rank to rank without saying how.
    """
    merged: dict[str, dict[int, Entry]] = {}
    for rank, entries in ranks.items():
        for key, entry in entries.items():
            merged.setdefault(key, {})[rank] = entry
    alike: dict[str, Entry] = {}
    different: dict[str, dict[int, Entry]] = {}
    for key, its in merged.items():
        one = _merged(key, list(its.values()), files.root)
        if one is None:
            different[key] = its
        else:
            one.key = key
            alike[key] = one
    taken = [name for key, its in different.items() for rank in its if (name := _of_rank(key, rank)) in alike]
    if taken:
        raise CheckpointError(
            "Two entries have the same name: a key, and the value that one rank has of another key.",
            expected="keys that differ from rank to rank, and no other key that is one of them with .rank0, ...",
            got=printable(taken[0]),
            where=files.root,
            fix="Rename one of the keys where they are saved, or open the file of one rank alone.",
        )
    if different:
        warnings.warn(f"different on each rank, and kept once a rank: {listed(list(different))}", stacklevel=5)
    made = dict(alike)
    apart: dict[str, Entry] = {}
    for key, its in different.items():
        for rank, entry in its.items():
            entry.key = _of_rank(key, rank)
            made[entry.key] = apart[entry.key] = entry

    def tree() -> object:
        grouped = Regrouped(nested(), lambda key, leaf: alike.get(key, DROPPED), files.root)
        for key, entry in made.items():
            if key not in grouped.paths or key in apart:
                grouped.add(key, entry)
        return grouped.made()

    return Index(f"{kind}, one file a rank", made, tree, sized, {"ranks": str(len(ranks))}, (files,))


def _of_rank(key: str, rank: int) -> str:
    """The name of the value that one rank has of a key."""
    return f"{key}.rank{rank}"


def _merged(key: str, entries: Sequence[Entry], where: Path) -> Entry | None:
    """One entry from those of the ranks that have it; None where they differ without saying how."""
    first = entries[0]
    if isinstance(first, ObjectEntry):
        return first if all(_same_objects(first, other) for other in entries[1:]) else None
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


def _same_objects(a: ObjectEntry, b: Entry) -> bool:
    """Whether an entry is an object like another one; what is not read is like nothing."""
    try:
        return isinstance(b, ObjectEntry) and same(a.value(), b.value())
    except CheckpointError:
        return False


def _holds_all(entry: TensorEntry) -> bool:
    return math.prod(entry.shape) == sum([box.numel for box in entry.boxes])


def _same_values(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether two whole tensors of different files hold the same, by the checksums of their storages where stored."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a.boxes == b.boxes:
        sums = [[_fingerprint(piece.place()) for piece in one.pieces] for one in (a, b)]
        if None not in sums[0] and sums[0] == sums[1]:
            return True
    from torchshard.checkpoint.moving.reading import same_bytes

    return same_bytes(a, b)


def _fingerprint(place: Any) -> tuple[Any, ...] | None:
    extent = place.extent
    return None if extent.crc32 is None else (extent.crc32, extent.nbytes, place.start - extent.offset, place.stride)
