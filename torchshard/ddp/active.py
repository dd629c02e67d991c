"""Which wrapper's forward is running: compiled graphs ask for it, at compile time and at every call."""

from contextvars import ContextVar, Token

from torchshard.ddp.reducer import Reducer

_running: ContextVar[Reducer | None] = ContextVar("torchshard_ddp_running", default=None)


def enter(reducer: Reducer) -> Token[Reducer | None]:
    """The forward of this reducer's wrapper begins."""
    return _running.set(reducer)


def leave(outer: Token[Reducer | None]) -> None:
    """It is over; give what `enter` has returned."""
    _running.reset(outer)


def reducer() -> Reducer | None:
    """The reducer of the innermost wrapper whose forward is running, if there is one."""
    return _running.get()
