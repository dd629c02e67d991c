"""Which wrapper's forward is running: compiled graphs ask for it, at compile time and at every call.

What a graph is compiled for, of that wrapper, stands in `wrapped`, `segments` and `pieces`: guards of Dynamo read them,
so that a call for which they are different is compiled anew. They stay as they are while the wrapper's backward runs,
in which checkpoints compute their part of the forward again, in whatever thread: hence one of each for the process.
"""

import weakref
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchshard.ddp.reducing.reducer import Reducer

wrapped = False  # whether there is one
segments = pieces = ""  # its sizes of what graphs fill at once, and of what graphs are cut into; as text


def _nobody() -> None:
    return None


_shown: "Callable[[], Reducer | None]" = _nobody
_running: "ContextVar[Reducer | None]" = ContextVar("torchshard_ddp_running", default=None)


def enter(reducer: "Reducer") -> "Token[Reducer | None]":
    """The forward of this reducer's wrapper begins."""
    token = _running.set(reducer)
    show(reducer)
    return token


def leave(outer: "Token[Reducer | None]") -> None:
    """It is over; give what `enter` has returned."""
    _running.reset(outer)
    show(_running.get())


def reducer() -> "Reducer | None":
    """The reducer of the innermost wrapper whose forward is running, if there is one."""
    return _running.get()


def reducer_to_compile_for() -> "Reducer | None":
    """The same; or that of the wrapper whose backward runs, in which a part of its forward may be computed again."""
    return reducer() or _shown()


def show_running() -> None:
    """Have guards see the wrapper whose forward is running; to be called when a backward is over, or has failed."""
    show(_running.get())


def show(reducer: "Reducer | None") -> None:
    """Have guards see the wrapper of this reducer; or none."""
    global wrapped, segments, pieces, _shown
    _shown = weakref.ref(reducer) if reducer else _nobody
    wrapped = reducer is not None
    segments, pieces = reducer.lending.sizes if reducer else ("", "")
