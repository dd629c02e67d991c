"""What a checkpoint holds, as rows, as a table and as plain data for JSON."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchshard.checkpoint import opening
from torchshard.checkpoint.entries import Entry, Index, TensorEntry
from torchshard.checkpoint.moving.progress import Progress
from torchshard.checkpoint.statistics import Statistics, statistics
from torchshard.checkpoint.text import format_size, printable, table


@dataclass(frozen=True, slots=True)
class Row:
    """One key.

    Args:
        key: flat name.
        dtype: torch's name; None for an object.
        shape: of the full tensor; None for an object.
        cut: into how many intervals each dim is cut; None for an object.
        pieces: how many boxes are stored.
        nbytes: of the full tensor, or of the stored object.
        statistics: of its values, where they were asked for.
    """

    key: str
    dtype: str | None
    shape: tuple[int, ...] | None
    cut: tuple[int, ...] | None
    pieces: int
    nbytes: int
    statistics: Statistics | None = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `inspect` found; `str()` is a table with totals.

    Args:
        path: what was looked at.
        format: such as "dcp", "torch" or "safetensors".
        rows: one for each key.
        files: name and size of the files that belong to it.
        metadata: what the format says about itself.
    """

    path: Path
    format: str
    rows: tuple[Row, ...]
    files: dict[str, int]
    metadata: dict[str, str]

    @property
    def totals(self) -> dict[str, int]:
        """Counts and bytes over all rows and files."""
        tensors = [row for row in self.rows if row.shape is not None]
        return {
            "tensors": len(tensors),
            "objects": len(self.rows) - len(tensors),
            "elements": sum([math.prod(row.shape or ()) for row in tensors]),
            "tensor_bytes": sum([row.nbytes for row in tensors]),
            "pieces": sum([row.pieces for row in tensors]),
            "files": len(self.files),
            "file_bytes": sum(self.files.values()),
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, ready for json."""
        rows = [
            {
                "key": row.key,
                "kind": "object" if row.shape is None else "tensor",
                "dtype": row.dtype,
                "shape": None if row.shape is None else list(row.shape),
                "cut": None if row.cut is None else list(row.cut),
                "pieces": row.pieces,
                "bytes": row.nbytes,
                **({} if row.statistics is None else {"stats": _plain(row.statistics)}),
            }
            for row in self.rows
        ]
        facts = {"path": str(self.path), "format": self.format, "metadata": self.metadata}
        return {**facts, "entries": rows, "files": self.files, "totals": self.totals}

    def __str__(self) -> str:
        with_stats = any(row.statistics is not None for row in self.rows)
        rows = [
            (
                printable(row.key, 1000),
                row.dtype or "object",
                "" if row.shape is None else " x ".join(map(str, row.shape)) or "scalar",
                _cut_text(row),
                format_size(row.nbytes),
                *(_numbers(row.statistics) if with_stats else ()),
            )
            for row in self.rows
        ]
        headers = ["key", "dtype", "shape", "pieces", "size", *(_NUMBERS if with_stats else ())]
        t = self.totals
        return (
            f"{table(headers, rows)}\n\n{self.format}: {t['tensors']} tensors of {t['elements']:,} elements and "
            f"{format_size(t['tensor_bytes'])} in {t['pieces']} pieces, {t['objects']} objects, {t['files']} files of "
            f"{format_size(t['file_bytes'])}"
        )


def _cut_text(row: Row) -> str:
    """ "4 (2x2)" for a grid, "3" for pieces that are none, "" for objects."""
    if row.cut is None:
        return ""
    grid = "x".join(map(str, row.cut))
    return f"{row.pieces} ({grid})" if row.pieces > 1 and math.prod(row.cut) == row.pieces else str(row.pieces)


_NUMBERS = ("min", "max", "mean", "NaN", "inf")


def _numbers(found: Statistics | None) -> tuple[str, ...]:
    if found is None:
        return ("",) * len(_NUMBERS)
    shown = ["" if n is None else f"{n:.4g}" for n in (found.smallest, found.largest, found.mean)]
    return (*shown, str(found.nan or ""), str(found.inf or ""))


def _plain(found: Statistics) -> dict[str, Any]:
    """For JSON, which has no infinities."""
    values = {name: getattr(found, field) for name, field in _FIELDS.items()}
    return {name: str(v) if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


_FIELDS = {"min": "smallest", "max": "largest", "mean": "mean", "nan": "nan", "inf": "inf"}


def inspect(
    path: str | os.PathLike[str],
    *,
    stats: bool = False,
    select: Sequence[str] = (),
    progress: Callable[[int, int], object] | None = None,
) -> Inspection:
    """Look at a checkpoint: keys, types, shapes, pieces and sizes, without reading tensors.

    Args:
        path: anything that `open` opens.
        stats: also read all tensors, in blocks, for smallest, largest and mean value and the number of NaN.
        select: globs of keys; only those that match one are shown.
        progress: called with the bytes read and the bytes in all, with `stats`.

    Raises:
        CheckpointError: as `open` does.
    """
    with opening.open(path) as checkpoint:
        rows = []
        chosen = _selected(checkpoint.index, select) if select else checkpoint.index.entries
        total = sum([entry.nbytes for entry in chosen.values() if isinstance(entry, TensorEntry)])
        advance = Progress(progress, total)
        for key, entry in chosen.items():
            if isinstance(entry, TensorEntry):
                found = statistics(entry, advance) if stats else None
                rows.append(Row(key, entry.dtype, entry.shape, entry.cut, len(entry.pieces), entry.nbytes, found))
            else:
                rows.append(Row(key, None, None, None, 0, entry.nbytes))
        return Inspection(
            checkpoint.path, checkpoint.format, tuple(rows), checkpoint.index.files, dict(checkpoint.metadata)
        )


def _selected(index: Index, select: Sequence[str]) -> dict[str, Entry]:
    """Entries whose keys match; what edits checkpoints is imported only for this."""
    from torchshard.checkpoint.arguments import check_types
    from torchshard.checkpoint.editing import Edits, edited

    check_types(select=select)
    return edited(index, Edits(tuple(select))).entries
