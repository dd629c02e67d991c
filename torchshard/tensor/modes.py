"""What a user may allow or forbid for a while: operators without a rule, plain tensors beside DTensors."""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from torchshard._torch import Inherited, ends_graphs, guard_attribute, takes_plain_for_replicated
from torchshard.errors import ShardingError
from torchshard.unsupported import unsupported

Fallback = Literal["replicate", "error", "silent"]


class _State:
    fallback = Inherited[Fallback]("replicate")
    implicit_replication = Inherited(False)
    made_of_numbers = Inherited(False)


_state = _State()
_said: set[str | tuple[str, str]] = set()

_NOT_USERS = ("torchshard", "torch")


@contextmanager
def fallback(mode: Fallback) -> Iterator[None]:
    """A context in which operators without a rule are handled as `mode` says.

    For this thread and the backwards that it calls. Under torch.compile(fullgraph=True) it stands around the calls of
    what is compiled.

    Args:
        mode: "replicate", the default outside of any context: operands are gathered, so that the operator runs on
            whole tensors on every rank, with a warning once for each operator. "silent": the same without a warning.
            "error": such an operator raises UnsupportedOperatorError.

    Raises:
        ShardingError: another mode.
    """
    if mode not in ("replicate", "error", "silent"):
        raise ShardingError("No such fallback.", expected="'replicate', 'error' or 'silent'", got=repr(mode))
    before = _fall_back(mode)
    try:
        yield
    finally:
        _fall_back(before)


@ends_graphs("a graph is made before what it would set is set")
def _fall_back(mode: Fallback) -> Fallback:
    before, _state.fallback = _state.fallback, mode
    return before


@contextmanager
def implicit_replication() -> Iterator[None]:
    """A context in which operators accept plain tensors beside DTensors, and treat them as replicated.

    A plain tensor has to have the same values on every rank of the mesh, which is not checked. Outside of the context
    an operator on both kinds raises UnsupportedOperatorError. For this thread and the backwards that it calls. Under
    torch.compile(fullgraph=True) it stands around the calls of what is compiled.
    """
    if torch.compiler.is_dynamo_compiling():  # a graph is made before it would be set, and Dynamo loses _state's writes
        yield
        return
    before, _state.implicit_replication = _state.implicit_replication, True
    try:
        yield
    finally:
        _state.implicit_replication = before


@contextmanager
def plain_are_replicas() -> Iterator[None]:
    """The same within an operator all whose plain tensors are made of numbers; no graph depends on it."""
    before, _state.made_of_numbers = _state.made_of_numbers, True
    try:
        yield
    finally:
        _state.made_of_numbers = before


def replicates_plain_tensors() -> bool:
    """Whether implicit_replication is on, here or where torch itself makes plain tensors of numbers.

    A graph that is being made is for this answer only; it does not ask torch, of whose state it has no guard.
    """
    if _state.made_of_numbers:
        return True
    guard_attribute(__name__, "_state.implicit_replication")
    return _state.implicit_replication or (takes_plain_for_replicated() and not torch.compiler.is_compiling())


def say_replicated(name: str, why: str) -> None:
    """An operator is about to gather its operands: warn once, raise, or keep silent, as the user wants.

    A graph that is being made is for this wish only.
    """
    guard_attribute(__name__, "_state.fallback")
    if _state.fallback == "error":
        raise unsupported(
            f"{name} has no sharded way to run: {why}.",
            expected="a rule for these operands, as fallback('error') is on",
            fix="redistribute the operands to Replicate(), or allow it with torchshard.fallback('replicate')",
        )
    if _state.fallback == "replicate" and name not in _said:
        _said.add(name)
        warnings.warn(
            f"torchshard: {name} gathers its operands on every rank ({why}; said once). torchshard.register_rule gives "
            "it a rule, torchshard.fallback('silent') allows it without a word",
            RuntimeWarning,
            stacklevel=_users_frame(),
        )


def say_taken_alike(name: str, argument: str) -> None:
    """An operator is about to take a plain tensor of one element for the same on every rank: warn once."""
    if (name, argument) not in _said:
        _said.add((name, argument))
        warnings.warn(
            f"torchshard: {name} takes its argument {argument!r}, a plain tensor of one element that is no scalar, to "
            "be the same on every rank (said once). A scalar, a DTensor or torchshard.implicit_replication() say so",
            RuntimeWarning,
            stacklevel=_users_frame(),
        )


def _users_frame() -> int:
    """The stack level, for the caller, of the first frame that is neither torch's nor this package's."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        level, frame = level + 1, frame.f_back
    return level
