"""Norms of lists of tensors, as gradient clipping takes them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten


def _foreach_norm(func: Any, tensors: Any, order: float = 2, dtype: Any = None) -> Any:
    return [aten.linalg_vector_norm(x, order, dtype=dtype) for x in tensors]


HANDLERS: Mapping[str, Callable[..., Any]] = {"_foreach_norm.Scalar": _foreach_norm}
