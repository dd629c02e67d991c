"""Parameters that take the places of others, as DTensors those of plain tensors: what must not be lost by that."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from torchshard._torch import has_hooks, has_hooks_at_end
from torchshard.errors import ShardingError

_new: Any = WeakTensorKeyDictionary()  # no weak references: torch would not convert such tensors
"""Parameters that somebody still holds, with those that have taken their places."""

_watched: ContextVar[bool] = ContextVar("watched", default=False)
"""Whether a call around this one looks for optimizers."""


def require_replaceable(old: nn.Parameter, module: nn.Module, name: str) -> None:
    """Raise ShardingError if something would be lost with a parameter.

    Hooks would not run on another in its place; and one that has been replaced in a module that shares it would go
    apart from that.

    Args:
        old: the parameter.
        module: whose parameter it is.
        name: its name there.
    """
    if has_hooks(old) or has_hooks_at_end(old):
        raise ShardingError(
            "A parameter with hooks is to be replaced by another, for which they would not run.",
            expected="a parameter without hooks or optimizers that step in backward",
            got="one with hooks",
            where=f"{name} of {type(module).__name__}",
            fix="register them afterwards, on the new parameter; for DistributedDataParallel(device_mesh=) after "
            "torchshard.parallel.local_parameters(module)",
        )
    if now(old) is not old:
        raise ShardingError(
            "A parameter is shared with a module where another has taken its place, from which it would go apart.",
            expected="modules that share parameters, in one call",
            got="one of them, after another",
            where=f"{name} of {type(module).__name__}",
            fix="one call for both: for a module that holds them, or fully_shard([module, other]); where they are to be"
            " two, give one module nn.Parameter(parameter.detach().clone())",
        )


def successor(old: nn.Parameter, value: Tensor, module: nn.Module, name: str) -> nn.Parameter:
    """A parameter that takes the place of another, with the attributes and `grad_dtype` that users have given that one.

    Args:
        old, module, name: as for require_replaceable, which raises.
        value: without history.
    """
    require_replaceable(old, module, name)
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    vars(new).update({k: v for k, v in vars(old).items() if k not in vars(new)})
    if old.grad_dtype is not old.dtype:  # by default it follows the dtype
        new.grad_dtype = old.grad_dtype
    _new[old] = new
    return new


def now(parameter: Any) -> Any:
    """What has taken a parameter's place, if anything has."""
    while (new := _new.get(parameter)) is not None:
        parameter = new
    return parameter


def before(parameter: Tensor) -> Tensor:
    """The parameter in whose place this one is, if it is in any's that somebody holds."""
    return next((old for old, new in _new.items() if new is parameter), parameter)


@contextmanager
def replacing(module: nn.Module, what: str) -> Iterator[None]:
    """Parameters of a module are replaced in here: warn of optimizers that hold those which it has no more.

    Their steps would change nothing. Where nobody holds any, which is usual, nothing is looked for.

    Args:
        module: whose parameters.
        what: the function that replaces them.
    """
    if _watched.get():
        yield
        return
    token, held = _watched.set(True), [TensorWeakRef(p) for p in module.parameters()]
    try:
        yield
    finally:
        _watched.reset(token)
    left = {id(p) for p in (ref() for ref in held) if p is not None} - {id(p) for p in module.parameters()}
    if left:
        for found in gc.get_objects():
            if issubclass(type(found), torch.optim.Optimizer):
                _warn(found, left, what)


def _warn(optimizer: torch.optim.Optimizer, left: set[int], what: str) -> None:
    count = sum(id(p) in left for group in getattr(optimizer, "param_groups", ()) for p in group["params"])
    if count:
        warnings.warn(
            f"{what} has replaced {count} parameters of this {type(optimizer).__name__}, whose steps do not change the "
            "module any more; make optimizers afterwards",
            stacklevel=5,
        )
