"""The backward that runs: which gradients it will bring, and when it is over, be it one that runs others inside."""

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from torchshard import _torch


class Leaves:
    """Where the gradients of parameters end in autograd's graph.

    Args:
        params: parameters; data of another dtype or device in one moves its end.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._nodes: list[Any] = [None] * len(params)
        self.renew()

    def renew(self) -> None:
        """Look all of them up anew. Those of parameters that are frozen just now stay."""
        if not self._params or (all(self._nodes) and _torch.in_transform()):  # a transform ends in its own inputs
            return
        with torch.inference_mode(False), torch.enable_grad():  # else nothing has a node
            end = _Behind.apply(*self._params)  # type: ignore[no-untyped-call]
        if end.grad_fn is not None:  # which, before torch 2.13, knows what is before it as long as its result lives
            before = end.grad_fn.next_functions
            self._nodes = [new or old for (new, _), old in zip(before, self._nodes, strict=True)]

    def __getitem__(self, index: int) -> Any:
        return self._nodes[index]

    def of(self, indices: Iterable[int]) -> list[Any]:
        """Those of several."""
        return [*map(self._nodes.__getitem__, indices)]

    def will_run(self, index: int) -> bool:
        """Whether the backward that runs will accumulate the gradient of this parameter."""
        return _torch.will_run(self._nodes[index]) or (self._has_moved(index) and _torch.will_run(self._nodes[index]))

    def will_all_run(self, indices: Collection[int]) -> bool:
        """The same of several."""
        return _torch.will_run(*self.of(indices)) or all(map(self.will_run, indices))

    def some_will_run(self) -> bool:
        """Whether it will do so for any."""
        return any(map(_torch.will_run, self._nodes)) or any(map(self.will_run, range(len(self._params))))

    def _has_moved(self, index: int) -> bool:
        param = self._params[index]
        if not param.requires_grad or _torch.in_transform():
            return False
        old, self._nodes[index] = self._nodes[index], torch.autograd.graph.get_gradient_edge(param).node
        return self._nodes[index] is not old


class _Behind(torch.autograd.Function):
    """A node behind those of all parameters: to look each one up by itself takes ten times as long."""

    @staticmethod
    def forward(ctx: Any, *params: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise AssertionError("nothing is computed with it")


class Ending:
    """The end of a backward: the engine calls `act` then, unless the backward fails.

    Where backwards run inside of one another, as re-entrant checkpoints have it, the one in which the end was first
    asked for counts.

    Args:
        act: a bound method, held weakly; called at the end; it calls `come`.
        at_failure: called instead when a backward has failed, or `act` has.

    Attributes:
        is_awaited: whether a backward runs whose end was asked for.
    """

    def __init__(self, act: Callable[[], None], at_failure: Iterable[Callable[[], None]]) -> None:
        self._act, self._at_failure, self.is_awaited = weakref.WeakMethod(act), at_failure, False
        self._awaited: weakref.ref[Callable[[], None]] | None = None

    def ask(self) -> None:
        """To be called in a backward."""
        if not self.is_awaited:
            call = functools.partial(_call, self._act)  # the engine drops it if the backward fails
            acts, ending = self._at_failure, weakref.ref(self)

            def failed(_call: object) -> None:
                if (own := ending()) is not None:
                    own.is_awaited = False
                for act in acts:
                    act()

            self._awaited, self.is_awaited = weakref.ref(call, failed), True
            _torch.queue_callback(call)

    def come(self) -> None:
        """The backward is over."""
        self._awaited, self.is_awaited = None, False


def _call(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    if act := method():
        act()
