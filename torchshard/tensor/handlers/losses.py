"""Losses whose mean is over the whole batch, not over one rank's part of it."""

from collections.abc import Callable, Mapping
from typing import Any

from torchshard.tensor.autograd import redistribute

_MEAN, _SUM = 1, 2  # reductions, as ATen numbers them


def _nll_loss(func: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
    """The mean is a sum over a total weight, and both are sums over the ranks' parts of the batch."""
    if reduction != _MEAN:
        return NotImplemented
    loss, total = func(x, target, weight, _SUM, ignore)
    loss, total = (redistribute(t, t._spec.mesh.replicated()) for t in (loss, total))
    return loss / total, total


HANDLERS: Mapping[str, Callable[..., Any]] = {"nll_loss_forward.default": _nll_loss}
