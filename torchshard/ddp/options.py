"""The constructor's arguments: what they must be, and what torch says when they are not."""

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from torchshard import _torch
from torchshard.buckets import BucketPolicy
from torchshard.ddp.composite import is_spread
from torchshard.tensor.parts import local_parameters


def require_module(module: Any) -> None:
    """Raise TypeError for parameters, or anything else, in place of the module that has them."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"DistributedDataParallel wraps a torch.nn.Module, not a {type(module).__qualname__}")


def check_delayed(named: Any, trigger: Any) -> None:
    """Raise torch's ValueError unless both of delay_all_reduce_named_params and param_to_hook_all_reduce are given."""
    if (named is None) != (trigger is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")


def choose_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """The group that process_group or device_mesh stands for: a line, maybe of a larger mesh; or the default group."""
    if process_group and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is None:
        group = process_group if process_group is not None else _torch.default_group()
    else:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        if device_mesh.get_coordinate() is None:
            raise ValueError(f"DistributedDataParallel: rank {dist.get_rank()} is not in {device_mesh}")
        group = device_mesh.get_group(mesh_dim=0)
    if isinstance(group, str):
        raise TypeError(
            f"DistributedDataParallel: process_group={group!r} is a str, where a group is expected: None for that "
            "of init_process_group, or what dist.new_group() returns"
        )
    if not isinstance(group, dist.ProcessGroup) or group.rank() < 0:  # new_group gives others a number
        raise ValueError("DistributedDataParallel: this rank is not a member of the process group that it was given")
    return group


@dataclasses.dataclass(frozen=True)
class Devices:
    """Where the module is and where inputs and outputs go; the attributes of the same names on the wrapper."""

    device_type: str
    device_ids: list[int] | None
    output_device: int | None
    is_multi_device_module: bool
    device: torch.device


def check_parameters(parameters: Sequence[torch.nn.Parameter], delayed: Sequence[torch.nn.Parameter]) -> None:
    """Raise what torch raises for a module that cannot be trained in parallel."""
    if not delayed and not any(p.requires_grad for p in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    if any(isinstance(p, UninitializedParameter) for p in parameters):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    if any(p.requires_grad and p.is_inference() for p in [*parameters, *delayed]):
        raise RuntimeError(
            "DistributedDataParallel: parameters that were made under torch.inference_mode() never get a gradient; "
            "make the module outside of it"
        )


def require_values(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise RuntimeError for what has no values that other ranks could be given."""
    if name := next((n for n, t in named if t.is_meta), None):
        raise RuntimeError(
            f"DistributedDataParallel: {name} is on the meta device, where it has no values that ranks could be given; "
            "call module.to_empty(device=...) and initialise the module before it is wrapped"
        )


def make_local(module: torch.nn.Module, device_mesh: Any, ignored: Collection[str]) -> None:
    """Replace DTensor parameters by this rank's parts: data parallel over one axis of a mesh, tensor over others.

    Args:
        module: to be wrapped.
        device_mesh: the axis of data parallel, if it was given.
        ignored: names of parameters and buffers that are nothing to the wrapper.

    Raises:
        ValueError: device_mesh is missing, a parameter is split along it, or something is a ShardedTensor.
        NotImplementedError: a buffer is a DTensor.
    """

    def spread(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(name, t) for name, t in named if name not in ignored and is_spread(t)]

    buffers, parameters = spread(module.named_buffers()), spread(module.named_parameters())
    for kind, named in (("buffer", buffers), ("parameter", parameters)):
        if name := next((n for n, t in named if not hasattr(t, "device_mesh")), None):
            raise ValueError(
                f"DistributedDataParallel: the {kind} {name} is a ShardedTensor, of which each rank has other parts. "
                "Leave it out, before the module is wrapped, by DistributedDataParallel."
                f"_set_params_and_buffers_to_ignore_for_model(module, ['{name}']); or make it a DTensor: "
                "torchshard.state_dict.to_dtensor(it, mesh, placements)"
            )
    for name, p in parameters:
        if device_mesh is None:
            raise ValueError(
                f"DistributedDataParallel: the parameter {name} is a {type(p).__name__}; say over which axis of its "
                'mesh gradients are to be averaged, as in device_mesh=mesh["dp"], or call '
                "torchshard.parallel.local_parameters(module) first"
            )
        axes = dict(zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=False))
        along = axes.get(next(iter(device_mesh.mesh_dim_names or ()), None))
        if along is not None and not along.is_replicate():
            raise ValueError(
                f"DistributedDataParallel: the parameter {name} is {along} along the axis over which gradients are to "
                "be averaged; ranks of that axis need equal parameters"
            )
    if parameters or buffers:
        local_parameters(module)


def check_modules(module: torch.nn.Module, on_cpu: bool) -> None:
    """Refuse modules whose gradients or buffers would come out wrong."""
    for child in module.modules():
        if on_cpu and isinstance(child, torch.nn.SyncBatchNorm):
            raise ValueError("SyncBatchNorm layers only work with GPU modules")


def check_inner(module: torch.nn.Module, params: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Refuse parameters that a wrapper inside averages over other ranks: the last of two results would stand."""
    ours, ranks = {id(p) for p in params if p.requires_grad}, _torch.group_ranks(group)
    for path, inner in module.named_modules():
        theirs = getattr(inner, "process_group", None) if isinstance(inner, DistributedDataParallel) else None
        if theirs is None or theirs is group or not (_torch.is_registered(theirs) and _torch.is_registered(group)):
            continue
        if sorted(held := _torch.group_ranks(theirs)) == sorted(ranks):
            continue
        if name := next((n for n, p in reduced(inner.module, inner.parameters_to_ignore) if id(p) in ours), None):
            name = ".".join(filter(None, (path, "module", name)))
            raise ValueError(
                f"DistributedDataParallel: the gradient of {name} is averaged by the wrapper {path or 'inside'} over "
                f"the ranks {held}, and would be averaged here over the ranks {ranks}: the later of the two results "
                "would stand. Leave such parameters to one of both: DistributedDataParallel."
                f"_set_params_and_buffers_to_ignore_for_model(module, ['{name}', ...]), before the module is wrapped"
            )


def check_devices(parameters: Sequence[torch.nn.Parameter], device_ids: Any, output_device: Any) -> Devices:
    """What device_ids and output_device mean for this module; torch's ValueErrors where they make no sense."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {p.device for p in parameters}
    types = {d.type for d in devices}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {types}."
        )
    (kind,), several, first = types, len(devices) > 1, next(iter(parameters)).device
    if device_ids is None or len(device_ids) == 0 or kind == "cpu" or several:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, "
                f"but got device_ids {device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return Devices(kind, None, None, several, first)
    ids = [_torch.device_index(device) for device in device_ids]
    output = ids[0] if output_device is None else _torch.device_index(output_device)
    return Devices(kind, ids, output, several, first)


def choose_buckets(bucket_cap_mb: Any, bucket_cap_mb_list: Sequence[float] | None) -> BucketPolicy:
    """Sizes of buckets; ValueError for what is no size.

    With "auto" they serve until the link has been measured. Without any size given, buckets are torch's.
    """
    if isinstance(bucket_cap_mb, str):
        if bucket_cap_mb != "auto" or bucket_cap_mb_list:
            raise ValueError(
                f"DistributedDataParallel: bucket_cap_mb={bucket_cap_mb!r} is not possible; give a number of MiB, None "
                'for 25, or "auto", which goes without bucket_cap_mb_list'
            )
        return BucketPolicy()
    return BucketPolicy.from_mb(bucket_cap_mb, caps=bucket_cap_mb_list)


def choose_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are broadcast at each forward, and whether at the beginning; with torch's warnings."""
    if broadcast_buffers is None:
        return (True, True) if forward_sync_buffers is None else (forward_sync_buffers, True)
    if forward_sync_buffers is not None:
        _deprecated("both `broadcast_buffers` and `forward_sync_buffers` are given; the former is ignored")
        return forward_sync_buffers, True
    _deprecated(
        "`broadcast_buffers` is deprecated; use `forward_sync_buffers`, which does not keep buffers from being "
        "broadcast once at the beginning"
    )
    return broadcast_buffers, broadcast_buffers


def warn_check_reduction(check_reduction: bool) -> None:
    """The argument has had no meaning in torch for long; torch warns, and so do we."""
    if check_reduction:
        _deprecated("the `check_reduction` argument is deprecated and has no effect")


def _deprecated(text: str) -> None:
    warnings.warn(f"DistributedDataParallel: {text}", FutureWarning, stacklevel=4)


def reduced(module: torch.nn.Module, ignored: Collection[str]) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that have a name which is not ignored, each once, by the first such name.

    Names are those of the module itself, also if it was compiled.
    """
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for path, param in module.named_parameters(remove_duplicate=False):
        name = path.removeprefix("_orig_mod.")
        if path not in ignored and name not in ignored:
            found.setdefault(id(param), (name, param))
    return [*found.values()]
