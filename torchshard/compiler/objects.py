"""Process groups and meshes in compiled regions: what this torch's Dynamo lacks, added on request."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from torchshard import _torch

# Members that are asked without being traced, and those that are traced: each is said only where torch does not.
_MEMBERS: Mapping[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    dist.ProcessGroup: (("name", "bound_device_id"), ()),
    DeviceMesh: ((), ("get_all_groups",)),
}


@cache
def support_groups() -> tuple[str, ...]:
    """Have graphs that are compiled from now on made anew when they are called with another process group.

    Dynamo takes rank, size and members of a group for constants, and torch 2.11 to 2.15 do not check later that the
    group is the same: a group passed as an argument, held by an object or swapped in a closure leaves the old numbers
    in the graph, silently. So does the default group where another one is made, and a group, mesh, placement or DTensor
    that comes as an argument and by way of a global at once. (So do plain tensors and modules, which are left to
    torch.) This adds the checks, and methods of groups and meshes that Dynamo does not know; and the mesh and the
    placements of a result, which torch gives out of a region as stand-ins. It holds for the process and every backend,
    so nobody but the user calls it. A check costs about a microsecond for each group.

    Returns:
        What had to be added in this process; nothing where torch does it all.

    Example:
        >>> support_groups()                                                # doctest: +SKIP
        ('guards of ProcessGroup', 'guards of objects met twice', 'ShardedTensor.local_shards',
         'ShardedTensor.metadata', 'ShardedTensor.sharding_spec', 'DTensor.device_mesh', 'DTensor.placements',
         'ProcessGroup.name', 'ProcessGroup.bound_device_id', 'DeviceMesh.get_all_groups', '_resolve_process_group',
         '_get_process_group_name', 'is_initialized', 'get_rank', 'get_world_size', 'get_process_group_ranks',
         '_get_group_size_by_name')
    """
    from torchshard.tensor.dtensor import DTensor  # here, as who reduces gradients may never need them
    from torchshard.tensor.sharded.sharded_tensor import ShardedTensor
    from torchshard.tensor.sharded.tracing import METHODS as SHARDED_METHODS

    added = ["guards of ProcessGroup"] if _torch.guard_instances(dist.ProcessGroup, _identity) else []
    if _torch.guard_every_source((dist.ProcessGroup, DeviceMesh, Placement), (DTensor, ShardedTensor)):
        added.append("guards of objects met twice")
    added += [f"ShardedTensor.{name}" for name in _torch.trace_methods(ShardedTensor, SHARDED_METHODS)]
    added += [f"DTensor.{name}" for name in _torch.let_ask_results(DTensor, ("device_mesh", "placements"))]
    for cls, (asked, traced) in _MEMBERS.items():
        added += [f"{cls.__name__}.{name}" for name in _torch.let_ask(cls, asked, traced)]
    return (*added, *_torch.let_find_groups(), *_torch.let_ask_the_world())


def support_caches() -> tuple[str, ...]:
    """Have AOTAutograd's cache keep regions that make DTensors of plain tensors, as parallel styles do, for other runs.

    It keeps graphs of functions that it knows by name (torch._inductor.config.unsafe_marked_cacheable_functions), and
    from_local, distribute_tensor and factories are none of these. What they depend on is in its key: the mesh and this
    rank's place in it, placements, this package, and the rules of users. Graphs on meshes of several axes stay with
    their process. As support_groups, it holds for the process, so nobody but the user calls it.

    Returns:
        The functions that were not known in this process.
    """
    from torchshard.tensor.regions import caching

    return tuple(caching.share())


def _identity(group: Any) -> list[Any]:
    """What a graph may depend on; the address, because groups are compared and hashed by it."""
    return [id(group), group.group_name, group.rank(), group.size()]
