"""Softmax along a dim that is split: a row is normalised with two numbers from each rank, and nothing is gathered.

A rank sends the largest element of its piece of a row, and the sum of exponentials: in one message where that is
sooner. In backward, one sum, and none where who made the gradient has noted what its rows add up to, as for a cross
entropy. Half precision is computed in float32, as eager torch computes it.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchshard.comm import collectives
from torchshard.rules.reducing import Dims, dims_of
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import split_along, wide
from torchshard.tensor.handlers.rows import Rows

# A gradient -> what its rows add up to along the split dim, with its part and the versions of both at that time.
_sums: MutableMapping[Tensor, tuple[Tensor, Tensor, tuple[int, int]]] = WeakTensorKeyDictionary()


def note_sums(gradient: DTensor, sums: Tensor) -> None:
    """Tell the backward of a softmax what the rows of a gradient that has just been made add up to, on every rank."""
    local = gradient._local_tensor
    _sums[gradient] = sums, local, (gradient._version, local._version)


def _noted_sums(gradient: DTensor) -> Tensor | None:
    """What the rows of a gradient add up to, if somebody has noted it and nobody has written to it since."""
    sums, local, versions = _sums.get(gradient, (None, None, None))
    now = gradient._local_tensor
    return sums if now is local and versions == (gradient._version, now._version) else None


class _Exponentials:
    """The exponentials of rows, each less a number that keeps them finite, and what those of all ranks add up to.

    Where it is sooner, a rank takes off its own largest element, and says it together with its sum in one message;
    else the largest of all ranks, which costs a message before that of the sums.

    Attributes:
        below: the piece, less what is taken off.
        largest: element of each row, on any rank. To be read after total().
        ahead: by how much that is more than what this rank takes off; None: nothing. To be read after total().
    """

    def __init__(self, rows: Rows, piece: Tensor) -> None:
        self._rows, here = rows, _largest(piece, rows.dims)
        self._at_once = rows.at_once(here)
        self.largest = here if self._at_once else collectives.all_reduce(here, "max", rows.group)
        self.ahead: Tensor | None = None
        self.below = piece - (_finite(here) if self._at_once else self.largest)

    def total(self, parts: Tensor) -> Tensor:
        """What the exponentials of a row, of which these are this rank's, add up to on all ranks, less the largest."""
        if not self._at_once:
            return self._rows.total(parts)
        largest, sums = self._rows.gathered(self.largest, parts.sum(self._rows.dims, keepdim=True))
        self.largest = largest.amax(0)
        # This rank's as it came: see told().
        self.ahead = self.largest - largest[self._rows.group.position]
        return ((largest - self.largest).exp() * sums).sum(0)


def _largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest element of each row of a piece."""
    if 0 in [x.shape[d] for d in dims]:
        return x.sum(dims, keepdim=True) - torch.inf
    return x.amax(dims, keepdim=True)


def _finite(x: Tensor) -> Tensor:
    """What can be taken off an infinite element, and leaves it what it is."""
    return x.masked_fill(x.abs() == torch.inf, 0.0)


def _by_rows(x: DTensor, dim: int, dtype: torch.dtype, compute: Callable[[Rows], Tensor]) -> Any:
    """What `compute` makes of each piece, split as `x` is; left to the rule where x is not split along `dim`."""
    if type(x) is not DTensor or not x.ndim or not x.dtype.is_floating_point or not x.numel():
        return NotImplemented
    (along,) = dims_of(dim, x.ndim)
    if along not in x._spec.sharding.splits:
        return NotImplemented
    rows = Rows(x._spec, (along,))
    return rows.wrapped(x._local_tensor.new_empty(0) if rows.outside else compute(rows), dtype)


def _softmax(func: Any, x: DTensor, dim: int, half_to_float: bool = False) -> Any:
    return _normalised(x, dim, torch.float32 if half_to_float else x.dtype)


def _safe_softmax(func: Any, x: DTensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    return _normalised(x, dim, dtype or x.dtype, safe=True)


def _normalised(x: DTensor, dim: int, dtype: torch.dtype, safe: bool = False) -> Any:
    def compute(rows: Rows) -> Tensor:
        piece = rows.piece(x)
        if dtype.itemsize > piece.dtype.itemsize:
            piece = piece.to(dtype)
        found = _Exponentials(rows, piece)
        parts = found.below.exp_()
        total = found.total(parts)
        parts = parts / (total if found.ahead is None else total * found.ahead.exp())
        return parts.masked_fill_(found.largest == -torch.inf, 0.0) if safe else parts  # rows masked altogether

    return _by_rows(x, dim, dtype, compute)


def _log_softmax(func: Any, x: DTensor, dim: int, half_to_float: bool) -> Any:
    def compute(rows: Rows) -> Tensor:
        found = _Exponentials(rows, rows.piece(x))
        total = found.total(found.below.exp()).log()
        return found.below - (total if found.ahead is None else total + found.ahead)

    return _by_rows(x, dim, torch.float32 if half_to_float else x.dtype, compute)


def _logsumexp(func: Any, x: Any, dim: Dims, keepdim: bool = False) -> Any:
    dims = tuple(dims_of(dim, x.ndim))
    if not split_along(x, dims) or not x.is_floating_point() or 0 in [x.shape[d] for d in dims]:
        return NotImplemented
    rows, local = Rows(x._spec, dims), x._local_tensor.new_empty(0)
    if not rows.outside:
        found = _Exponentials(rows, rows.piece(x))
        local = found.total(found.below.exp()).log() + found.largest
        local = torch.where(found.largest.abs() == torch.inf, found.largest, local)
    return rows.of_each(local, x.dtype, keepdim)


def _softmax_backward(func: Any, grad: DTensor, output: DTensor, dim: int, dtype: torch.dtype) -> Any:
    def compute(rows: Rows) -> Tensor:
        parts = rows.piece(output)
        weighted = parts * rows.piece(grad)
        return weighted - parts * rows.total(weighted)

    return _by_rows(output, dim, dtype, compute) if _alike(grad, output) else NotImplemented


def _log_softmax_backward(func: Any, grad: DTensor, output: DTensor, dim: int, dtype: torch.dtype) -> Any:
    def compute(rows: Rows) -> Tensor:
        piece, sums = rows.piece(grad), _noted_sums(grad) if grad._spec.sharding is rows.sharding else None
        return piece - rows.piece(output).exp() * (rows.total(piece) if sums is None else wide(sums))

    return _by_rows(output, dim, dtype, compute) if _alike(grad, output) else NotImplemented


def _alike(grad: DTensor, output: DTensor) -> bool:
    """Whether a gradient goes with its result; where it does not, the kernel says so."""
    return grad.shape == output.shape and grad.dtype == output.dtype


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "logsumexp.default": _logsumexp,
    "_softmax.default": _softmax,
    "_safe_softmax.default": _safe_softmax,
    "_log_softmax.default": _log_softmax,
    "_softmax_backward_data.default": _softmax_backward,
    "_log_softmax_backward_data.default": _log_softmax_backward,
}
