"""The reductions that a Partial stands for: one row each, with all that the arithmetic needs to know of them.

    combine   how two terms become one, a ufunc of numpy
    identity  the term that changes nothing
    mask      how Replicate becomes Partial:
              "first": coordinate 0 keeps the value, the others hold the identity (dividing would break integers);
              "keep":  every coordinate keeps the value, as reducing it with itself gives it back;
              None:    refused, there is no exact way for every dtype.

`norm(p)` is a family: the p-norm over the coordinates, (sum |x|^p)^(1/p), with p = inf and -inf the largest and
smallest magnitude and p = 0 the sum (numpy.linalg.norm's reading of the orders, for terms that are norms or counts).
torch's private _MaskPartial is a sum of terms that are still to be masked: it is masked at the border and is a plain
sum here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True)
class Reduction:
    """One row of the table above."""

    combine: str
    identity: Literal["zero", "one", "lowest", "highest", "ones", None]
    mask: Literal["first", "keep", None]


REDUCTIONS: Mapping[str, Reduction] = MappingProxyType(
    {
        "sum": Reduction("add", "zero", "first"),
        "avg": Reduction("add", "zero", "keep"),
        "max": Reduction("maximum", "lowest", "keep"),
        "min": Reduction("minimum", "highest", "keep"),
        "product": Reduction("multiply", "one", None),
        "band": Reduction("bitwise_and", "ones", None),
        "bor": Reduction("bitwise_or", "zero", None),
        "bxor": Reduction("bitwise_xor", "zero", None),
    }
)
_NORM = Reduction("add", "zero", None)


def parse_norm(op: str) -> float | None:
    """The order p of `norm(p)`; None if `op` is something else."""
    if not (op.startswith("norm(") and op.endswith(")")):
        return None
    try:
        return float(op[5:-1])
    except ValueError:
        return None


def reduction(op: str) -> Reduction:
    """The row of `op`, which is known to be valid."""
    return REDUCTIONS.get(op, _NORM)


def may_mix(one: str, other: str) -> bool:
    """Whether two axes of one tensor may hold Partials of these two kinds: equal ones, and sum with avg."""
    return one == other or {one, other} <= {"sum", "avg"}
