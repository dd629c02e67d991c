"""GPUs in a test mean the CPU: for tests that name devices without needing what only a GPU can do."""

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _OnCPU(TorchFunctionMode):
    """Every function of torch gets the CPU where a GPU is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _moved(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(_moved, args[1:]))
        return func(*args, **kwargs)


def _moved(value: Any) -> Any:
    """The CPU for a GPU given by number, name or device; anything else as it is."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    is_name = isinstance(value, str) and value.startswith("cuda")
    is_device = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_number or is_name or is_device else value


class _Stream:
    """The stream of an accelerator that is not there: there is nothing to wait for."""

    def wait_stream(self, other: Any) -> None: ...


class _Event:
    """An event of that stream: it has always happened."""

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...


def _nothing() -> Any:
    """A function that does nothing; each a new one, as Dynamo looks functions up by identity."""
    return lambda *args, **kwargs: None


def take_over(wrapper: type) -> None:
    """Give GPUs the meaning of the CPU, in this process and for good.

    Args:
        wrapper: the class under test; its device_ids and output_device count as not given.
    """
    _OnCPU().__enter__()
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, _nothing())
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.current_stream = lambda *args: _Stream()
    torch.Event = _Event  # type: ignore[misc]
    to, construct = torch.nn.Module.to, wrapper.__init__

    @functools.wraps(to)
    def module_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return to(self, *map(_moved, args), **{name: _moved(value) for name, value in kwargs.items()})

    @functools.wraps(construct)
    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        args = args[:1]  # device_ids and output_device follow; no test gives more by position
        construct(self, *args, **{**kwargs, "device_ids": None, "output_device": None})

    torch.nn.Module.to, wrapper.__init__ = module_to, on_cpu
