"""torch's own ShardedTensor."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from torchshard._torch.groups import default_group

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def below_torch_functions(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Have a function ask tensors themselves for what they are: torch's ShardedTensors warn in __torch_function__.

    That DTensors are to be used instead is nothing to tell those who make DTensors of them (2.11-2.15).
    """

    @functools.wraps(function)
    def below(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return below


@functools.cache
def sharded_tensors() -> Any:
    """torch's ShardedTensor and the classes that describe one (torch.distributed._shard, 2.11-2.15).

    A namespace with ShardedTensor, Shard, ShardMetadata, ShardedTensorMetadata, TensorProperties, ShardingSpec,
    ChunkShardingSpec, EnumerableShardingSpec and RemoteDevice.
    """
    from types import SimpleNamespace

    import torch.distributed._shard.sharded_tensor
    import torch.distributed._shard.sharding_spec
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed.remote_device import _remote_device

    theirs: Any = torch.distributed._shard.sharded_tensor
    specs: Any = torch.distributed._shard.sharding_spec
    return SimpleNamespace(
        ShardedTensor=theirs.ShardedTensor,
        Shard=theirs.Shard,
        ShardMetadata=ShardMetadata,
        ShardedTensorMetadata=theirs.ShardedTensorMetadata,
        TensorProperties=theirs.TensorProperties,
        ShardingSpec=specs.ShardingSpec,
        ChunkShardingSpec=specs.ChunkShardingSpec,
        EnumerableShardingSpec=specs.EnumerableShardingSpec,
        RemoteDevice=_remote_device,
    )


def their_sharded_tensor(shards: Any, metadata: Any, spec: Any, group: Any) -> Any:
    """torch's ShardedTensor around these shards, which are neither copied nor compared between ranks (2.11-2.15).

    Without a spec torch works one out.
    """
    return sharded_tensors().ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, sharded_tensor_metadata=metadata, process_group=group, sharding_spec=spec
    )


def group_of_theirs(x: Any) -> Any:
    """The process group of one of torch's ShardedTensors (ShardedTensor._process_group, 2.11-2.15)."""
    return x._process_group


def group_of_loaded() -> Any:
    """The process group of ShardedTensors that are being loaded: the default one, or what torch's context manager
    load_with_process_group says (torch.distributed._shard.api, 2.11-2.15); the default one without that name.
    """
    from torch.distributed._shard import api

    current = getattr(api, "_get_current_process_group", None)
    return default_group() if current is None else current()


def is_sharded_tensor(x: Any) -> bool:
    """Whether this is torch's ShardedTensor."""
    return isinstance(x, sharded_tensors().ShardedTensor)
