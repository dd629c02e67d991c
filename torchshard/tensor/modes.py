"""What a user may allow or forbid for a while: operators without a rule, plain tensors beside DTensors."""

import inspect
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torchshard._torch import guard_attribute, untraced
from torchshard.errors import ShardingError, UnsupportedOperatorError

Fallback = Literal["replicate", "error", "silent"]


class _State(threading.local):
    fallback: Fallback = "replicate"
    implicit_replication = False


_state = _State()
_said: set[str] = set()

_NOT_USERS = ("torchshard", "torch")


@contextmanager
def fallback(mode: Fallback) -> Iterator[None]:
    """What to do with an operator that has no rule, in this thread.

    Under torch.compile(fullgraph=True) it stands around the calls of what is compiled.

    Args:
        mode: "replicate" gathers its operands on every rank and says so once an operator (the default), "silent" does
            so without a word, "error" raises UnsupportedOperatorError.
    """
    if mode not in ("replicate", "error", "silent"):
        raise ShardingError("No such fallback.", expected="'replicate', 'error' or 'silent'", got=repr(mode))
    before = _fall_back(mode)
    try:
        yield
    finally:
        _fall_back(before)


@untraced  # a graph is made before what it would set is set
def _fall_back(mode: Fallback) -> Fallback:
    before, _state.fallback = _state.fallback, mode
    return before


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Take plain tensors beside DTensors to be the same on every rank, in this thread.

    Under torch.compile(fullgraph=True) it stands around the calls of what is compiled.
    """
    before, _state.implicit_replication = _state.implicit_replication, True
    try:
        yield
    finally:
        _state.implicit_replication = before


def replicates_plain_tensors() -> bool:
    """Whether implicit_replication is on; a graph that is being made is for this answer only."""
    guard_attribute(__name__, "_state.implicit_replication")
    return _state.implicit_replication


def say_replicated(name: str, why: str) -> None:
    """An operator is about to gather its operands: warn once, raise, or keep silent, as the user wants.

    A graph that is being made is for this wish only.
    """
    guard_attribute(__name__, "_state.fallback")
    if _state.fallback == "error":
        raise UnsupportedOperatorError(
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


def _users_frame() -> int:
    """The stack level, for the caller, of the first frame that is neither torch's nor this package's."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        level, frame = level + 1, frame.f_back
    return level
