"""one_hot, which torch makes of `classes == arange(n)` for tensor classes: without asking for classes that are none."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard.tensor.dtensor import DTensor


def require_classes(name: str, arguments: Sequence[Any]) -> None:
    """Raise on every rank what one_hot raises for plain tensors.

    In torch's own implicit_replication() users write comparisons, too; only `classes[..., None] == torch.arange(n)`
    cannot be told from one_hot there.

    Args:
        name: of an operator for which torch itself may have made a plain tensor.
        arguments: of its call.

    Raises:
        RuntimeError: a class below 0, or from n on.
    """
    if name != "eq.Tensor":
        return
    classes, numbers = arguments
    if not isinstance(classes, DTensor) or classes.shape[-1:] != (1,) or not _counts(numbers):
        return
    if bool(((classes < 0) | (classes >= len(numbers))).any()):
        below = bool((classes < 0).any())
        raise RuntimeError(f"Class values must be {'non-negative' if below else 'smaller than num_classes'}.")


def _counts(x: Tensor) -> bool:
    """Whether that is a plain 0, 1, 2, ..."""
    if isinstance(x, DTensor) or x.ndim != 1 or x.dtype != torch.int64:
        return False
    return torch.equal(x, torch.arange(len(x), device=x.device))
