"""Tensor and sequence parallelism: plans that turn the parameters of a module into DTensors."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchshard.parallel.context import context_parallel
    from torchshard.parallel.loss import loss_parallel
    from torchshard.parallel.mapping import local_map
    from torchshard.parallel.parts import local_parameters, placed_parameters
    from torchshard.parallel.plan import parallelize_module
    from torchshard.parallel.preparing import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
    from torchshard.parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "context_parallel",
    "local_map",
    "local_parameters",
    "loss_parallel",
    "parallelize_module",
    "placed_parameters",
]

_HOMES = {
    "context": "context_parallel",
    "mapping": "local_map",
    "loss": "loss_parallel",
    "parts": "local_parameters placed_parameters",
    "plan": "parallelize_module",
    "preparing": "PrepareModuleInput PrepareModuleInputOutput PrepareModuleOutput",
    "styles": "ColwiseParallel ParallelStyle RowwiseParallel SequenceParallel",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
