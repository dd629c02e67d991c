"""Nested containers: their tensors by path, the same containers with other leaves, and which tensors are one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as upstream
from torch import Tensor, nn

from torchshard._torch import group_of_theirs, sharded_tensors
from torchshard.errors import ShardingError
from torchshard.keys.containers import check_nesting, like
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.layout import is_made_of_others
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of everything in a nesting of dicts, lists and tuples that is none itself.

    A path is made of the keys and positions, joined by dots.
    """
    if not path:
        check_nesting(tree)
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        yield path, tree
        return
    for key, value in items:
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def in_order(tree: Any) -> list[tuple[str, Any]]:
    """`leaves` in the order of paths: the same on ranks whose dicts were filled otherwise."""
    return sorted(leaves(tree), key=itemgetter(0))


def reached(tree: Any) -> list[tuple[str, Any]]:
    """As `in_order`, of a nesting that has no end or cannot be walked: what can be reached, each container once."""
    found, seen, left = [], set(), [("", tree)]
    while left:
        path, value = left.pop()
        if not isinstance(value, (Mapping, list, tuple)):
            found.append((path, value))
        elif id(value) not in seen:
            seen.add(id(value))
            with suppress(Exception):
                items = value.items() if isinstance(value, Mapping) else enumerate(value)
                left += [(f"{path}.{key}" if path else str(key), inner) for key, inner in items]
    return sorted(found, key=itemgetter(0))


def require_distinct(ordered: Sequence[tuple[str, Any]]) -> None:
    """Check that no tensor goes by the name of another leaf.

    Raises:
        ShardingError: a tensor and another leaf have the same path.
    """
    for (path, x), (other, y) in pairwise(ordered):
        if path == other and (isinstance(x, Tensor) or isinstance(y, Tensor)):
            raise ShardingError(
                "Two values of a state dict go by the same name.",
                expected="keys and positions that differ when they are joined by dots",
                got=path,
                fix="rename one of the keys, or convert the inner dicts one by one",
            )


def with_leaves(tree: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """The same containers, of the same classes and with the same attributes, whose leaves are `change(path, leaf)`."""

    def below(key: Any, value: Any) -> Any:
        return with_leaves(value, change, f"{path}.{key}" if path else str(key))

    if not path:
        check_nesting(tree)
    if isinstance(tree, Mapping):
        return like(tree, {key: below(key, value) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return like(tree, [below(k, value) for k, value in enumerate(tree)])
    return change(path, tree)


def identity(x: Tensor) -> Any:
    """Equal for tensors that are one: the same object, or the same memory seen in the same way.

    Whether they ask for gradients makes no difference: results of such tensors share memory, too.
    """
    if isinstance(x, DTensor):
        return "DTensor", x._spec, identity(x._local_tensor)
    if isinstance(x, ShardedTensor):
        parts = [identity(shard.tensor) for shard in x.local_shards()]
        return "ShardedTensor", tuple(x.shape), *(parts or [x._token])
    if isinstance(x, sharded_tensors().ShardedTensor):
        return _of_theirs(x)
    if isinstance(x, upstream.DTensor):
        return "upstream", x.device_mesh, x.placements, tuple(x.shape), identity(x.to_local())
    if type(x) not in (Tensor, nn.Parameter) or not_dense(x):
        return id(x)
    memory = x.untyped_storage()
    # What is empty has no address; views of it share torch's object for the memory.
    where = memory.data_ptr() if x.nbytes and not x.is_meta else memory
    return where, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def _of_theirs(x: Any) -> Any:
    """As `identity`, of torch's ShardedTensor; which it is must be told on all of its ranks, or on none."""
    parts = [identity(shard.tensor) for shard in x.local_shards()]
    if hasattr(x, "_token"):  # made by ShardedTensor.to_torch
        return "theirs", tuple(x.size()), *(parts or [x._token, repr(x.sharding_spec())])
    ranks = dist.get_process_group_ranks(group_of_theirs(x))
    owners = {shard.placement.rank() for shard in x.metadata().shards_metadata}
    return ("theirs", tuple(x.size()), *parts) if owners.issuperset(ranks) else id(x)


def not_dense(x: Tensor) -> bool:
    """Whether the elements do not lie in memory at strides: of sparse, quantized, nested and composite tensors."""
    return x.is_nested or x.is_quantized or x.layout is not torch.strided or is_made_of_others(x)
