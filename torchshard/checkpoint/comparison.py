"""What differs between two checkpoints, of whatever formats: keys, types, shapes, values. Values are read in blocks."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchshard.checkpoint import opening
from torchshard.checkpoint.entries import Entry, ObjectEntry, TensorEntry
from torchshard.checkpoint.moving.casting import decoded
from torchshard.checkpoint.moving.progress import Progress
from torchshard.checkpoint.moving.reading import arrays
from torchshard.checkpoint.text import printable, table
from torchshard.checkpoint.trees import as_entry, same, spread
from torchshard.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs.

    Args:
        key: flat name.
        kind: "only in A", "only in B", "type", "shape", "values" or "object".
        before: what A has, in short; "" where it has none.
        after: what B has.
        different: how many elements differ by more than the tolerance.
        largest: the largest difference; NaN where NaN stands against a number.
    """

    key: str
    kind: str
    before: str = ""
    after: str = ""
    different: int = 0
    largest: float = 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """What `diff` found; true where anything differs. `str()` is a table.

    Args:
        changes: one for each key that differs.
        same: how many keys are the same in both.
    """

    changes: tuple[Change, ...]
    same: int

    def __bool__(self) -> bool:
        return bool(self.changes)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, ready for json."""
        names = ("key", "kind", "before", "after", "different", "largest")
        rows = [{name: getattr(change, name) for name in names} for change in self.changes]
        for row in rows:
            row["largest"] = row["largest"] if math.isfinite(row["largest"]) else str(row["largest"])
        return {"changes": rows, "same": self.same}

    def __str__(self) -> str:
        total = f"{self.same} keys are the same, {len(self.changes)} differ"
        if not self.changes:
            return total
        rows = [
            (
                printable(c.key, 1000),
                c.kind,
                c.before,
                c.after,
                c.different or "",
                f"{c.largest:.3g}" if c.different else "",
            )
            for c in self.changes
        ]
        headers = ["key", "differs in", "A", "B", "elements", "largest"]
        return f"{table(headers, rows)}\n\n{total}"


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    values: bool = True,
    progress: Callable[[int, int], object] | None = None,
) -> Difference:
    """Compare two checkpoints key by key.

    Args:
        a: anything that `open` opens.
        b: another.
        rtol: relative tolerance: |a - b| <= atol + rtol * |b| is the same.
        atol: absolute tolerance. With both zero, bits are compared: NaN equals itself, and 0.0 is not -0.0.
        values: False compares keys, types and shapes only.
        progress: called with the bytes compared and the bytes in all.

    Raises:
        CheckpointError: one of them cannot be read, or holds an object that is not plain data.
    """
    if not (rtol >= 0 and atol >= 0):
        raise CheckpointError("A tolerance is not a number of 0 or more.", got=f"rtol={rtol}, atol={atol}")
    with opening.open(a) as one, opening.open(b) as other:
        first, second = _spread(one), _spread(other)
        pairs = [(entry, second.get(key)) for key, entry in first.items()]
        total = sum([a.nbytes for a, b in pairs if isinstance(a, TensorEntry) and _short(a) == _short(b)])
        advance = Progress(progress, total)
        keys = dict.fromkeys([*first, *second])
        found = [
            _compare(key, first.get(key), second.get(key), (rtol, atol), advance if values else None) for key in keys
        ]
    changes = tuple([change for change in found if change is not None])
    return Difference(changes, len(keys) - len(changes))


def _spread(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries by flat name, objects read; some formats keep a tuple with tensors in one object, and some do not."""
    found: dict[str, Entry] = {}
    for key, entry in entries.items():
        inner = [(key, entry)] if isinstance(entry, TensorEntry) else spread(key, entry.value())
        found |= {name: as_entry(leaf) for name, leaf in inner}
    return found


def _compare(
    key: str,
    a: Entry | None,
    b: Entry | None,
    tolerance: tuple[float, float],
    advance: Callable[[int], object] | None,
) -> Change | None:
    """What differs; values are compared, and told to `advance`, where that is given."""
    if a is None or b is None:
        return Change(key, "only in A" if b is None else "only in B", _short(a), _short(b))
    if isinstance(a, TensorEntry) and isinstance(b, TensorEntry):
        if a.shape != b.shape:
            return Change(key, "shape", _short(a), _short(b))
        if a.dtype != b.dtype:
            return Change(key, "type", _short(a), _short(b))
        return None if advance is None else _compare_values(key, a, b, tolerance, advance)
    if isinstance(a, ObjectEntry) and isinstance(b, ObjectEntry):
        x, y = a.value(), b.value()
        return None if same(x, y) else Change(key, "object", printable(x), printable(y))
    return Change(key, "type", _short(a), _short(b))


def _short(entry: Entry | None) -> str:
    if isinstance(entry, TensorEntry):
        return f"{entry.dtype} {' x '.join(map(str, entry.shape)) or 'scalar'}"
    return "" if entry is None else "object"


def _compare_values(
    key: str, a: TensorEntry, b: TensorEntry, tolerance: tuple[float, float], advance: Callable[[int], object]
) -> Change | None:
    import numpy as np

    different, largest = 0, 0.0
    for x, y in zip(arrays(a), arrays(b), strict=True):
        advance(x.nbytes)
        if x.tobytes() == y.tobytes():
            continue
        x, y = decoded(x, a.dtype), decoded(y, b.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            apart = _apart(x, y, *tolerance)
            here = _distance(x[apart], y[apart])
        if here.size:
            different += here.size
            largest = max(largest, float(here.max())) if not math.isnan(largest) else largest
            largest = math.nan if np.isnan(here).any() else largest
    return Change(key, "values", _short(a), _short(b), different, largest) if different else None


def _apart(x: "NDArray[Any]", y: "NDArray[Any]", rtol: float, atol: float) -> "NDArray[Any]":
    """Which elements differ."""
    import numpy as np

    if not rtol and not atol:
        bits = np.dtype(f"V{x.dtype.itemsize}")
        unequal: NDArray[Any] = x.view(bits) != y.view(bits)
        return unequal
    distance, allowed = _distance(x, y), atol + rtol * np.abs(_wide(y))
    if distance.dtype == np.uint64:
        whole = np.where(allowed < 2.0**64, allowed, 0).astype(np.uint64)
        near: NDArray[Any] = (distance <= whole) | (allowed >= 2.0**64)
    else:
        near = (distance <= allowed) | (x == y) | (np.isnan(x) & np.isnan(y))
    return ~near


def _distance(x: "NDArray[Any]", y: "NDArray[Any]") -> "NDArray[Any]":
    """How far elements are from one another: exactly if they are whole numbers."""
    import numpy as np

    if x.dtype.kind in "biu":
        distance: NDArray[Any] = np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)
    else:
        distance = np.abs(_wide(x) - _wide(y))
    return distance


def _wide(x: "NDArray[Any]") -> "NDArray[Any]":
    """Elements as the widest numbers that they fit into, more or less."""
    return x.astype("complex128" if x.dtype.kind == "c" else "float64")
