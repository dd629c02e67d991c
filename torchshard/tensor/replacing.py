"""Parameters that take the places of others, as DTensors those of plain tensors: what must not be lost by that."""

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from torchshard._torch import has_hooks, has_hooks_at_end
from torchshard.errors import ShardingError


class _Place(NamedTuple):
    """What has taken a parameter's place, and in which module, by which name."""

    new: nn.Parameter
    module: "weakref.ref[nn.Module]"
    name: str

    def is_taken_from(self, old: nn.Parameter) -> bool:
        """Whether the module is there, and does not hold the old one: a call may have failed, or it was put back."""
        module = self.module()
        return module is not None and module._parameters.get(self.name) is not old


_new: Any = WeakTensorKeyDictionary()  # no weak references: torch would not convert such tensors
"""Parameters that somebody still holds, each with the place that another has taken."""

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
    if (place := _new.get(old)) is not None and place.is_taken_from(old):
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
    _new[old] = _Place(new, weakref.ref(module), name)
    return new


def now(parameter: Any) -> Any:
    """What has taken a parameter's place, if anything has."""
    while (place := _new.get(parameter)) is not None:
        parameter = place.new
    return parameter


def before(parameter: Tensor) -> Tensor:
    """The parameter in whose place this one is, if it is in any's that somebody holds."""
    return next((old for old, place in _new.items() if place.new is parameter), parameter)


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
