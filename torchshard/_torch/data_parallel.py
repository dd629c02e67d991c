"""What torch's own wrapper, and code that works with it, knows by private names."""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from torch import Tensor

from torchshard._torch.finding import find


def _locations() -> Any:
    """When a hook for buffers runs: torch.nn.parallel.distributed._BufferCommHookLocation (2.11-2.15)."""
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    return _BufferCommHookLocation


AFTER_FORWARD: Any = _locations().POST_FORWARD
"""Where torch's wrapper runs a hook for buffers unless it is told otherwise (2.11-2.15)."""


def is_before_forward(location: Any) -> bool:
    """Whether a hook for buffers is to run before forward."""
    return bool(location == _locations().PRE_FORWARD)


def buffer_hook(hook: Callable[..., Any], state: object, location: Any) -> Any:
    """What torch's wrapper keeps as `buffer_hook` (torch.nn.parallel.distributed._BufferCommHook, 2.11-2.15)."""
    from torch.nn.parallel.distributed import _BufferCommHook

    return _BufferCommHook(buffer_comm_hook=hook, buffer_comm_hook_state=state, buffer_comm_hook_location=location)


def is_joining(joinable: Any) -> bool:
    """Whether this is among what an enabled torch.distributed.algorithms.Join was given last (2.11-2.15).

    Joinable._join_config is how Join tells its joinables; it stays when the context is left.
    """
    return bool(joinable._join_config.enable)


def keep_metadata(renamed: Any, state: Any, names: Mapping[str, str]) -> None:
    """Give a state dict with other keys the versions of modules that torch keeps as its `_metadata` (2.11-2.15).

    Args:
        renamed: the new one.
        state: the one with the metadata, if it has any.
        names: new keys by old ones.
    """
    metadata = getattr(state, "_metadata", None)
    if metadata is None:
        return
    modules = {old.rpartition(".")[0]: new.rpartition(".")[0] for old, new in names.items()}
    renamed._metadata = type(metadata)((modules.get(path, path), value) for path, value in metadata.items())


def is_ignored_by_ddp(param: Tensor) -> bool:
    """Whether torch's DistributedDataParallel was told to leave this parameter alone (a mark of its own, 2.11-2.15)."""
    return bool(getattr(param, "_ddp_ignored", False))


def in_functional_call() -> bool:
    """Whether other tensors stand in for a module's, for one call: torch.func.functional_call is running.

    Only the stack knows (torch.nn.utils.stateless._functional_call, 2.11-2.15; without it no call is one).
    """
    call = find("nn.utils.stateless._functional_call")
    frame: FrameType | None = sys._getframe() if call else None
    while frame is not None and frame.f_code is not call.__code__:
        frame = frame.f_back
    return frame is not None
