"""Backwards under compiled autograd: hooks that Dynamo traces into one graph with the backward.

No hook is called then and nothing tells the end of a backward: what hooks do is read by Dynamo once and compiled. So
these hooks touch plain values only, and each gradient is averaged where it is complete, by a functional collective that
the compiler places. What can only be known while a backward runs is checked at the next forward.
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchshard import _torch
from torchshard.ddp.telling import messages

if TYPE_CHECKING:
    from torchshard.ddp.reducing.reducer import Reducer

_collectives = _torch.functional_collectives()
_all: "weakref.WeakSet[Traced]" = weakref.WeakSet()


def in_use() -> bool:
    """Whether the backward that is being compiled may be one of a wrapper's."""
    return bool(_all) and _torch.in_compiled_autograd()


class Traced:
    """What a reducer's hooks do in a backward under compiled autograd.

    Attributes:
        sync: whether the backward that runs is to be reduced; None from a forward until a backward reaches its output.
        averaged: numbers of the parameters that were averaged since the last forward, in order.
        excluded: the setting by which gradients cannot be averaged in this way, if there is one.
    """

    def __init__(self, reducer: "Reducer") -> None:
        _torch.take_missing_gradients()
        self._names, self._group = reducer.names, reducer.group.group_name
        self._scale, self._dtype = 1.0 / reducer.group.size(), reducer.reduction.dtype
        self.sync: bool | None = None
        self.averaged: list[int] = []
        self.excluded: str | None = None
        _all.add(self)

    def before_forward(self, reducer: "Reducer", excluded: str | None) -> None:
        """Check what the last backward has done; raises if it was not the same on all ranks, or left gradients out.

        Args:
            reducer: whose forward begins.
            excluded: see the attribute.
        """
        done, self.averaged[:], self.sync = [*self.averaged], [], None
        self.excluded, self._dtype = excluded, reducer.reduction.dtype
        if not done:
            return
        reducer.exchange.agreement.restart()
        reducer.exchange.confirm("averaged under compiled autograd: " + " ".join(self._names[i] for i in done))
        reducer.exchange.issued += len(done)
        reducer.counters.backwards += 1
        reducer.counters.in_graph += len(done)
        if missing := sorted(set(range(len(self._names))) - set(done)):
            raise RuntimeError(messages.unfinished_text(reducer.group.rank(), missing, self._names))

    def reach(self, sync: bool) -> None:
        """A backward has reached an output of a forward."""
        if self.sync is not None and self.sync is not sync:
            raise RuntimeError(
                "DistributedDataParallel: backwards of forwards with and without no_sync(), in one or one after the "
                "other, cannot be told apart under compiled autograd; run each backward before the next forward"
            )
        self.sync = sync

    def average(self, param: torch.Tensor, index: int) -> None:
        """The gradient of a parameter is complete."""
        if not self.sync:
            return
        if self.excluded is not None:
            raise NotImplementedError(messages.excluded_text(self.excluded))
        grad = param.grad
        assert grad is not None, "just accumulated"
        sent = (grad if self._dtype is None else grad.to(self._dtype)) * self._scale
        param.grad = _collectives.wait_tensor(_collectives.all_reduce(sent, "sum", self._group)).to(grad.dtype)
        self.averaged.append(index)

    def hook(self, index: int, otherwise: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
        """For one parameter; a backward without compiled autograd goes on as usual."""

        def gradient_complete(param: torch.Tensor) -> None:
            if _torch.in_compiled_autograd():
                self.average(param, index)
            else:
                otherwise(param)

        return gradient_complete

    def prehook(self, sync: bool, otherwise: Callable[[Any], None]) -> Callable[[Any], None]:
        """For the node of an output; sync: of its forward."""

        def reached(gradients: object) -> None:
            if _torch.in_compiled_autograd():
                self.reach(sync)
            else:
                otherwise(gradients)

        return reached
