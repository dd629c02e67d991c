"""Data parallel: a module wrapped so that its gradients are averaged over ranks while backward runs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchshard.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchshard.ddp import wrapper

    return getattr(wrapper, name)
