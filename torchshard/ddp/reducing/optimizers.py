"""Optimizers that step in backward: each parameter's own, as soon as the bucket with its gradient is reduced."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from torchshard import _torch


def has_own_optimizer(param: torch.Tensor) -> bool:
    """Whether torch.distributed.optim has given this parameter optimizers to run in backward."""
    return hasattr(param, "_in_backward_optimizers")


class SteppingHook:
    """A communication hook that averages a bucket and then steps the optimizers of its parameters.

    Gradients of parameters that have such optimizers are None after the backward, as in torch.

    Args:
        group: the ranks to average over.
        params: of the wrapper; what torch has put on them to step at once, before the reduction, is taken off.
    """

    __name__ = "apply_optim_in_backward_hook"

    def __init__(self, group: dist.ProcessGroup, params: Iterable[torch.Tensor]) -> None:
        self._group = group
        self._stepped: list[torch.Tensor] = []
        _torch.remove_optimizer_hooks(params)

    def __call__(self, state: object, bucket: Any) -> "torch.futures.Future[torch.Tensor]":
        """See register_comm_hook."""
        work = dist.all_reduce(bucket.buffer().div_(self._group.size()), group=self._group, async_op=True)
        assert work is not None, "asynchronous collectives return their work"
        params, gradients = bucket.parameters(), bucket.gradients()

        def step(reduced: Any) -> torch.Tensor:
            result: torch.Tensor = reduced.value()[0]
            for param, gradient in zip(params, gradients, strict=True):
                if has_own_optimizer(param):
                    param.grad = gradient
                    for optimizer in param._in_backward_optimizers:
                        optimizer.step()
                    self._stepped.append(param)
            return result

        return work.get_future().then(step)  # type: ignore[no-any-return]

    def after_backward(self) -> None:
        """Drop the gradients that have been used."""
        for param in self._stepped:
            param.grad = None
        self._stepped.clear()
