"""FSDP together with DTensors: torch's FullyShardedDataParallel and fully_shard on modules that are tensor-parallel."""

from typing import TYPE_CHECKING

from torchshard._lazy import lazily

if TYPE_CHECKING:
    from torchshard.parallel.fsdp.extension import DTensorExtensions
    from torchshard.parallel.fsdp.fully import fully_shard, torch_parameters
    from torchshard.parallel.fsdp.installing import install
    from torchshard.parallel.fsdp.loading import load

__all__ = ["DTensorExtensions", "fully_shard", "install", "load", "torch_parameters"]

_HOMES = {
    "torchshard.parallel.fsdp.extension": "DTensorExtensions",
    "torchshard.parallel.fsdp.fully": "fully_shard torch_parameters",
    "torchshard.parallel.fsdp.installing": "install",
    "torchshard.parallel.fsdp.loading": "load",
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
