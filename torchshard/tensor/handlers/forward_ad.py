"""What forward AD asks of a tensor and its tangent; answered by layouts, nothing is moved."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchshard.tensor.dtensor import DTensor


def _make_dual(func: Any, primal: DTensor, tangent: Any, level: int) -> Any:
    """Another view of the tensor; autograd attaches the tangent to it."""
    return torch.ops.aten.alias(primal)


def _is_same_size(func: Any, x: Any, other: Any) -> bool:
    return bool(x.shape == other.shape)


def _has_same_storage_numel(func: Any, x: Any, other: Any) -> bool:
    """Whether one could be a view of the other's memory: dense tensors of as many elements."""
    return bool(x.numel() == other.numel())


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "_make_dual.default": _make_dual,
    "is_same_size.default": _is_same_size,
    "_has_same_storage_numel.default": _has_same_storage_numel,
}
