"""Kernels that torch chooses on GPUs alone, said by the operators that every device has, which keep what is split.

torch chooses them before it asks a DTensor (in `batch_norm`, `grid_sampler`): without this they would be gathered.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchshard.tensor.dtensor import DTensor

aten = torch.ops.aten


def _cudnn_batch_norm(func: Any, x: DTensor, *args: Any) -> Any:
    """Keeps nothing for its backward beside mean and rstd."""
    return *torch.native_batch_norm(x, *args), x._local_tensor.new_empty(0, dtype=torch.uint8)


def _miopen_batch_norm(func: Any, x: DTensor, *args: Any) -> Any:
    return torch.native_batch_norm(x, *args)


def _batch_norm_backward(func: Any, x: DTensor, grad: Any, weight: Any, mean: Any, var: Any, *saved: Any) -> Any:
    """Of training: for other batches torch takes the general one."""
    saved_mean, saved_rstd, eps, *_ = saved
    given = grad, x, weight, mean, var, saved_mean, saved_rstd
    return aten.native_batch_norm_backward(*given, True, eps, [True, True, True])


_CHOSEN = 0, 0, True
"""What cudnn's sampler is chosen for: bilinear, zeros beyond the edge, corners aligned."""


def _cudnn_grid_sampler(func: Any, x: Any, grid: Any) -> Any:
    return aten.grid_sampler_2d(x, grid, *_CHOSEN)


def _cudnn_grid_sampler_backward(func: Any, x: Any, grid: Any, grad: Any) -> Any:
    return aten.grid_sampler_2d_backward(grad, x, grid, *_CHOSEN, [True, True])


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "cudnn_batch_norm.default": _cudnn_batch_norm,
    "cudnn_batch_norm_backward.default": _batch_norm_backward,
    "miopen_batch_norm.default": _miopen_batch_norm,
    "miopen_batch_norm_backward.default": _batch_norm_backward,
    "cudnn_grid_sampler.default": _cudnn_grid_sampler,
    "cudnn_grid_sampler_backward.default": _cudnn_grid_sampler_backward,
}
