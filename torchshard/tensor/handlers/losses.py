"""Losses whose mean is over the whole batch, not over one rank's part of it."""

from typing import Any

from torchshard.rules.losses import MEAN, SUM
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import reduced


def nll_loss(func: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
    """The mean is a sum over a total weight, and both are sums over the ranks, where the batch is split."""
    if reduction != MEAN or not any(type(t) is DTensor and t._spec.sharding.splits for t in (x, target)):
        return NotImplemented
    loss, total = reduced(*func(x, target, weight, SUM, ignore))
    return loss / total, total
