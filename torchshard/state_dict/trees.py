"""Nested containers: their tensors by path, and the same containers with other leaves."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed.tensor as upstream
from torch import Tensor, nn

from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of everything in a nesting of dicts, lists and tuples that is none itself.

    A path is made of the keys and positions, joined by dots.
    """
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        yield path, tree
        return
    for key, value in items:
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def with_leaves(tree: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """The same containers, of the same classes and with the same attributes, whose leaves are `change(path, leaf)`."""

    def below(key: Any, value: Any) -> Any:
        return with_leaves(value, change, f"{path}.{key}" if path else str(key))

    if isinstance(tree, Mapping):
        made: Any = copy.copy(tree)  # keeps the class, and attributes such as the _metadata of a module's state dict
        for key, value in tree.items():
            made[key] = below(key, value)
        return made
    if isinstance(tree, (list, tuple)):
        values = [below(k, value) for k, value in enumerate(tree)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return change(path, tree)


def identity(x: Tensor) -> Any:
    """Equal for tensors that are one: the same object, or the same memory seen in the same way."""
    if isinstance(x, DTensor):
        return "DTensor", x._spec, identity(x._local_tensor)
    if isinstance(x, ShardedTensor):
        return "ShardedTensor", tuple(x.shape), *[identity(shard.tensor) for shard in x.local_shards()]
    if isinstance(x, upstream.DTensor):
        return "upstream", x.device_mesh, x.placements, tuple(x.shape), identity(x.to_local())
    if type(x) not in (Tensor, nn.Parameter) or not x.nbytes or x.is_meta:
        return id(x)
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype
