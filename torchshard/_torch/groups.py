"""Process groups and their stores."""

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from torchshard._torch.finding import has_fast_paths

_c10d: Any = cast(Any, dist).distributed_c10d


def default_group() -> dist.ProcessGroup:
    """The default process group, or torch's own ValueError saying that there is none (2.11-2.15)."""
    from torch.distributed.distributed_c10d import _get_default_group

    return _get_default_group()


def group_named(name: str) -> dist.ProcessGroup:
    """The group of this name, or torch's RuntimeError (distributed_c10d._resolve_process_group, 2.11-2.15)."""
    group: dist.ProcessGroup = cast(Any, dist.distributed_c10d)._resolve_process_group(name)
    return group


def group_store(group: dist.ProcessGroup) -> Store:
    """The store through which the group's ranks found each other (ProcessGroup.get_group_store, 2.11-2.15).

    There is no public way to it. Groups of ranks that are threads do not know theirs, but torch does
    (distributed_c10d._world, 2.11-2.15).

    Raises:
        ValueError: neither knows, as torch has not made the group.
    """
    store = group.get_group_store() or _c10d._world.pg_map.get(group, ("", None))[1]
    if store is None:
        raise ValueError(
            f"the process group {group.name()!r} of {group.size()} ranks has no store, by which ranks learn of others"
            " that do something else or are lost: torch.distributed.new_group makes groups that have one, also of a"
            " class of your own (torch.distributed.Backend.register_backend)"
        )
    return store


def group_name(group: dist.ProcessGroup) -> str:
    """The name torch gave a group (distributed_c10d._world, 2.11-2.15), which one written in Python may not know."""
    return _c10d._world.pg_names.get(group) or group.group_name


def group_ranks(group: dist.ProcessGroup) -> list[int]:
    """The global ranks of a group, in their order; of one that torch does not know, its own ranks.

    Such is a ProcessGroup written in Python that nobody has registered.
    """
    return dist.get_process_group_ranks(group) if is_registered(group) else list(range(group.size()))


def group_backend(group: dist.ProcessGroup) -> str:
    """What torch.distributed.get_backend says; of a group that torch does not know, its own name."""
    return dist.get_backend(group) if is_registered(group) else group.name()


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group's collectives may take (Backend.options, 2.11-2.15), else torch's default for all groups."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout


_CPU = torch.device("cpu")


def device_carried(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """A device from which the group's transports take messages: this one, unless they take none from there.

    As NCCL knows no CPU (ProcessGroup._device_types and bound_device_id, 2.11-2.15); without these names, this one.
    gloo takes those of the CPU only, where collectives may be of GPUs, too.
    """
    if device.type != "cpu" and is_gloo(group, device):
        return _CPU
    known = {one.type for one in getattr(group, "_device_types", ())}
    if not known or device.type in known:
        return device
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    return bound or torch.device("cpu" if "cpu" in known else min(known))


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch knows the group: it has made it and not destroyed it since (distributed_c10d._world, 2.11-2.15)."""
    return group in _c10d._world.pg_group_ranks


def debug_level() -> str:
    """What TORCH_DISTRIBUTED_DEBUG says: OFF, INFO or DETAIL (torch.distributed.get_debug_level, 2.11-2.15)."""
    return str(cast(Any, dist).get_debug_level().name)


def is_gloo(group: dist.ProcessGroup, device: torch.device = _CPU) -> bool:
    """Whether what is on such a device goes by gloo, and not by a wrapper around it (ProcessGroup._get_backend)."""
    return _of_gloo(_backend(group, device))


def asks_gloo(group: dist.ProcessGroup | str) -> bool:
    """Whether what is on a CPU goes by gloo in the end; also of a wrapper around it (_ProcessGroupWrapper.wrapped_pg).

    Args:
        group: or its name.
    """
    backend = _backend(group_named(group) if isinstance(group, str) else group, _CPU)
    return _of_gloo(getattr(backend, "wrapped_pg", backend))


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def _of_gloo(backend: Any) -> bool:
    kind: Any = getattr(dist, "ProcessGroupGloo", None)
    return kind is not None and isinstance(backend, kind)


def gloo_threads(group: dist.ProcessGroup) -> int:
    """Threads of a gloo group (ProcessGroupGloo.Options._threads, 2.11-2.15); torch's default of 2 if unknown."""
    try:
        options: Any = group._get_backend(torch.device("cpu")).options
        return int(options._threads)
    except (AttributeError, RuntimeError):
        return 2


def group_of_members(ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """A process group made by its members alone; all of them call this, the others do not.

    dist.new_group(use_local_synchronization=True) names such a group by its ranks and by the number of groups that this
    process is in; members that are in different numbers of groups then wait for each other forever. Here the name is of
    the ranks, and of how often they have made one (torch.distributed.distributed_c10d._new_process_group_helper,
    2.11-2.15). Without that, the public way.

    Args:
        ranks: global ranks, in ascending order.
        device: of the tensors that will be sent; the default group's time limit for it is that of the new group.

    Raises:
        TimeoutError: some have not called this within the time limit; its arguments are these ranks.
    """
    from torch.distributed import distributed_c10d as c10d

    world = default_group()
    make, backend = getattr(c10d, "_new_process_group_helper", None), dist.get_backend(world)
    timeout = group_timeout(world, device)
    if not has_fast_paths() or make is None or backend == "fake":
        return cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout, use_local_synchronization=True))
    store, names = group_store(world), "_".join(map(str, ranks))
    turns = f"torchshard/groups/{names}"
    turn = store.add(f"{turns}/{dist.get_rank()}", 1)
    name = f"torchshard-{hashlib.sha1(names.encode(), usedforsecurity=False).hexdigest()}-{turn}"
    place, bound = list(ranks).index(dist.get_rank()), world.bound_device_id
    try:
        group: dist.ProcessGroup = make(
            len(ranks), place, list(ranks), dist.Backend(backend), store, name, timeout=timeout, device_id=bound
        )[0]
    except RuntimeError as error:
        if late := [rank for rank in ranks if store.add(f"{turns}/{rank}", 0) < turn]:
            raise TimeoutError(*late) from error
        raise
    c10d._world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(ranks)}
    return group


def stand_in(
    cls: type[Tensor], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor of a class that answers for its operators, without memory of its own (2.11-2.15).

    Tensor._make_wrapper_subclass is documented in torch's notes on extending it, in spite of its name.
    """
    return Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=device)
