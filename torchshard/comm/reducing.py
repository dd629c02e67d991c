"""How each reduction is said with the few that transports know, so that its value is the one that eager torch has.

Where a transport's own would differ, it is not used as it is: gloo's max and min lose a NaN that another rank holds, no
transport averages integers, knows norms, or takes 16-bit integers or booleans in every operation.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from torchshard.layout.reductions import parse_norm
from torchshard.unsupported import unsupported

Finish = Callable[[Tensor], Tensor]

_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.bool: torch.uint8,
    torch.complex32: torch.complex64,
}
# In which averages and powers are reckoned, as eager torch does within a kernel: their sums need not fit where they do.
_ROOMY = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
"""Integers as wide as floats; those that transports do not carry are widened once more."""

_OF_BOOLS = {"band": "min", "bor": "max", "max": "max", "min": "min", "product": "min"}
_OF_BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


def prepare(x: Tensor, op: str, ranks: int, keeps_nans: bool = False) -> tuple[Tensor, str, Finish]:
    """What to reduce, the transport's name of the operation, and what makes the value of the result.

    Args:
        x: this rank's term.
        op: a name of layout/reductions.py.
        ranks: number of terms.
        keeps_nans: whether the transport's max and min do.

    Raises:
        UnsupportedOperatorError: the reduction has no meaning for the dtype.
    """
    if not _has_meaning(x.dtype, op):
        raise unsupported(
            f"A Partial({op!r}) of {x.dtype} cannot be reduced.",
            expected="a dtype for which the reduction has a meaning and an exact result",
            got=x.dtype,
            fix="convert the tensor to another dtype first, for example x.to(torch.float32)",
        )
    if (order := parse_norm(op)) is not None:
        return _norm(x, order, ranks, keeps_nans)
    wider = _WIDER.get(x.dtype, torch.float32 if x.dtype.itemsize == 1 and x.is_floating_point() else None)
    if op == "avg" and wider is None:
        wider = _ROOMY.get(x.dtype)
    if wider is not None:
        return _widened(x, op, ranks, wider, keeps_nans)
    if op == "avg":
        return x, "sum", lambda got: got / ranks
    if op in ("max", "min") and x.is_floating_point() and not keeps_nans:
        return _extreme(x, op)
    return x, op, lambda got: got


def only_gloo_reduces(x: Tensor, op: str) -> bool:
    """Whether the transport of this term does not know the operation: those of accelerators know none of bits."""
    return op in _OF_BITS and x.device.type != "cpu"


def reduced_bits(terms: Sequence[Tensor] | Tensor, op: str) -> Tensor:
    """The reduction, here, of the terms of all ranks."""
    return reduce(_OF_BITS[op], terms)


def _has_meaning(dtype: torch.dtype, op: str) -> bool:
    if dtype is torch.bool:
        return op in _OF_BOOLS
    if dtype is torch.uint64:  # no transport takes it, and no signed type is wider
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return op not in _OF_BITS and not (dtype.is_complex and op in ("max", "min", "product"))
    return op != "avg" and parse_norm(op) is None


def _widened(x: Tensor, op: str, ranks: int, wider: torch.dtype, keeps_nans: bool) -> tuple[Tensor, str, Finish]:
    op = _OF_BOOLS[op] if x.dtype is torch.bool else op
    term, name, finish = prepare(x.to(wider), op, ranks, keeps_nans)
    return term, name, lambda got: finish(got).to(x.dtype)


def _extreme(x: Tensor, op: str) -> tuple[Tensor, str, Finish]:
    """Max or min in which a NaN of any rank survives: of integers in the order of the floats, NaNs at its end.

    The bits of floats are in that order but for those of negative ones, which are turned round. NaNs then lie at both
    ends; a shift by as many numbers as lie beyond an infinity takes those of one end round to the other.
    """
    bits, beyond = BITS[x.dtype], round(1 / torch.finfo(x.dtype).eps) - 1
    shift = -beyond if op == "max" else beyond
    term = _turned(x.view(bits)).add_(shift).to(_WIDER.get(bits, bits))
    return term, op, lambda got: _turned(got.to(bits) - shift).view(x.dtype)


def _turned(bits: Tensor) -> Tensor:
    """All bits but that of the sign are others where it is set; twice is as before."""
    info = torch.iinfo(bits.dtype)
    return (bits >> (info.bits - 1)).bitwise_and_(info.max).bitwise_xor_(bits)


def _norm(x: Tensor, order: float, ranks: int, keeps_nans: bool) -> tuple[Tensor, str, Finish]:
    size = x.abs()
    if math.isinf(order):
        return prepare(size, "max" if order > 0 else "min", ranks, keeps_nans)
    if order == 0:
        return size, "sum", lambda got: got
    powers = size.to(_ROOMY.get(size.dtype, size.dtype)) ** order
    return powers, "sum", lambda got: (got ** (1 / order)).to(size.dtype)
