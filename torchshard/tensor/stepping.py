"""Before an optimizer steps, gradients are brought to where their parameters lie, all of them at once.

So a gradient that is used several times goes once, and what an optimizer keeps of it (the momentum of SGD is a copy of
the first) lies as the parameter does: it takes up a part on each rank, and is saved as one.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchshard._torch import is_traced
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.redistribute import moved, redistribute_together


def bring_gradients_home(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A hook of all optimizers. A gradient that is to be differentiated stays as it is.

    A closure makes the gradients of the step, or of several, and they are brought when it has.
    """
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
    away = [*_elsewhere(optimizer)]
    if any(is_traced(p._local_tensor) for p in away):
        return
    gradients: list[Any] = [p.grad for p in away]
    moves = [(g._spec, g._spec.to(p._spec.sharding)) for p, g in zip(away, gradients, strict=True)]
    parts = redistribute_together([g._local_tensor for g in gradients], moves)
    for p, part, move in zip(away, parts, moves, strict=True):
        p.grad = wrap(part, moved(*move))


def _elsewhere(optimizer: torch.optim.Optimizer) -> Iterator[DTensor]:
    """Parameters whose gradients lie elsewhere on their mesh."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if type(p) is DTensor and type(gradient := p.grad) is DTensor:
                here, there = p._spec, gradient._spec
                moves = there.sharding is not here.sharding and there.mesh is here.mesh
                if moves and not gradient.requires_grad:
                    yield p
