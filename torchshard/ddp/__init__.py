"""Data parallel: a module wrapped so that its gradients are averaged over ranks while backward runs."""

from typing import TYPE_CHECKING

from torchshard._lazy import lazily

if TYPE_CHECKING:
    from torchshard.ddp.states import bare_state_dict
    from torchshard.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "bare_state_dict"]

_HOMES = {"torchshard.ddp.states": "bare_state_dict", "torchshard.ddp.wrapper": "DistributedDataParallel"}
__getattr__, __dir__ = lazily(__name__, _HOMES)
