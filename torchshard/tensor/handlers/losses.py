"""Losses whose mean is over the whole batch, not over one rank's part of it."""

from typing import Any

from torchshard.rules.losses import MEAN, SUM
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.handlers.parts import added


def nll_loss(func: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
    """The mean is a sum over a total weight, and both are sums over the ranks, where the batch is split."""
    if reduction != MEAN or not any(type(t) is DTensor and t._spec.sharding.splits for t in (x, target)):
        return NotImplemented
    return mean(*func(x, target, weight, SUM, ignore))


def mean(loss: DTensor, total: DTensor) -> tuple[DTensor, DTensor]:
    """The mean, and the total weight, from terms of the sum of losses and of that weight: by one collective."""
    layout = loss._spec.to(loss._spec.sharding.without_partial())
    value, weight = added(loss, total)
    return wrap(value / weight, layout), wrap(weight, layout)
