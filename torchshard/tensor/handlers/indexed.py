"""Writes by index. Along a split dim each rank writes the rows that are its own, as to a cache of split positions; what
is added up to replicated rows from split ones, as to a codebook, is reduced and not gathered, where that is less.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard.layout.cuts import without
from torchshard.layout.placements import R, Shard
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import EagerAlone, held, part
from torchshard.tensor.layout import known
from torchshard.tensor.moving.redistribute import check_assumed

aten = torch.ops.aten
_INTEGERS = (torch.int64, torch.int32)


def _copied(func: Any, x: Any, dim: int, index: Any, source: Any, **alpha: Any) -> Any:
    """index_copy_ and index_add_."""
    if not _fits(x, dim, index, source):
        return NotImplemented
    return _written(x, dim % x.ndim, index, source, lambda t, i, s: func(t, dim, i, s, **alpha))


def _filled(func: Any, x: Any, dim: int, index: Any, value: Any) -> Any:
    if isinstance(value, Tensor) or not _has_rows(x, dim, index):
        return NotImplemented
    return _written(x, dim % x.ndim, index, None, lambda t, i, _: func(t, dim, i, value), wraps=True)


def _put(func: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    given = [d for d, i in enumerate(indices) if i is not None]
    if len(given) != 1 or not _has_rows(x, given[0], indices[given[0]]):
        return NotImplemented
    number = part(values) if values.ndim == 0 else None
    if number is None and not _fits(x, given[0], indices[given[0]], values):
        return NotImplemented

    def put(t: Tensor, i: Tensor, s: Tensor | None) -> Tensor:
        return func(t, [*[None] * given[0], i], number if s is None else s, accumulate)  # type: ignore[no-any-return]

    return _written(x, given[0], indices[given[0]], None if number is not None else values, put, wraps=True)


def _added(func: Any, x: Any, dim: int, index: Any, source: Any, **alpha: Any) -> Any:
    """Left to the rule, which gathers rows, where these are few."""
    if not (type(x) is type(index) is type(source) is DTensor):
        return NotImplemented
    if _has_rows(x, dim, index) and func is aten.index_add_.default:
        return _copied(func, x, dim, index, source, **alpha)
    split = [isinstance(p, Shard) for p in index._spec.placements]
    terms = any(s and p is R for s, p in zip(split, x._spec.placements, strict=True))
    if not terms or x._spec.overlaps or 2 * x.nbytes >= source.nbytes + index.nbytes or x.dtype is not source.dtype:
        return NotImplemented
    if x._spec.sharding.partial or x.dtype is torch.bool or not known(x.shape, index.shape):  # truth has no sums
        return NotImplemented
    rows = aten.index_add if func is aten.index_add_.default else aten.scatter_add
    return x.add_(rows(torch.zeros_like(x), dim, index, source, **alpha))


def _has_rows(x: Any, dim: int, index: Any) -> bool:
    """Whether rows of x are split between ranks of which each can write its own."""
    if not (type(x) is type(index) is DTensor) or not -x.ndim <= dim < x.ndim:
        return False
    layout = x._spec
    if layout.sharding.partial or layout.sharding.cuts or layout.overlaps or layout.mesh.coordinate is None:
        return False
    return dim % x.ndim in layout.sharding.splits and index.ndim == 1 and index.dtype in _INTEGERS


def _fits(x: Any, dim: int, index: Any, source: Any) -> bool:
    """The same, and whether there is a row for each number of the index."""
    if not _has_rows(x, dim, index) or type(source) is not DTensor or source.dtype is not x.dtype:
        return False
    dim %= x.ndim
    return tuple(source.shape) == (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])


def _written(
    x: DTensor, dim: int, index: DTensor, source: Any, write: Callable[..., Any], wraps: bool = False
) -> DTensor:
    """x, with this rank's rows written. `wraps`: numbers below zero count from the end."""
    layout, n = x._spec, x.shape[dim]
    if layout.assumed:
        check_assumed(x._local_tensor, layout)
    start, count = held(layout, dim)
    rows = part(index)
    at = torch.where(rows < 0, rows + n, rows) if wraps else rows
    nobody = (at < 0) | (at >= n)  # which the operator refuses, on every rank
    kept = (((at >= start) & (at < start + count)) | nobody).nonzero().squeeze(1)
    numbers = torch.where(nobody, rows, at - start)[kept]
    from_source = None if source is None else part(source, without(layout.sharding, (dim,))).index_select(dim, kept)
    into = x._local_tensor
    if not count:
        into = into.new_zeros([1 if d == dim else length for d, length in enumerate(into.shape)])
    write(into, numbers, from_source)
    return x


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "index_copy_.default": EagerAlone(_copied),
    "index_fill_.int_Scalar": EagerAlone(_filled),
    "index_put_.default": EagerAlone(_put),
    "index_add_.default": EagerAlone(_added),
    "scatter_add_.default": EagerAlone(_added),
}
