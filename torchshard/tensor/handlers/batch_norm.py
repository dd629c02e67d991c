"""Batch normalisation in training: one set of statistics for the whole batch, however it is split.

Written as formulas of DTensors. Where the batch is split, forward reduces its mean and then its variance, each once,
and backward its two sums together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchshard.tensor.handlers.parts import reduced, wide


def _forward(
    func: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    if not training or not _fits(x, [t for t in (weight, bias, mean, var) if t is not None]):
        return NotImplemented
    dims = [d for d in range(x.ndim) if d != 1]
    count = x.numel() // x.shape[1]
    values = wide(x)
    (now,) = reduced(values.mean(dims))
    centred = values - _by_channel(now, x)
    (spread,) = reduced(centred.square().mean(dims))
    rstd = torch.rsqrt(spread + eps)
    result = centred * _by_channel(rstd, x)
    if weight is not None:
        result = result * _by_channel(weight, x)
    if bias is not None:
        result = result + _by_channel(bias, x)
    if mean is not None:
        mean.lerp_(now.to(mean.dtype), momentum)
    if var is not None:
        var.lerp_((spread * (count / max(count - 1, 1))).to(var.dtype), momentum)
    return _as_kernels_lay(result.to(x.dtype), x), now, rstd


def _fits(x: Any, given: Sequence[Any]) -> bool:
    """Whether kernels take a batch with what is given for its channels; where they do not, they shall say so."""
    dtypes = {t.dtype for t in given}
    half = x.dtype in (torch.float16, torch.bfloat16)
    known = len(dtypes) < 2 and dtypes <= {x.dtype, torch.float32 if half else x.dtype}
    return x.is_floating_point() and x.numel() > 0 and x.ndim > 1 and known and all(t.ndim == 1 for t in given)


def _as_kernels_lay(result: Any, x: Any) -> Any:
    """In memory as kernels leave it: row-major, or channels last as the operand is."""
    kept = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    return result if kept and x.is_contiguous(memory_format=kept) else result.contiguous()


def _without_statistics(func: Any, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    return _forward(func, x, weight, bias, None, None, training, momentum, eps)


def _with_update(func: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> Any:
    results = _forward(func, x, weight, bias, mean, var, True, momentum, eps)
    if results is NotImplemented:
        return NotImplemented
    return (*results, x.new_empty([0], dtype=torch.uint8))  # what a kernel would keep for its backward


def _by_channel(t: Any, x: Any) -> Any:
    return t.view([-1 if d == 1 else 1 for d in range(x.ndim)])


def _backward(
    func: Any, grad: Any, x: Any, weight: Any, mean: Any, var: Any, saved_mean: Any, saved_rstd: Any, training: bool,
    eps: float, mask: Any, reserve: Any = None,
) -> Any:  # fmt: skip
    if not training:
        return NotImplemented
    dims = [d for d in range(x.ndim) if d != 1]
    count = max(x.numel() // max(x.shape[1], 1), 1)
    grad, dtype = wide(grad), grad.dtype
    normed = (wide(x) - _by_channel(saved_mean, x)) * _by_channel(saved_rstd, x)
    sums, moments = reduced(grad.sum(dims), (grad * normed).sum(dims))
    scale = saved_rstd if weight is None else saved_rstd * weight
    inner = grad - (_by_channel(sums, x) + normed * _by_channel(moments, x)) / count
    return (
        (inner * _by_channel(scale, x)).to(dtype) if mask[0] else None,
        moments.to(scale.dtype, copy=True) if mask[1] else None,
        sums.to(scale.dtype, copy=True) if mask[2] else None,
    )


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "native_batch_norm.default": _forward,
    "_native_batch_norm_legit.default": _forward,
    "_native_batch_norm_legit.no_stats": _without_statistics,
    "_batch_norm_with_update.default": _with_update,
    "native_batch_norm_backward.default": _backward,
    "batch_norm_backward.default": _backward,
}
