"""Strides of results: where torch's meta kernels tell others than its kernels give, what tells theirs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def _as_both(x: Tensor, y: Tensor, *_: Any, **__: Any) -> Tensor:
    return x + y


def _without_gaps(_: Tensor, x: Tensor, *__: Any) -> Tensor:
    return x.new_empty(x.shape)


def _rolled(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Joined of two parts for each dim: channels_last is kept, other orders are not."""
    if 0 in x.shape:  # which the kernel copies, whatever the dims
        return x.clone()
    for shift, dim in zip(shifts, dims, strict=False):
        at = -shift % x.shape[dim]
        x = torch.cat([x.narrow(dim, at, x.shape[dim] - at), x.narrow(dim, 0, at)], dim)
    return x if dims else x.new_empty(x.shape)


def _keeping_images(func: Any, decides: int = 0) -> Callable[..., Tensor]:
    """An operator whose results are in channels_last if this operand is, and in order of rows otherwise."""

    def lie(*args: Any) -> Tensor:
        joined, made = torch.cat([args[decides]] * 2), func(*args)  # cat goes by the same
        order = torch.channels_last_3d if joined.ndim == 5 else torch.channels_last
        if joined.ndim < 4 or joined.stride() != torch.empty_like(joined, memory_format=order).stride():
            order = torch.contiguous_format
        return torch.empty_like(made, memory_format=order)

    return lie


_PADS = "reflection_pad2d", "replication_pad2d", "reflection_pad3d", "replication_pad3d"
_KEEP_IMAGES = "channel_shuffle", "native_channel_shuffle", "max_unpool2d", *_PADS

# Meta kernels that are made of several others go by some of the operands alone, or by their first comparison; kernels,
# of these operators by element, by all of them in turn; and by none where a number is raised to powers, or where memory
# for the gradient of a loss was made before.
_LIE_AS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("copysign.Tensor", "xlogy.Tensor", "special_xlog1py.default", "logit_backward.default"), _as_both),
    **dict.fromkeys(("native_dropout_backward.default", "floor_divide.default", "div.Tensor_mode"), _as_both),
    **dict.fromkeys(
        (f"{of}_backward.default" for of in ("softplus", "hardtanh", "hardswish", "hardsigmoid")), _as_both
    ),
    "elu_backward.default": lambda grad, *numbers_and_x: grad + numbers_and_x[-1],
    "pow.Scalar": _without_gaps,
    "roll.default": _rolled,
    "log_sigmoid_forward.default": lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)),
    **{f"{name}.default": _keeping_images(getattr(torch.ops.aten, name)) for name in _KEEP_IMAGES},
    **{f"{pad}_backward.default": _keeping_images(getattr(torch.ops.aten, f"{pad}_backward"), 1) for pad in _PADS},
    **dict.fromkeys((f"{of}_loss_backward.default" for of in ("mse", "huber", "smooth_l1")), _without_gaps),
    "_log_softmax_backward_data.default": _without_gaps,
    "binary_cross_entropy.default": lambda x, y, weight=None, mean=1: x.sum() if mean else torch.empty_like(x),
    "binary_cross_entropy_backward.default": lambda grad, x, *_: torch.empty_like(x),
}


def lying_alike(name: str, func: Any) -> Callable[..., Any]:
    """An operator, or what gives tensors without values the strides that its kernels give others."""
    return _LIE_AS.get(name, func)
