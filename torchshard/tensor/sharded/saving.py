"""ShardedTensors in pickles and in the state dicts of modules."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchshard._torch import group_of_loaded
from torchshard.errors import ShardingError
from torchshard.tensor.mesh import require_own_pickle
from torchshard.tensor.sharded import sharded_tensor, specs
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor, made

Place = tuple[int, list[int], int] | None
"""Rank, ranks of the process group, number of ranks in all; None where there was no process group."""


def reduced(x: ShardedTensor) -> Any:
    """What a pickle of `x` holds: this rank's parts, the description of all, and the places of this rank."""
    shards = [(s.shard_offsets, s.shard_sizes, str(s.placement)) for s in x._metadata.shards_metadata]
    tensors = [(s.metadata.shard_offsets, s.metadata.shard_sizes, s.tensor.detach()) for s in x._local_shards]
    place: Place = None
    if (members := x._group.members) is not None:
        require_own_pickle(len(members.members), "ShardedTensor")
        rank, world = x._group.place
        place = rank, [*members.members], world
    return sharded_tensor.restored, (
        list(x.shape),
        x.dtype,
        x.requires_grad,
        shards,
        tensors,
        place,
        _spec(x._sharding_spec),
        isinstance(x, nn.Parameter),
    )


def restored(
    size: list[int],
    dtype: torch.dtype,
    requires_grad: bool,
    described: list[tuple[list[int], list[int], str]],
    tensors: list[tuple[list[int], list[int], Tensor]],
    place: Place,
    spec: tuple[str, Any],
    parameter: bool = False,
) -> ShardedTensor:
    """The ShardedTensor of a pickle. Where there is no process group its parts can be used, and nothing be moved.

    Raises:
        ShardingError: this rank is another one than the one that saved, or its group does not exist.
    """
    shards = [specs.ShardMetadata(o, n, specs.upstream.RemoteDevice(where)) for o, n, where in described]
    properties = specs.TensorProperties(dtype=dtype, requires_grad=requires_grad)
    metadata = specs.ShardedTensorMetadata(shards, torch.Size(size), properties)
    own = {
        (tuple(shard.shard_offsets), tuple(shard.shard_sizes)): at
        for at, shard in enumerate(shards)
        if place is None or shard.placement.rank() == place[0]
    }
    held = [(own[tuple(offsets), tuple(sizes)], tensor) for offsets, sizes, tensor in tensors]
    sharding_spec = _spec_again(spec, metadata)
    if any(tensor.device != shards[at].placement.device() for at, tensor in held):  # torch.load(map_location=)
        metadata = specs.on_device(metadata, held[0][1].device)
        sharding_spec = specs.inferred_spec(metadata)
    parts = [specs.Shard(t.requires_grad_(requires_grad), metadata.shards_metadata[at]) for at, t in held]
    x: Any = made(parts, metadata, sharding_spec, _group(place))
    return nn.Parameter(x, requires_grad) if parameter else x  # type: ignore[return-value]


def _group(place: Place) -> Any:
    """The process group in which the tensor lived, as far as torch knows it while it loads; else None."""
    if place is None or not dist.is_initialized():
        return None
    rank, ranks, world = place
    if (dist.get_rank(), dist.get_world_size()) != (rank, world):
        raise ShardingError(
            "A ShardedTensor was saved by another rank, or among another number of ranks.",
            expected=f"rank {rank} of {world}",
            got=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            fix="load on each rank what that rank has saved; without a process group the file opens anywhere",
        )
    group = group_of_loaded()
    return group if ranks == dist.get_process_group_ranks(group) else None


def _spec(spec: Any) -> tuple[str, Any]:
    if isinstance(spec, specs.ChunkShardingSpec):
        return "chunk", (spec.dim, [str(p) for p in spec.placements])
    if isinstance(spec, specs.GridShardingSpec):
        return "grid", (list(spec.parts), [str(p) for p in spec.placements])
    return "boxes", None


def _spec_again(saved: tuple[str, Any], metadata: Any) -> Any:
    kind, held = saved
    if kind == "boxes":
        return specs.EnumerableShardingSpec(metadata.shards_metadata)
    return (specs.ChunkShardingSpec if kind == "chunk" else specs.GridShardingSpec)(*held)


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put ShardedTensors that are plain attributes of a module into its state dict.

    For `module.register_state_dict_post_hook`; parameters and buffers are there anyway.
    """
    for name, holder in module.named_modules():
        for attribute, value in vars(holder).items():
            if isinstance(value, ShardedTensor):
                destination[_key(prefix, name, attribute)] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any = None,
    strict: bool = True,
    missing_keys: Any = None,
    unexpected_keys: Any = None,
    error_msgs: Any = None,
) -> None:
    """Set attributes of a module that are ShardedTensors in a state dict; for `register_load_state_dict_pre_hook`."""
    for name, holder in module.named_modules():
        for attribute, value in list(vars(holder).items()):
            # The second as torch's hook has it, `inner..table`, where it is that of an inner module.
            for key in (_key(prefix, name, attribute), f"{prefix}{name}.{attribute}"):
                if isinstance(state_dict.get(key), ShardedTensor) and isinstance(value, ShardedTensor | None):
                    setattr(holder, attribute, state_dict.pop(key))


def _key(prefix: str, name: str, attribute: str) -> str:
    """Of an attribute of the module that has this name in one whose keys have this prefix, a dot included."""
    return prefix + ".".join(filter(None, [name, attribute]))
