"""What is pickled in a checkpoint as torch's own objects: sizes, types, devices, and tensors that are read whole."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.entries import TensorEntry
from torchshard.checkpoint.pickles import inert
from torchshard.checkpoint.pickles.inert import Global, Record, Size
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError
from torchshard.keys.containers import NESTING

if TYPE_CHECKING:
    import torch


_DICTS: Mapping[type, type[dict[Any, Any]]] = MappingProxyType({inert.OrderedDict: OrderedDict, inert.Counter: Counter})


def live(value: object, where: str) -> Any:
    """What is pickled as `value` of plain data: with torch's sizes, types and devices, and tensors that are read whole.

    Raises:
        CheckpointError: something that is not read, or containers nested too deep.
    """
    return _Live(where).made(value, 0)


class _Live:
    """Makes each container once: they may refer to each other in any way."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.known: dict[int, object] = {}

    def made(self, value: Any, depth: int) -> Any:
        """The value, `depth` containers below the first."""
        import torch

        if depth > NESTING:
            raise CheckpointError("Containers are nested too deep.", expected=f"at most {NESTING}", where=self.where)
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, TensorEntry):
            made: Any = torch.from_numpy(value.numpy()).view(getattr(torch, value.dtype))
        elif isinstance(value, Size):
            made = torch.Size(value)
        elif isinstance(value, tuple):
            made = tuple([self.made(item, depth + 1) for item in value])
        elif isinstance(value, list):
            made = self.known[id(value)] = []
            made += [self.made(item, depth + 1) for item in value]
        elif isinstance(value, dict):
            made = self.known[id(value)] = _DICTS.get(type(value), dict)()
            made.update({self.made(key, depth + 1): self.made(item, depth + 1) for key, item in value.items()})
        elif isinstance(value, Global) and value.name.removeprefix("torch.") in DTYPES:
            made = getattr(torch, value.name.removeprefix("torch."))
        elif isinstance(value, Record) and value.name == "torch.device":
            made = self.device(value.args)
        elif isinstance(value, Record) and value.name == inert.LAYOUT:
            made = torch.strided
        elif isinstance(value, (Global, Record)):
            raise CheckpointError("This is not plain data, and is not loaded.", got=value.name, where=self.where)
        else:
            return value
        self.known[id(value)] = made
        return made

    def device(self, args: tuple[Any, ...]) -> "torch.device":
        """As torch pickles it: a name, or that of its kind and a number."""
        import torch

        try:
            return torch.device(*args)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError("This is no device.", got=printable(args), where=self.where) from error
