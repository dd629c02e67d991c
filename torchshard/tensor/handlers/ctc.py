"""The CTC loss of a split batch: each sequence is aligned on its own, by the rank that holds it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import batched, by_batch, made_of, part

_BATCH = 1
"""Of the scores, whose first dim is time."""


def _loss(func: Any, scores: Any, targets: Any, *args: Any) -> Any:
    """The losses, and what backward reads, with room for targets of any length: the longest of a part may be short."""
    if not _apart(scores, targets, *args[:2]):
        return NotImplemented
    first, second = (batched(scores._spec.sharding, _BATCH, at) for at in (0, 1))
    lengths = [part(n, first) for n in args[:2]]
    losses, kept = func(part(scores, second), part(targets, first), *lengths, *args[2:])
    room = 2 * targets.shape[1] + 1
    kept = torch.constant_pad_nd(kept, (0, room - kept.shape[2]), -torch.inf)
    count = scores.shape[_BATCH]
    return made_of(losses, first, (count,)), made_of(kept, first, (count, *kept.shape[1:]))


def _loss_backward(func: Any, grad: Any, scores: Any, targets: Any, *args: Any) -> Any:
    inputs, wanted, losses, kept, *rest = args
    if type(grad) is not DTensor or not _apart(scores, targets, inputs, wanted):
        return NotImplemented
    first, second = (batched(scores._spec.sharding, _BATCH, at) for at in (0, 1))
    parts = [part(x, first) for x in (targets, inputs, wanted, losses, kept)]
    of_scores = func(part(grad, first), part(scores, second), *parts, *rest)
    return made_of(of_scores, second, tuple(scores.shape))


def _apart(scores: Any, *others: Any) -> bool:
    """Whether the batch of the scores is split, and targets and lengths have a row for each sequence."""
    if not by_batch(scores, _BATCH) or scores.ndim != 3:
        return False
    count = scores.shape[_BATCH]
    rows = all(type(x) is DTensor and x.ndim and x.shape[0] == count for x in others)
    return rows and others[0].ndim == 2


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "_ctc_loss.Tensor": _loss,
    "_ctc_loss_backward.Tensor": _loss_backward,
}
