"""Data parallel: a module wrapped so that its gradients are averaged over ranks while backward runs."""

from typing import TYPE_CHECKING

from torchshard._lazy import lazily

if TYPE_CHECKING:
    from torchshard.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]

__getattr__, __dir__ = lazily(__name__, {"torchshard.ddp.wrapper": "DistributedDataParallel"})
