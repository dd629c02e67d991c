"""From plain tensors and modules to DTensors."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchshard._torch import current_mesh, exported_whole, in_forward_ad, is_recorded, is_traced, skip_alone
from torchshard.comm import collectives
from torchshard.comm.comparing import differing
from torchshard.comm.group import Group
from torchshard.errors import ShardingError
from torchshard.layout.cuts import without
from torchshard.layout.layout import Sharding
from torchshard.layout.pieces import piece
from torchshard.layout.placements import Shard
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.layout import global_stride, layout_for, require_strided
from torchshard.tensor.mesh import BoundMesh, bind
from torchshard.tensor.moving.pending import pending
from torchshard.tensor.moving.redistribute import in_memory_order, redistribute_local, refuse_others
from torchshard.tensor.regions.caching import one_node, tie
from torchshard.tensor.replacing import replacing, successor
from torchshard.tensor.torch_placements import from_torch, or_replicated
from torchshard.unsupported import unsupported


@skip_alone
def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[TorchPlacement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """A leaf DTensor with the values that `tensor` has on one rank.

    Args:
        tensor: a leaf, of the same shape and dtype on every rank; on which device does not matter.
        device_mesh: where; by default the mesh of the surrounding `with mesh:`.
        placements: one for each axis (dim of the mesh); everything replicated by default.
        src_data_rank: place along each axis of the rank whose values count; None to take every rank's own values,
            without communication.

    Raises:
        ShardingError: placements that do not fit, or a DTensor that lives elsewhere already.
        RuntimeError: `tensor` is not a leaf; from_local and redistribute are for those.
        RankMismatchError: ranks have tensors of other shapes, dtypes or placements, or a rank is lost.

    Example:
        >>> x = distribute_tensor(torch.randn(7, 4), mesh, [Shard(0)])      # doctest: +SKIP
        >>> x.shape, x.to_local().shape                 # on the first of two ranks: (7, 4), (4, 4)  # doctest: +SKIP
    """
    mesh = current_mesh() if device_mesh is None else device_mesh
    return _distributed(tensor, mesh, placements, src_data_rank, tie(mesh))


@one_node
@exported_whole
def _distributed(
    tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[TorchPlacement] | None, src_data_rank: int | None,
    tied: str | None,
) -> DTensor:  # fmt: skip
    mesh = bind(device_mesh)
    require_strided(tensor, "distribute_tensor")
    if not (isinstance(tensor, DTensor) or tensor.is_leaf):  # in a trace even a leaf is none
        raise RuntimeError("distribute_tensor takes a leaf tensor; use DTensor.from_local for results of operators")
    sharding = from_torch(or_replicated(placements, mesh), mesh, tensor.shape)
    if isinstance(tensor, DTensor):
        return _already_there(tensor, sharding)
    if in_forward_ad() and forward_ad.unpack_dual(tensor).tangent is not None:
        raise RuntimeError("distribute_tensor makes leaves; use DTensor.from_local for tensors that have tangents")
    local = pending(tensor.detach())
    if local.device.type != device_mesh.device_type and not local.is_meta:
        local = local.to(device_mesh.device_type)
    stride, given = global_stride(tensor.shape, local.stride()), without(sharding.without_partial(), sharding.cuts)
    asks = mesh.coordinate is not None and src_data_rank is not None and not is_traced(local)
    if asks and src_data_rank is not None:
        local, stride = _given_out(local, stride, given, src_data_rank, mesh)
    layout = layout_for(sharding, tuple(tensor.shape), stride, tensor.dtype)
    if mesh.coordinate is None:
        local = local.new_empty(0)
    elif not asks:
        if src_data_rank is not None and not local.is_meta:
            local = _everywhere(local, src_data_rank, mesh)
        local = redistribute_local(local, layout.to(mesh.replicated()), layout)
    else:
        local = redistribute_local(in_memory_order(local, layout), layout.to(given), layout)
    return as_leaf(wrap(local, layout), tensor.requires_grad)


def as_leaf(x: DTensor, requires_grad: bool) -> DTensor:
    """A tensor without history, made a leaf where it shall have a gradient.

    Raises:
        UnsupportedOperatorError: in a compiled region, whose results would not be leaves.
    """
    if not requires_grad:
        return x
    local = x._local_tensor
    if is_recorded(local) and not local.is_meta:
        raise unsupported(
            "A compiled region cannot make a leaf: its gradient would be lost.",
            expected="requires_grad=False in the region",
            got="requires_grad=True",
            fix="make it outside of the region; from plain pieces with history, DTensor.from_local",
        )
    return x.requires_grad_()  # type: ignore[return-value]


def _already_there(tensor: DTensor, sharding: Sharding) -> DTensor:
    if tensor._spec.sharding is not sharding:
        raise ShardingError(
            "distribute_tensor does not move a DTensor.",
            expected=f"the sharding that it has, {tensor._spec.sharding}",
            got=sharding,
            fix="x.redistribute(placements=...)",
        )
    return tensor


def _given_out(
    x: Tensor, stride: tuple[int, ...], sharding: Sharding, source: int, mesh: BoundMesh
) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of what the rank at place `source` of every axis has, given out axis by axis; and its strides.

    Raises:
        RankMismatchError: ranks have tensors of other shapes or dtypes, or a rank is lost.
    """
    split_first = [a for axes in sharding.splits.values() for a in axes]
    others = [a for a in range(mesh.ndim) if a not in split_first]
    for axis in [*split_first, *others]:
        placement, group = sharding.placements[axis], _group_with(source, axis, mesh)
        text = f"{x.dtype} of shape {tuple(x.shape)} as {sharding}, from place {source}"
        stride = _stride_of_source(text, stride, source, axis, mesh)
        if isinstance(placement, Shard):
            dim = placement.dim
            lengths = [piece(x.shape[dim], group.size, k)[1] for k in range(group.size)]
            x = collectives.scatter(x, dim, lengths, source, group)
        else:
            x = collectives.broadcast(x, source, group)
    return x, stride


def _stride_of_source(text: str, stride: tuple[int, ...], source: int, axis: int, mesh: BoundMesh) -> tuple[int, ...]:
    """The strides that the rank at place `source` of an axis gives, where all say the same of the tensor otherwise."""
    group, device = mesh.group((axis,)), torch.device(mesh.device_mesh.device_type)
    held = differing("\n".join([text, *map(str, stride)]), device, group, mesh.process_group((axis,)))
    if held is None:
        return stride
    refuse_others([(rank, told.splitlines()[0]) for rank, told in held], (axis,), mesh, "distribute")
    given = held[group.seats[source] if group.seats else source][1]
    return tuple(map(int, given.splitlines()[1:]))


def _replicas(tensors: Sequence[Tensor], device_mesh: DeviceMesh) -> list[DTensor]:
    """distribute_tensor of many tensors, replicated: ranks compare all by one message, and small ones go together.

    Raises:
        RankMismatchError: as distribute_tensor; or ranks have not as many tensors.
    """
    mesh, plain = bind(device_mesh), all(type(t) is Tensor and not is_traced(t) for t in tensors)
    if len(tensors) < 2 or mesh.coordinate is None or not plain:
        return [distribute_tensor(t, device_mesh) for t in tensors]
    everywhere, device = tuple(range(mesh.ndim)), torch.device(device_mesh.device_type)
    text = "\n".join(
        f"{t.dtype}, {tuple(t.shape)}, {t.stride()}, {t.device.type}, {t.layout}, {t.is_leaf}" for t in tensors
    )
    held = differing(text, device, mesh.group(everywhere), mesh.process_group(everywhere))
    refuse_others(
        [(rank, f"{len(told.splitlines())} tensors") for rank, told in held or []], everywhere, mesh, "distribute"
    )
    alike = all(t.device.type == device.type and t.layout is torch.strided and t.is_leaf for t in tensors)
    if held is not None or not alike:  # it takes the strides of the first rank, or says what differs
        return [distribute_tensor(t, device_mesh) for t in tensors]
    locals_ = [t.detach() for t in tensors]
    for axis in everywhere:
        locals_ = collectives.broadcast_all(locals_, 0, mesh.group((axis,)))
    sharding = mesh.replicated()
    layouts = [layout_for(sharding, t.shape, global_stride(t.shape, t.stride()), t.dtype) for t in tensors]
    made = [wrap(in_memory_order(x, layout), layout) for x, layout in zip(locals_, layouts, strict=True)]
    return [as_leaf(x, t.requires_grad) for x, t in zip(made, tensors, strict=True)]


def _everywhere(x: Tensor, source: int, mesh: BoundMesh) -> Tensor:
    """What the rank at place `source` of every axis has, whole: in a trace, where each rank shall do the same."""
    for axis in range(mesh.ndim):
        x = collectives.broadcast(x, source, _group_with(source, axis, mesh))
    return x


def _group_with(source: int, axis: int, mesh: BoundMesh) -> Group:
    group = mesh.group((axis,))
    if not 0 <= source < group.size:
        raise ShardingError(
            "No rank has this place along an axis of the mesh.",
            expected=f"src_data_rank from 0 to {group.size - 1}",
            got=source,
            where=f"axis {mesh.names[axis]} of {mesh}",
        )
    return group


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Turn a module's parameters and buffers into DTensors, in place.

    Args:
        module: to be changed; parameters that are one object stay one.
        device_mesh: where; by default the mesh of the surrounding `with mesh:`.
        partition_fn: called with (name, submodule, mesh) for each submodule, to register DTensor parameters of its own;
            everything that it leaves is replicated.
        input_fn: called with (module, inputs, mesh) before each forward; may return other inputs.
        output_fn: called with (module, outputs, mesh) after each forward; may return other outputs.

    Returns:
        The module.

    Raises:
        RuntimeError: the module has been through this before.
        ValueError: input_fn or output_fn does not take three arguments.
        ShardingError: a parameter has hooks.
    """
    if getattr(module, "_distribute_module_applied", False):
        raise RuntimeError("distribute_module has already been called on this module; it can be called once")
    mesh = current_mesh() if device_mesh is None else device_mesh
    with replacing(module, "distribute_module"):
        if partition_fn is not None:
            for name, submodule in module.named_modules():
                partition_fn(name, submodule, mesh)
        _replicate(module, mesh)
    if input_fn is not None:
        before = _with_mesh(input_fn, "input_fn", mesh)
        module.register_forward_pre_hook(lambda m, inputs: before(m, inputs))
    if output_fn is not None:
        after = _with_mesh(output_fn, "output_fn", mesh)
        module.register_forward_hook(lambda m, _, outputs: after(m, outputs))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the parameters and buffers that are no DTensors yet."""
    parameters, buffers = _plain(module, "named_parameters"), _plain(module, "named_buffers")
    first: dict[int, tuple[nn.Module, str, Any]] = {}
    for submodule, key, parameter in parameters:
        first.setdefault(id(parameter), (submodule, key, parameter))
    olds = list(first.values())
    made = _replicas([*[p.detach() for _, _, p in olds], *[buffer for _, _, buffer in buffers]], mesh)
    replicas = {id(p): successor(p, x, m, key) for (m, key, p), x in zip(olds, made, strict=False)}
    for submodule, key, parameter in parameters:
        submodule.register_parameter(key, replicas[id(parameter)])
    for (submodule, key, _), x in zip(buffers, made[len(olds) :], strict=True):
        setattr(submodule, key, x)


def _plain(module: nn.Module, named: str) -> list[tuple[nn.Module, str, Any]]:
    """What the method `named` of each submodule names that is no DTensor yet, with the submodule and the name there."""
    return [
        (submodule, key, x)
        for submodule in module.modules()
        for key, x in getattr(submodule, named)(recurse=False, remove_duplicate=False)
        if not _is_distributed(x)
    ]


def _is_distributed(x: Tensor) -> bool:
    return isinstance(x, DTensor)


def _with_mesh(function: Callable[..., Any], what: str, mesh: DeviceMesh) -> Callable[[nn.Module, Any], Any]:
    count = len(inspect.signature(function).parameters)
    if count == 2:
        message = f"an {what} of (values, mesh) is deprecated; use one of (module, values, mesh)"
        warnings.warn(message, FutureWarning, stacklevel=3)
        return lambda _, values: function(values, mesh)
    if count != 3:
        raise ValueError(f"{what} takes (module, values, mesh); this one takes {count} arguments")
    return lambda module, values: function(module, values, mesh)
