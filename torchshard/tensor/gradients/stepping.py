"""While an optimizer steps, gradients lie where their parameters do: brought there before, all of them at once.

So a gradient that is used several times goes once, and what an optimizer keeps of it (the momentum of SGD is a copy of
the first) lies as the parameter does: it takes up a part on each rank, and is saved as one. Afterwards `.grad` is the
tensor that it was, which others may hold, or the memory of.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchshard._torch import is_traced, skip_alone
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.moving.redistribute import moved, redistribute_together

_brought: "WeakKeyDictionary[torch.optim.Optimizer, dict[int, tuple[DTensor, DTensor, DTensor, int]]]" = (
    WeakKeyDictionary()
)
"""Of optimizers that step: parameters, their gradients, what is in their place, and its version; by id of the first."""


def attend_steps() -> None:
    """Put hooks on all optimizers; they have nothing to do where parameters are plain."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


@skip_alone
def _before(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A closure makes the gradients of the step, or of several, and they are brought when it has."""
    if torch.compiler.is_compiling():  # what a compiled step sees, the operators move
        return None
    closure = kwargs.get("closure")
    if callable(closure):
        return args, {**kwargs, "closure": _then_brought(optimizer, closure)}
    if len(args) > 1 and callable(args[1]):  # the first is the optimizer
        return (args[0], _then_brought(optimizer, args[1]), *args[2:]), kwargs
    _bring(optimizer)
    return None


def _then_brought(optimizer: torch.optim.Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(closure)
    def made_and_brought(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        _bring(optimizer)
        return result

    return made_and_brought


def _bring(optimizer: torch.optim.Optimizer) -> None:
    if torch.compiler.is_compiling():  # in a closure that is traced
        return
    away = [*_elsewhere(optimizer)]
    if not away or any(is_traced(p._local_tensor) for p, _ in away):
        return
    moves = [(gradient._spec, gradient._spec.to(p._spec.sharding)) for p, gradient in away]
    parts = redistribute_together([gradient._local_tensor for _, gradient in away], moves)
    held = _brought.setdefault(optimizer, {})
    for (p, gradient), part, move in zip(away, parts, moves, strict=True):
        here = wrap(part, moved(*move))
        held[id(p)] = p, gradient, here, here._version
        p.grad = here


def _elsewhere(optimizer: torch.optim.Optimizer) -> Iterator[tuple[DTensor, DTensor]]:
    """Parameters and their gradients, where these lie elsewhere on the mesh and are not to be differentiated."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if type(p) is DTensor and type(gradient := p.grad) is DTensor:
                here, there = p._spec, gradient._spec
                moves = there.sharding is not here.sharding and there.mesh is here.mesh
                if moves and not gradient.requires_grad:
                    yield p, gradient


@skip_alone
def _after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """What a step, or a closure, has written to a gradient is written to the one that it stood for."""
    if torch.compiler.is_compiling() or not _brought:
        return
    for p, gradient, here, version in _brought.pop(optimizer, {}).values():
        is_written = here._version != version
        if p.grad is here:  # else a closure has let go of it
            if is_written:
                with torch.no_grad():
                    gradient.copy_(here)
            p.grad = gradient
