"""torchshard: data parallel, sharded tensors and checkpoint conversion for torch.distributed.

The public names are resolved on first use, so that opening a checkpoint or asking for help does not import torch.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    pass

_HOME: dict[str, str] = {}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'torchshard' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
