"""torch.compile for data parallel: gradients reduced inside of the backward graph, or between pieces of it.

`torch.compile(model, backend="torchshard")` finds the backend by its entry point; nothing has to be imported.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchshard.compiler.explaining import explain
    from torchshard.compiler.split import split_backend

__all__ = ["explain", "split_backend"]

_HOME = {"explain": "explaining", "split_backend": "split"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
