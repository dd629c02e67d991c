"""What each kind of tensor is, in the words of one arithmetic: who holds which boxes, and what this rank has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as upstream
from torch import Tensor

from torchshard._torch import sharded_tensors, waited
from torchshard.errors import ShardingError
from torchshard.layout.boxes import Box, joined, whole
from torchshard.layout.cuts import boxes_at
from torchshard.layout.holding import Holding, listed
from torchshard.layout.layout import Sharding, contiguous_stride
from torchshard.layout.strided import strided_intervals
from torchshard.state_dict.trees import not_dense
from torchshard.tensor.declared import declared
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.interop import require_ascending
from torchshard.tensor.layout import TensorLayout, require_strided
from torchshard.tensor.mesh import BoundMesh, bind
from torchshard.tensor.moving.pending import arrived
from torchshard.tensor.moving.redistribute import redistribute_local
from torchshard.tensor.sharded import moving, specs
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor, group_of
from torchshard.tensor.torch_placements import from_torch, placements_of


@dataclass(slots=True)
class Form:
    """A tensor as a conversion sees it.

    Attributes:
        shape: of the whole tensor.
        stride: of the whole tensor.
        dtype: of its elements.
        holding: who holds what; None for a plain tensor, which every rank has whole.
        parts: what this rank has.
        device: where its parts lie, here or elsewhere.
        text: what it is, in words that are the same on every rank.
        requires_grad: as of the tensor.
        sharding: where it lives on a mesh.
        group: a process group of all that hold it, where there is one.
        problem: what is wrong with this rank's parts.
        unchecked: a layout of which from_local has taken for granted that all parts are equal.
        local: on a mesh, the tensor that this rank's parts are, joined.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    holding: Holding | None
    parts: Sequence[tuple[Box, Tensor]]
    device: torch.device
    text: str
    requires_grad: bool
    sharding: Sharding | None = None
    group: dist.ProcessGroup | None = None
    problem: ShardingError | None = None
    unchecked: TensorLayout | None = None
    local: Tensor | None = None


Memory = dict[Any, Holding]
"""Holdings that were worked out in the same call, by what they follow from."""


def form_of(x: Tensor, reduce_partial: bool, memory: Memory) -> Form:
    """Describe a tensor of any kind.

    Args:
        x: a plain tensor, a DTensor or ShardedTensor, ours or torch's.
        reduce_partial: whether a Partial tensor is reduced first, which communicates.
        memory: filled here.

    Raises:
        ShardingError: `x` is Partial and shall not be reduced, nested, or plain and holds parts of another.
    """
    if isinstance(x, sharded_tensors().ShardedTensor):
        x = ShardedTensor.from_torch(x)
    if isinstance(x, ShardedTensor):
        return _of_sharded_tensor(x, memory)
    if isinstance(x, upstream.DTensor):
        return _of_upstream(x, reduce_partial, memory)
    if isinstance(x, DTensor):
        return _of_dtensor(x, reduce_partial, memory)
    require_no_parts(x)
    if not_dense(x := arrived(waited(x))):
        return _other(x)
    shape = tuple(x.shape)
    text = f"{x.dtype} of shape {shape}, whole"
    return Form(shape, x.stride(), x.dtype, None, [(whole(shape), x.detach())], x.device, text, x.requires_grad)


def require_no_parts(x: Tensor) -> None:
    """Raise ShardingError where a plain tensor says of itself that it holds parts of another: it is none to convert."""
    if told := declared(x):
        shape, parts = told
        raise ShardingError(
            "A plain tensor holds parts of a larger one, by what it says for torch.distributed.checkpoint.",
            expected="a tensor that is whole, a DTensor or a ShardedTensor",
            got=f"{[box for box, _ in parts]} of shape {shape}",
            fix="DTensor.from_local(x, mesh, placements, shape=..., stride=...), or ShardedTensor.from_local_shards",
        )


def _other(x: Tensor) -> Form:
    """A plain tensor that cannot be cut: it can stay as it is, and has no parts to make another of."""
    if x.is_nested:
        raise ShardingError("Nested tensors are not converted.", expected="dense tensors", got=f"{x.ndim} dims, nested")
    shape = tuple(x.shape)
    kind = "quantized" if x.is_quantized else type(x).__name__ if x.layout is torch.strided else x.layout
    text = f"{x.dtype} of shape {shape}, {kind}"
    return Form(shape, contiguous_stride(shape), x.dtype, None, [], x.device, text, x.requires_grad)


def mesh_of(x: Any) -> BoundMesh | None:
    """The mesh of a DTensor, ours or torch's; None of anything else."""
    if isinstance(x, upstream.DTensor):
        return bind(x.device_mesh)
    return x._spec.mesh if isinstance(x, DTensor) else None  # type: ignore[return-value]


def terms_of(x: Any) -> tuple[tuple[int, ...], str, str] | None:
    """Ranks, type of device and description of a Partial tensor; None of any other."""
    if (mesh := mesh_of(x)) is None:
        return None
    if isinstance(x, DTensor):
        partial, where = bool(x._spec.sharding.partial), str(x._spec.sharding)
    else:
        partial, where = any(p.is_partial() for p in x.placements), str(x.placements)
    text = f"{x.dtype} of shape {tuple(x.shape)}, to be reduced, {where} on the ranks {list(mesh.ranks)}"
    return (tuple(sorted(mesh.ranks)), mesh.device_mesh.device_type, text) if partial else None


def take_replicas(form: Form, mesh: BoundMesh) -> None:
    """Have the form of a ShardedTensor say that each line of ranks beside its own on a mesh has one like it.

    So it is after `to_sharded_tensor` of a DTensor that was replicated along an axis. Other forms stay as they are.
    """
    holding, at = form.holding, mesh.coordinate
    if form.group is None or holding is None or at is None or not set(holding.ranks) < set(mesh.ranks):
        return
    places = dict(zip(mesh.ranks, mesh.coordinates(), strict=True))
    axes = [a for a in range(mesh.ndim) if any(places[rank][a] != at[a] for rank in holding.ranks)]
    if sorted(mesh.line(axes)) != list(holding.ranks):
        return
    along = {rank: tuple([there[a] for a in axes]) for rank, there in places.items()}
    held = [
        (rank, box)
        for box, owners in holding.owners.items()
        for owner in owners
        for rank in mesh.ranks
        if along[rank] == along[owner]
    ]
    form.holding = Holding.of(form.shape, held, mesh.ranks)
    form.text = _of_parts(form, form.holding)


def _of_parts(form: Form | ShardedTensor, holding: Holding) -> str:
    return f"{form.dtype} of shape {tuple(form.shape)}, parts {listed(holding)}"


def _of_sharded_tensor(x: ShardedTensor, memory: Memory) -> Form:
    group = group_of(x)
    key = id(x._metadata)  # metadata() may be another object for each call
    holding = memory.get(key) or memory.setdefault(key, moving.held(x))
    device = specs.device_here(x.metadata())
    shape = tuple(x.shape)
    text = _of_parts(x, holding)
    return Form(shape, x.stride(), x.dtype, holding, moving.parts(x), device, text, x.requires_grad, group=group)


def _of_dtensor(x: DTensor, reduce_partial: bool, memory: Memory) -> Form:
    layout = x._spec
    if layout.sharding.partial:
        _require_reduction(x, layout.sharding, reduce_partial)
        layout = layout.to(layout.sharding.without_partial())
        local = redistribute_local(x.to_local().detach(), x._spec, layout)
        return _on_mesh(x, layout.sharding, local, memory)
    form = _on_mesh(x, layout.sharding, x.to_local().detach(), memory)
    form.unchecked = layout if layout.assumed else None
    return form


def _on_mesh(x: Any, sharding: Sharding, local: Tensor, memory: Memory) -> Form:
    shape, mesh = tuple(x.shape), sharding.mesh
    key = sharding, shape
    holding = memory.get(key) or memory.setdefault(key, Holding.of_sharding(sharding, shape))
    problem = mesh.displaced() if isinstance(mesh, BoundMesh) else None
    parts: list[tuple[Box, Tensor]] = []
    if mesh.coordinate is not None:
        boxes = boxes_at(sharding, shape, mesh.coordinate)
        if tuple(local.shape) == sharding.part(shape, mesh.coordinate):
            parts = [(box, local if sharding.boxed else local[inside.slices]) for box, inside in boxes]
        else:
            parts = [(box, local) for box, _ in boxes]
            problem = _misfit(local, [box for box, _ in boxes], sharding, mesh.coordinate)
    text = f"{x.dtype} of shape {shape}, {sharding} on the ranks {list(mesh.ranks)}"
    device = _device_of(mesh, local)
    return Form(
        shape, x.stride(), x.dtype, holding, parts, device, text, x.requires_grad, sharding, None, problem, None, local
    )


def _of_upstream(x: Any, reduce_partial: bool, memory: Memory) -> Form:
    mesh, shape = bind(x.device_mesh), tuple(x.shape)
    require_strided(x.to_local(), "one of torch's DTensors")
    if any(placement.is_partial() for placement in x.placements):
        kept = [upstream.Replicate() if p.is_partial() else p for p in x.placements]
        _require_reduction(x, x.placements, reduce_partial)
        x = x.detach().redistribute(placements=kept).requires_grad_(x.requires_grad)
    placements = placements_of(x)
    try:
        sharding = from_torch(placements, mesh, shape)
    except ShardingError:
        return _strided(x, mesh, memory)
    require_ascending(sharding, mesh)
    return _on_mesh(x, sharding, x.to_local().detach(), memory)


def _strided(x: Any, mesh: BoundMesh, memory: Memory) -> Form:
    """One of torch's strided splits that is no nesting of axes: some intervals of each dim, joined on the rank."""
    shape, local = tuple(x.shape), x.to_local().detach()
    key = mesh, x.placements, shape
    if key not in memory:
        places = zip(mesh.ranks, mesh.coordinates(), strict=True)
        held = [(rank, box) for rank, at in places for box, _ in _joined_boxes(x.placements, shape, mesh, at)]
        memory[key] = Holding.of(shape, held)
        memory[key].check()
    parts: list[tuple[Box, Tensor]] = []
    problem = mesh.displaced()
    if mesh.coordinate is not None:
        joined = _joined_boxes(x.placements, shape, mesh, mesh.coordinate)
        if sum(box.numel for box, _ in joined) != local.numel():
            problem = _misfit(local, [box for box, _ in joined], x.placements, mesh.coordinate)
        else:
            parts = [(box, local[inside.slices]) for box, inside in joined]
    text = f"{x.dtype} of shape {shape}, {x.placements} on the ranks {list(mesh.ranks)}"
    device = _device_of(mesh, local)
    return Form(shape, x.stride(), x.dtype, memory[key], parts, device, text, x.requires_grad, problem=problem)


def _joined_boxes(
    placements: Sequence[Any], shape: Sequence[int], mesh: BoundMesh, coordinate: Sequence[int]
) -> list[tuple[Box, Box]]:
    """The boxes of the whole tensor that lie at a coordinate, each with where it lies within the local tensor."""
    held = []
    for dim, n in enumerate(shape):
        factors = {
            axis: getattr(p, "split_factor", 1)
            for axis, p in enumerate(placements)
            if getattr(p, "dim", None) in (dim, dim - len(shape))
        }
        held.append(strided_intervals(n, factors, mesh.shape, coordinate))
    return joined(held)


def _misfit(local: Tensor, boxes: Sequence[Box], sharding: Any, coordinate: Any) -> ShardingError:
    return ShardingError(
        f"The part at {tuple(coordinate)} has shape {tuple(local.shape)}, which is not what the tensor's shape says.",
        expected=boxes,
        got=tuple(local.shape),
        where=sharding,
        fix="make the DTensor with from_local(..., shape=, stride=), or with run_check=True",
    )


def _require_reduction(x: Tensor, what: Any, reduce_partial: bool) -> None:
    if not reduce_partial:
        raise ShardingError(
            "A Partial tensor has no values to convert, only terms of them.",
            expected="Shard(dim) or Replicate() on every axis",
            got=f"{what}, shape {tuple(x.shape)}",
            fix="reduce_partial=True, or x.redistribute(placements=...) first",
        )


def _device_of(mesh: Any, local: Tensor) -> torch.device:
    kind = mesh.device_mesh.device_type
    return local.device if local.device.type == kind or local.is_meta else torch.device(kind)
