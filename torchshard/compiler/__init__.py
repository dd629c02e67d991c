"""torch.compile for data parallel: gradients reduced inside of the backward graph, or between pieces of it.

`torch.compile(model, backend="torchshard")` finds the backend by its entry point; nothing has to be imported.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchshard.compiler.backend import torchshard as backend
    from torchshard.compiler.explain import explain
    from torchshard.compiler.split import split_backend

__all__ = ["backend", "explain", "split_backend"]

_HOME = {"backend": ("backend", "torchshard"), "explain": ("explain", "explain"), "split_backend": ("split", "split_backend")}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home, theirs = _HOME[name]
    return getattr(import_module(f"{__name__}.{home}"), theirs)
