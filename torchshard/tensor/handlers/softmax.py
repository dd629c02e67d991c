"""Softmax along a dim that is split: a row is normalised with two numbers from each rank, and nothing is gathered.

A rank sends the largest element of its piece of a row, then the sum of exponentials; in backward, one sum, and none
where who made the gradient has noted what its rows add up to, as for a cross entropy. Half precision is computed in
float32, as eager torch computes it.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchshard.comm import collectives
from torchshard.rules.reducing import dims_of
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import made_of, part, wide
from torchshard.tensor.layout import TensorLayout
from torchshard.tensor.mesh import BoundMesh

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


class _Rows:
    """The pieces of rows along a split dim, and how ranks that share a row speak to one another."""

    def __init__(self, like: TensorLayout, dim: int) -> None:
        mesh = like.mesh
        assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
        self.dim, self.sharding = dim, like.sharding.without_partial()
        self.outside = mesh.coordinate is None  # such a rank holds nothing, but knows the layout of the result
        if not self.outside:
            self.group = mesh.group(tuple(sorted(self.sharding.splits[dim])))

    def piece(self, x: DTensor) -> Tensor:
        """This rank's piece of x, in the precision to compute in."""
        return wide(part(x, self.sharding))

    def largest(self, x: Tensor) -> Tensor:
        """The largest element of each row; what a NaN counts as does not matter, as it makes the sum NaN."""
        if x.shape[self.dim]:
            most = x.amax(self.dim, keepdim=True).nan_to_num(torch.inf, torch.inf, -torch.inf)
        else:
            most = x.new_full(self._one_a_row(x), -torch.inf)
        return collectives.all_reduce_largest(most, self.group)

    def total(self, x: Tensor) -> Tensor:
        """The sum of each row."""
        return collectives.all_reduce(x.sum(self.dim, keepdim=True), "sum", self.group)

    def _one_a_row(self, x: Tensor) -> list[int]:
        return [1 if d == self.dim else n for d, n in enumerate(x.shape)]

    def wrapped(self, local: Tensor, shape: torch.Size, dtype: torch.dtype) -> DTensor:
        """A DTensor of these pieces."""
        return made_of(local.to(dtype), self.sharding, shape)


def _by_rows(x: DTensor, dim: int, dtype: torch.dtype, compute: Callable[[_Rows], Tensor]) -> Any:
    """What `compute` makes of each piece, split as `x` is; left to the rule where x is not split along `dim`."""
    if type(x) is not DTensor or not x.ndim or not x.dtype.is_floating_point or not x.numel():
        return NotImplemented
    (along,) = dims_of(dim, x.ndim)
    if along not in x._spec.sharding.splits:
        return NotImplemented
    rows = _Rows(x._spec, along)
    return rows.wrapped(x._local_tensor.new_empty(0) if rows.outside else compute(rows), x.shape, dtype)


def _softmax(func: Any, x: DTensor, dim: int, half_to_float: bool = False) -> Any:
    return _normalised(x, dim, torch.float32 if half_to_float else x.dtype)


def _safe_softmax(func: Any, x: DTensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    return _normalised(x, dim, dtype or x.dtype, safe=True)


def _normalised(x: DTensor, dim: int, dtype: torch.dtype, safe: bool = False) -> Any:
    def compute(rows: _Rows) -> Tensor:
        piece = rows.piece(x)
        if dtype.itemsize > piece.dtype.itemsize:
            piece = piece.to(dtype)
        largest = rows.largest(piece)
        parts = (piece - largest).exp_()
        parts = parts / rows.total(parts)
        return parts.masked_fill_(largest == -torch.inf, 0.0) if safe else parts  # rows that are masked altogether

    return _by_rows(x, dim, dtype, compute)


def _log_softmax(func: Any, x: DTensor, dim: int, half_to_float: bool) -> Any:
    def compute(rows: _Rows) -> Tensor:
        piece = rows.piece(x)
        below = piece - rows.largest(piece)
        return below - rows.total(below.exp()).log()

    return _by_rows(x, dim, torch.float32 if half_to_float else x.dtype, compute)


def _softmax_backward(func: Any, grad: DTensor, output: DTensor, dim: int, dtype: torch.dtype) -> Any:
    def compute(rows: _Rows) -> Tensor:
        parts = rows.piece(output)
        weighted = parts * rows.piece(grad)
        return weighted - parts * rows.total(weighted)

    return _by_rows(output, dim, dtype, compute) if _alike(grad, output) else NotImplemented


def _log_softmax_backward(func: Any, grad: DTensor, output: DTensor, dim: int, dtype: torch.dtype) -> Any:
    def compute(rows: _Rows) -> Tensor:
        piece, sums = rows.piece(grad), _noted_sums(grad) if grad._spec.sharding is rows.sharding else None
        return piece - rows.piece(output).exp() * (rows.total(piece) if sums is None else wide(sums))

    return _by_rows(output, dim, dtype, compute) if _alike(grad, output) else NotImplemented


def _alike(grad: DTensor, output: DTensor) -> bool:
    """Whether a gradient goes with its result; where it does not, the kernel says so."""
    return grad.shape == output.shape and grad.dtype == output.dtype


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "_softmax.default": _softmax,
    "_safe_softmax.default": _safe_softmax,
    "_log_softmax.default": _log_softmax,
    "_softmax_backward_data.default": _softmax_backward,
    "_log_softmax_backward_data.default": _log_softmax_backward,
}
