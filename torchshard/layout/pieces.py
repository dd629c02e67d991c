"""The piece rule: how an axis of size p splits n items. The one place that knows it.

Piece k is [min(k c, n), min((k + 1) c, n)) with c = ceil(n / p): torch.chunk's rule, which torch's DTensor and its
distributed checkpoint share. Tail pieces may be short or empty. Several axes on one dim nest: each splits, by its
actual size, the piece that the axis before it in the order left. Where items come in units that are not taken apart,
the rule is for the units, and n is a multiple of their length.
"""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

Interval = tuple[int, int]  # start and length
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Symbolic:
    """How to compute with lengths that are no plain numbers; whoever brings such sets these.

    Attributes:
        unrecorded: calls a function, which is no part of a trace.
        asked: calls one that asks of lengths what a trace depends on, so that it is made anew where the answer turns.
        expected: what a length is in this run; to ask for it does not tie a graph to it.
        number: a length that can only be one number, as that number; others as they are.
        renewed: whether a trace is made anew for lengths that it is not for.
    """

    unrecorded: Callable[..., Any] = staticmethod(lambda function, *args, **kwargs: function(*args, **kwargs))
    asked: Callable[..., None] = staticmethod(lambda function, *args: function(*args))
    expected: Callable[[int], int] = staticmethod(lambda n: n)
    number: Callable[[int], int] = staticmethod(lambda n: n)
    renewed: Callable[[], bool] = staticmethod(lambda: True)


def _unrecorded(function: Callable[Concatenate[int, _P], _T]) -> Callable[Concatenate[int, _P], _T]:
    """The function, no part of a trace when lengths are symbolic."""

    def called(n: int, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        known = Symbolic.number(n)
        if type(known) is int:
            return function(known, *args, **kwargs)
        return _numbers(Symbolic.unrecorded(function, n, *args, **kwargs))  # type: ignore[no-any-return]

    called.__doc__ = function.__doc__
    return called


def _numbers(found: Any) -> Any:
    """With lengths that can only be one number as that number: a trace cannot record what is computed of them."""
    if isinstance(found, (tuple, list)):
        return type(found)(map(_numbers, found))
    return Symbolic.number(found)


def _piece(n: int, parts: int, k: int, unit: int = 1) -> Interval:
    """Start and length of piece k of n items split in `parts`."""
    if parts == 1:
        return 0, n
    step = -(-n // (parts * unit)) * unit
    if k == 0:
        return 0, step
    start = k * step
    if start >= n:  # of a symbolic length, too, nothing is the number 0
        return n, 0
    # Not min(), of which torch.export makes a formula that torch 2.12 can neither simplify (Min(s, 3 s)) nor record.
    return start, step if step <= n - start else n - start


piece = _unrecorded(_piece)


@_unrecorded
def nested_piece(n: int, sizes: Sequence[int], coordinate: Sequence[int], unit: int = 1) -> Interval:
    """Start and length of the piece at `coordinate` when axes of these sizes split n items one after another."""
    start = 0
    for parts, k in zip(sizes, coordinate, strict=True):
        offset, n = _piece(n, parts, k, unit)
        start += offset
    return start, n


@_unrecorded
def nested_pieces(n: int, sizes: Sequence[int], unit: int = 1) -> list[Interval]:
    """All pieces, the first axis slowest: starts never decrease."""
    pieces = [(0, n)]
    for parts in sizes:
        pieces = [
            (start + offset, length)
            for start, whole in pieces
            for offset, length in (_piece(whole, parts, k, unit) for k in range(parts))
        ]
    return pieces


@_unrecorded
def largest_piece(n: int, sizes: Sequence[int], unit: int = 1) -> int:
    """Length of the largest piece, which is the one at coordinate 0 everywhere."""
    for parts in sizes:
        n = _piece(n, parts, 0, unit)[1]
    return n


def is_even(n: int, sizes: Sequence[int]) -> bool:
    """Whether all pieces have the same length."""
    for parts in sizes:
        if n % parts:
            return False
        n //= parts
    return True
