"""What forward AD asks of a tensor and its tangent; answered by layouts, nothing is moved."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchshard._torch import is_traced
from torchshard.tensor.dtensor import DTensor, dtensors_in
from torchshard.unsupported import unsupported


def _make_dual(func: Any, primal: DTensor, tangent: Any, level: int) -> Any:
    """Another view of the tensor; autograd attaches the tangent to it."""
    return torch.ops.aten.alias(primal)


def _is_same_size(func: Any, x: Any, other: Any) -> bool:
    return bool(x.shape == other.shape)


def _has_same_storage_numel(func: Any, x: Any, other: Any) -> bool:
    """Whether one could be a view of the other's memory: dense tensors of as many elements.

    Raises:
        UnsupportedOperatorError: make_fx traces a tangent and not its tensor: it takes no DTensor for a constant, and
            would note what is done to this rank's part.
    """
    if get_proxy_mode() is not None and not all(is_traced(t._local_tensor) for t in dtensors_in([x, other])):
        raise unsupported(
            "torch.func.linearize cannot record what depends on DTensors beside the tangents.",
            expected="plain tensors, or forward AD anew for each tangent",
            got="DTensors",
            fix="torch.func.jvp(function, primals, tangents)",
        )
    return bool(x.numel() == other.numel())


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "_make_dual.default": _make_dual,
    "is_same_size.default": _is_same_size,
    "_has_same_storage_numel.default": _has_same_storage_numel,
}
