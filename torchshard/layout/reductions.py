"""The reductions that a Partial stands for, and for each how a value that all ranks hold becomes terms: its masking.

    "first"  coordinate 0 keeps the value, the others hold zeros (dividing would break integers);
    "keep"   every coordinate keeps the value, as reducing it with itself gives it back;
    None     refused, there is no exact way for every dtype.

`norm(p)` is a family: the p-norm over the coordinates, (sum |x|^p)^(1/p), with p = inf and -inf the largest and
smallest magnitude and p = 0 the sum (numpy.linalg.norm's reading of the orders, for terms that are norms or counts).
torch's private _MaskPartial is a sum of terms that are still to be masked: it is masked at the border and is a plain
sum here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Masking = Literal["first", "keep", None]

REDUCTIONS: Mapping[str, Masking] = MappingProxyType(
    {
        "sum": "first",
        "avg": "keep",
        "max": "keep",
        "min": "keep",
        "product": None,
        "band": None,
        "bor": None,
        "bxor": None,
    }
)


def parse_norm(op: str) -> float | None:
    """The order p of `norm(p)`; None if `op` is something else."""
    if not (op.startswith("norm(") and op.endswith(")")):
        return None
    try:
        return float(op[5:-1])
    except ValueError:
        return None


def masking(op: str) -> Masking:
    """How a value becomes terms of `op`, the name of a reduction."""
    return REDUCTIONS.get(op)


def may_mix(one: str, other: str) -> bool:
    """Whether two axes of one tensor may hold Partials of these two kinds: equal ones, and sum with avg."""
    return one == other or {one, other} <= {"sum", "avg"}


def exists_of_nothing(op: str) -> bool:
    """Whether a rank without elements has a term: of a sum zero; none of a maximum, nor of a norm of negative order."""
    return op not in ("max", "min") and (parse_norm(op) or 0.0) >= 0
