"""What differs between two checkpoints, of whatever formats: keys, types, shapes, values. Values are read in blocks."""

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchshard.checkpoint import opening
from torchshard.checkpoint.entries import Entry, ObjectEntry, TensorEntry
from torchshard.checkpoint.moving.casting import decoded
from torchshard.checkpoint.moving.reading import arrays
from torchshard.checkpoint.text import printable, table
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
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, rtol: float = 0.0, atol: float = 0.0, values: bool = True
) -> Difference:
    """Compare two checkpoints key by key.

    Args:
        a: anything that `open` opens.
        b: another.
        rtol: relative tolerance: |a - b| <= atol + rtol * |b| is the same.
        atol: absolute tolerance. With both zero, bits are compared: NaN equals itself, and 0.0 is not -0.0.
        values: False compares keys, types and shapes only.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    if not (rtol >= 0 and atol >= 0):
        raise CheckpointError("A tolerance is not a number of 0 or more.", got=f"rtol={rtol}, atol={atol}")
    changes = []
    same = 0
    with opening.open(a) as first, opening.open(b) as second:
        for key in dict.fromkeys([*first, *second]):
            change = _compare(key, first.get(key), second.get(key), rtol, atol, values)
            if change is None:
                same += 1
            else:
                changes.append(change)
    return Difference(tuple(changes), same)


def _compare(key: str, a: Entry | None, b: Entry | None, rtol: float, atol: float, values: bool) -> Change | None:
    if a is None or b is None:
        return Change(key, "only in A" if b is None else "only in B", _short(a), _short(b))
    if isinstance(a, TensorEntry) and isinstance(b, TensorEntry):
        if a.shape != b.shape:
            return Change(key, "shape", _short(a), _short(b))
        if a.dtype != b.dtype:
            return Change(key, "type", _short(a), _short(b))
        return _compare_values(key, a, b, rtol, atol) if values else None
    if isinstance(a, ObjectEntry) and isinstance(b, ObjectEntry):
        x, y = a.value(), b.value()
        return None if type(x) is type(y) and _equal(x, y) else Change(key, "object", printable(x), printable(y))
    return Change(key, "type", _short(a), _short(b))


def _equal(x: object, y: object) -> bool:
    try:
        return bool(x == y) or (x != x and y != y)
    except RecursionError:
        return False


def _short(entry: Entry | None) -> str:
    if isinstance(entry, TensorEntry):
        return f"{entry.dtype} {' x '.join(map(str, entry.shape)) or 'scalar'}"
    return "" if entry is None else "object"


def _compare_values(key: str, a: TensorEntry, b: TensorEntry, rtol: float, atol: float) -> Change | None:
    import numpy as np

    different, largest = 0, 0.0
    for x, y in zip(arrays(a), arrays(b), strict=True):
        if x.tobytes() == y.tobytes():
            continue
        x, y = decoded(x, a.dtype), decoded(y, b.dtype)
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        apart = _apart(x, y, wide, rtol, atol)
        count = int(apart.sum())
        if count:
            different += count
            with np.errstate(invalid="ignore", over="ignore"):
                here = np.abs(x[apart].astype(wide) - y[apart].astype(wide))
            largest = max(largest, float(here.max())) if not math.isnan(largest) else largest
            largest = math.nan if np.isnan(here).any() else largest
    return Change(key, "values", _short(a), _short(b), different, largest) if different else None


def _apart(x: "NDArray[Any]", y: "NDArray[Any]", wide: Any, rtol: float, atol: float) -> "NDArray[Any]":
    """Which elements differ."""
    import numpy as np

    if not rtol and not atol:
        bits = np.dtype(f"V{x.dtype.itemsize}")
        unequal: NDArray[Any] = x.view(bits) != y.view(bits)
        return unequal
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = x.astype(wide), y.astype(wide)
        near = (np.abs(a - b) <= atol + rtol * np.abs(b)) | (a == b)
        both_nan = np.isnan(a) & np.isnan(b)
    apart: NDArray[Any] = ~(near | both_nan)
    return apart
