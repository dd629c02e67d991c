"""Buffers that are DTensors of this package, as torch's functions for state dicts see and set them."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed.tensor as upstream
from torch import Tensor, nn

from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.interop import to_torch
from torchshard.tensor.owners import Placed, ours

_hooked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Modules whose state dicts hold torch's DTensors for their buffers."""


def torch_buffers(module: nn.Module) -> None:
    """From now on state dicts hold torch's DTensors over the memory of buffers, and load them and whole plain tensors.

    The buffers themselves stay DTensors of this package, which forwards read and write to. It may be called again.
    """
    for submodule in module.modules():
        if submodule not in _hooked and any(_placed(submodule)):
            _hooked.add(submodule)
            submodule.register_state_dict_post_hook(_saved)
            submodule.register_load_state_dict_pre_hook(_loaded)


def torch_buffers_later(module: nn.Module) -> None:
    """As torch_buffers, from the first state dict on: for a module that has no modules below it yet."""
    module.register_state_dict_pre_hook(lambda module, *_: torch_buffers(module))
    module.register_load_state_dict_pre_hook(lambda module, *_: torch_buffers(module))


def _placed(module: nn.Module) -> Iterator[tuple[str, DTensor]]:
    return ((name, b) for name, b in module.named_buffers(recurse=False) if isinstance(b, DTensor))


def _saved(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, _buffer in _placed(module):
        if isinstance(x := state.get(prefix + name), DTensor):
            state[prefix + name] = to_torch(x.detach())  # type: ignore[arg-type]


def _loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, buffer in _placed(module):
        x = state.get(prefix + name)
        if isinstance(x, upstream.DTensor):
            state[prefix + name] = ours(x)
        elif isinstance(x, Tensor) and not isinstance(x, DTensor) and x.shape == buffer.shape:
            placed = Placed.of(buffer)
            state[prefix + name] = placed.saved(placed.loaded(x))
