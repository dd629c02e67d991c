"""Softmax along a dim that is split: a row is normalised with two numbers from each rank, and nothing is gathered.

A rank sends the largest element of its piece of a row, then the sum of exponentials; in backward, one sum. Half
precision is computed in float32, as eager torch computes it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchshard.comm import collectives
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import made_of, part
from torchshard.tensor.layout import TensorLayout
from torchshard.tensor.mesh import BoundMesh

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


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
        local = part(x, self.sharding)
        return local.to(_WIDER.get(local.dtype, local.dtype))

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
        """A DTensor of these pieces; they do not count on a rank outside of the mesh."""
        local = local.new_empty(0) if self.outside else local
        return made_of(local.to(dtype), self.sharding, shape)


def _rows(x: Any, dim: int) -> _Rows | None:
    """How to go along `dim`; None where x is not split along it, and the rule serves."""
    if type(x) is not DTensor or not x.ndim or not x.dtype.is_floating_point or not x.numel():
        return None
    if dim % x.ndim not in x._spec.sharding.splits:
        return None
    return _Rows(x._spec, dim % x.ndim)


def _softmax(func: Any, x: DTensor, dim: int, half_to_float: bool = False) -> Any:
    return _normalised(x, dim, torch.float32 if half_to_float else x.dtype)


def _safe_softmax(func: Any, x: DTensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    return _normalised(x, dim, dtype or x.dtype, safe=True)


def _normalised(x: DTensor, dim: int, dtype: torch.dtype, safe: bool = False) -> Any:
    rows = _rows(x, dim)
    if rows is None:
        return NotImplemented
    if rows.outside:
        return rows.wrapped(x._local_tensor, x.shape, dtype)
    piece = rows.piece(x)
    if dtype.itemsize > piece.dtype.itemsize:
        piece = piece.to(dtype)
    largest = rows.largest(piece)
    parts = (piece - largest).exp_()
    parts = parts / rows.total(parts)
    if safe:  # rows of which everything is masked
        parts = parts.masked_fill_(largest == -torch.inf, 0.0)
    return rows.wrapped(parts, x.shape, dtype)


def _log_softmax(func: Any, x: DTensor, dim: int, half_to_float: bool) -> Any:
    rows = _rows(x, dim)
    if rows is None:
        return NotImplemented
    if rows.outside:
        return rows.wrapped(x._local_tensor, x.shape, torch.float32 if half_to_float else x.dtype)
    piece = rows.piece(x)
    below = piece - rows.largest(piece)
    return rows.wrapped(below - rows.total(below.exp()).log(), x.shape, torch.float32 if half_to_float else x.dtype)


def _softmax_backward(func: Any, grad: DTensor, output: DTensor, dim: int, dtype: torch.dtype) -> Any:
    rows = _rows(output, dim)
    if rows is None:
        return NotImplemented
    if rows.outside:
        return rows.wrapped(output._local_tensor, output.shape, dtype)
    weighted = rows.piece(output) * rows.piece(grad)
    return rows.wrapped(weighted - rows.piece(output) * rows.total(weighted), output.shape, dtype)


def _log_softmax_backward(func: Any, grad: DTensor, output: DTensor, dim: int, dtype: torch.dtype) -> Any:
    rows = _rows(output, dim)
    if rows is None:
        return NotImplemented
    if rows.outside:
        return rows.wrapped(output._local_tensor, output.shape, dtype)
    piece = rows.piece(grad)
    return rows.wrapped(piece - rows.piece(output).exp() * rows.total(piece), output.shape, dtype)


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "_softmax.default": _softmax,
    "_safe_softmax.default": _safe_softmax,
    "_log_softmax.default": _log_softmax,
    "_softmax_backward_data.default": _softmax_backward,
    "_log_softmax_backward_data.default": _log_softmax_backward,
}
