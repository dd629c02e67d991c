"""Batch normalisation in training: one set of statistics for the whole batch, however it is split.

Where the batch is whole on every rank, the kernel sees all of it, and the rule is left to run. Else each rank tells how
many numbers a channel of its part has, their mean and variance, by one collective; in backward two sums a channel.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import is_traced
from torchshard.comm import collectives
from torchshard.layout.layout import contiguous_stride
from torchshard.layout.placements import R, Shard
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.handlers.parts import made_of, part, told, wide
from torchshard.tensor.layout import layout_for
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.moving.redistribute import in_memory_order


class _Batch:
    """How a batch is split, and what follows for the vectors of one number a channel that go with it."""

    def __init__(self, x: DTensor) -> None:
        self.sharding = x._spec.sharding.without_partial()
        splits, mesh = self.sharding.splits, self.sharding.mesh
        assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
        self.mesh, self.shape = mesh, x._spec.shape
        kept = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
        as_it_is = kept is not None and x.is_contiguous(memory_format=kept)
        self.stride = x._spec.stride if as_it_is else contiguous_stride(self.shape)
        self.dims = [d for d in range(x.ndim) if d != 1]
        self.count = x.numel() // max(x.shape[1], 1)
        self.axes = tuple(sorted([axis for dim, axes in splits.items() if dim != 1 for axis in axes]))
        cut = [p.at(0) if isinstance(p, Shard) and p.dim == 1 else R for p in self.sharding.placements]
        self.of_channels = mesh.sharding(cut, {0: splits[1]} if 1 in splits else {})
        last = [n - 1 for n in mesh.shape]
        self.whole = not self.axes and 0 not in self.sharding.part(self.shape, last)  # whatever rank looks
        self.outside = mesh.coordinate is None  # such a rank holds nothing, but knows the layouts of results

    def piece(self, x: DTensor) -> Tensor:
        """This rank's part of a tensor like the batch, in the precision to compute in."""
        return wide(part(x, self.sharding))

    def channels(self, x: Any) -> Any:
        """This rank's part of a vector, if there is one, in that precision."""
        return None if x is None else wide(part(x, self.of_channels))

    def told(self, *vectors: Tensor) -> Sequence[Tensor]:
        """These vectors of each rank that holds another part of the same channels, one after another."""
        return told(self.mesh.group(self.axes), *vectors)

    def total(self, *vectors: Tensor) -> Sequence[Tensor]:
        """The sums of these vectors over such ranks."""
        if not self.axes:
            return vectors
        return collectives.all_reduce(torch.stack(vectors), "sum", self.mesh.group(self.axes)).unbind()

    def like(self, local: Tensor) -> DTensor:
        """The DTensor split as the batch is, in memory as kernels leave it: row-major, or channels last."""
        layout = layout_for(self.sharding, self.shape, self.stride, local.dtype)
        return wrap(local if self.outside else in_memory_order(local, layout), layout)

    def vector(self, local: Tensor) -> DTensor:
        """The DTensor of one number a channel."""
        return made_of(local, self.of_channels, self.shape[1:2])

    def by_channel(self, vector: Tensor) -> Tensor:
        """A vector that broadcasts with the batch."""
        return vector.view([vector.shape[0] if d == 1 else 1 for d in range(len(self.shape))])


def _forward(
    func: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    given = [t for t in (weight, bias, mean, var) if t is not None]
    if not training or not _fits(x, given):
        return NotImplemented
    batch = _Batch(x)
    stay = mean is None or x._spec.sharding is batch.sharding  # statistics are written where they lie: none may move
    if func in _BY_RULE and batch.whole and stay and all(t._spec.sharding is batch.of_channels for t in given):
        return NotImplemented
    if batch.outside:
        nothing = x._local_tensor.new_empty(0)
        return batch.like(nothing), *[batch.vector(wide(nothing)) for _ in range(2)]
    values = batch.piece(x)
    now, spread = _statistics(batch, values)
    scale, shift = batch.channels(weight), batch.channels(bias)
    result = values
    if values.numel():  # the kernel does not take a batch without channels
        result = _normed(batch, values, scale, shift, now, spread, eps)
    _renew(batch, mean, var, now, spread, momentum)
    return batch.like(result.to(x.dtype)), batch.vector(now), batch.vector(torch.rsqrt(spread + eps))


def _normed(
    batch: _Batch, values: Tensor, scale: Tensor | None, shift: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """The batch with these statistics; graphs say it without the kernel, which takes none that have a history."""
    if not is_traced(values):
        return torch.batch_norm(values, scale, shift, mean, var, False, 0.0, eps, False)
    result = (values - batch.by_channel(mean)) * batch.by_channel(torch.rsqrt(var + eps))
    result = result if scale is None else result * batch.by_channel(scale)
    return result if shift is None else result + batch.by_channel(shift)


def _renew(batch: _Batch, mean: Any, var: Any, now: Tensor, spread: Tensor, momentum: float) -> None:
    """Write this rank's part of running statistics, of those that there are."""
    if mean is not None:
        mean.lerp_(batch.vector(now.to(mean.dtype)), momentum)
    if var is not None:
        unbiased = spread * (batch.count / max(batch.count - 1, 1))
        var.lerp_(batch.vector(unbiased.to(var.dtype)), momentum)


def _statistics(batch: _Batch, values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, from those of all parts."""
    count = values.numel() // max(values.shape[1], 1)
    if not count:
        mean, variance = values.new_zeros(2, values.shape[1])
    elif is_traced(values):
        variance, mean = torch.var_mean(values, batch.dims, correction=0)
    else:  # in a third of the time
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
    if not batch.axes:
        return mean, variance
    counts, means, variances = batch.told(torch.full_like(mean, count), mean, variance)
    mean = (counts * means).sum(0) / batch.count
    return mean, (counts * (variances + (means - mean).square())).sum(0) / batch.count


def _fits(x: Any, given: Sequence[Any]) -> bool:
    """Whether kernels take a batch with what is given for its channels; where they do not, they shall say so."""
    dtypes = {t.dtype for t in given}
    half = x.dtype in (torch.float16, torch.bfloat16)
    known = len(dtypes) < 2 and dtypes <= {x.dtype, torch.float32 if half else x.dtype}
    return x.is_floating_point() and x.numel() > 0 and x.ndim > 1 and known and all(t.ndim == 1 for t in given)


def _statistics_alone(func: Any, x: Any, mean: Any, var: Any, momentum: float) -> Any:
    given = [t for t in (mean, var) if t is not None]
    if not _fits(x, given):
        return NotImplemented
    batch, dtype = _Batch(x), given[0].dtype if given else x.dtype
    if batch.outside:
        now = spread = wide(x._local_tensor.new_empty(0))
    else:
        now, spread = _statistics(batch, batch.piece(x))
        _renew(batch, mean, var, now, spread, momentum)
    return batch.vector(now.to(dtype)), batch.vector(spread.to(dtype))


def _without_statistics(func: Any, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    return _forward(func, x, weight, bias, None, None, training, momentum, eps)


def _with_update(func: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> Any:
    results = _forward(func, x, weight, bias, mean, var, True, momentum, eps)
    if results is NotImplemented:
        return NotImplemented
    return (*results, x.new_empty([0], dtype=torch.uint8))  # what a kernel would keep for its backward


def _backward(
    func: Any, grad: Any, x: Any, weight: Any, mean: Any, var: Any, saved_mean: Any, saved_rstd: Any, training: bool,
    eps: float, mask: Any, reserve: Any = None,
) -> Any:  # fmt: skip
    if not training:
        return NotImplemented
    batch = _Batch(x)
    if func in _BY_RULE and batch.whole and saved_rstd.dtype is (x if weight is None else weight).dtype:
        return NotImplemented
    dtype = saved_rstd.dtype if weight is None else torch.promote_types(saved_rstd.dtype, weight.dtype)
    if batch.outside:
        inner = sums = moments = x._local_tensor.new_empty(0)
    else:
        rstd, values = batch.channels(saved_rstd), batch.piece(grad)
        normed = (batch.piece(x) - batch.by_channel(batch.channels(saved_mean))) * batch.by_channel(rstd)
        sums, moments = batch.total(values.sum(batch.dims), (values * normed).sum(batch.dims))
        inner = values - (batch.by_channel(sums) + normed * batch.by_channel(moments)) / max(batch.count, 1)
        inner = inner * batch.by_channel(rstd if weight is None else rstd * batch.channels(weight))
    return (
        batch.like(inner.to(grad.dtype)) if mask[0] else None,
        batch.vector(moments.to(dtype)) if mask[1] else None,
        batch.vector(sums.to(dtype)) if mask[2] else None,
    )


_BY_RULE = torch.ops.aten.native_batch_norm.default, torch.ops.aten.native_batch_norm_backward.default
"""Those that have a rule for a whole batch."""

HANDLERS: Mapping[str, Callable[..., Any]] = {
    "native_batch_norm.default": _forward,
    "_native_batch_norm_legit.default": _forward,
    "_native_batch_norm_legit.no_stats": _without_statistics,
    "_batch_norm_with_update.default": _with_update,
    "batch_norm_update_stats.default": _statistics_alone,
    "native_batch_norm_backward.default": _backward,
    "batch_norm_backward.default": _backward,
}
