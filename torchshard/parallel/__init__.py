"""Tensor and sequence parallelism: plans that turn the parameters of a module into DTensors."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchshard.parallel.plan import parallelize_module
    from torchshard.parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "RowwiseParallel",
    "SequenceParallel",
    "parallelize_module",
]

_HOMES = {
    "plan": "parallelize_module",
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
