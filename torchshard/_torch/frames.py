"""Frames: those that Dynamo leaves alone, and those of calls of modules."""

from collections.abc import Callable, Collection, Iterator
from types import FrameType, FunctionType
from typing import Any, TypeVar, cast

import torch

from torchshard._torch.finding import find

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


def skip_frame(function: _Function) -> _Function:
    """Have Dynamo leave this frame alone, and go on with those that it calls.

    What torch.compiler.disable(recursive=False) says, but without a wrapper and without importing torch._dynamo,
    which takes more than a second (torch._C._dynamo.eval_frame.set_code_exec_strategy, 2.11-2.15).
    """
    return _never_trace(function, below=False)


def skip_alone(function: _Function) -> _Function:
    """Have Dynamo trace this function where it is called in a frame that is traced, and leave it alone otherwise.

    For hooks of modules and methods of DTensors: eager code calls them with nothing to compile in them, nor in what
    they call (the same, 2.11-2.15). Without it, they are graphs of their own.
    """
    _leave_alone(function, below=True)
    return function


def skip_methods(*, but_not_below: Collection[str] = ()) -> Callable[[_Class], _Class]:
    """`skip_alone` for each function of a class.

    Args:
        but_not_below: those that run code of the user. As torch's own are, they are left alone, and not what they call.
    """

    def skip(kind: _Class) -> _Class:
        for name, value in vars(kind).items():
            for function in _functions_of(value):
                _leave_alone(function, name not in but_not_below)
        return kind

    return skip


def _functions_of(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _functions_of(value.__func__)
    elif isinstance(value, property):
        for function in (value.fget, value.fset, value.fdel):
            yield from _functions_of(function)


def untraced(function: _Function) -> _Function:
    """Have Dynamo leave this function alone, and all that it calls: torch.compiler.disable without its cost."""
    return _never_trace(function, below=True)


def ends_graphs(reason: str) -> Callable[[_Function], _Function]:
    """`untraced`, for what regions of the user may call: Dynamo tells them the reason."""
    return lambda function: _never_trace(function, below=True, reason=reason)


def _never_trace(function: _Function, below: bool, reason: str | None = None) -> _Function:
    if not _leave_alone(function, below):
        return cast(_Function, torch.compiler.disable(function, recursive=below, reason=reason))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


def _leave_alone(function: Callable[..., Any], below: bool) -> bool:
    frames = find("_C._dynamo.eval_frame")
    if not hasattr(frames, "_FrameExecStrategy"):
        return False
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip if below else default))
    return True


def tensors_of_call(frame: FrameType) -> list[torch.Tensor] | None:
    """All that the module has whose forward is called in a frame, and is given, as hooks have left it; None elsewhere.

    (Locals of torch.nn.Module._call_impl and of the function in it, torch.utils._pytree, 2.11-2.15.)
    """
    from torch.utils._pytree import tree_leaves

    names = {**frame.f_locals}  # since Python 3.13 no dict
    if frame.f_globals is not torch.nn.Module.__call__.__globals__ or not {"self", "args", "kwargs"} <= names.keys():
        return None
    module = names["self"]
    given = tree_leaves((vars(module), names["args"], names["kwargs"]))
    return [*module.parameters(), *module.buffers(), *[x for x in given if isinstance(x, torch.Tensor)]]
