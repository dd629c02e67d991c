"""What one tensor becomes on its way into and out of sharded state dicts, on meshes of FSDP and tensor parallelism.

Parameters live on a mesh of their own, a part of a larger one: the axes that FSDP does not have. What is saved lives on
all of the larger mesh, as torch's extension has it: FSDP splits rows (dim 0), and axes split a dim from left to right.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as upstream
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchshard import _torch
from torchshard.errors import ShardingError
from torchshard.layout.boxes import Box
from torchshard.layout.layout import Sharding
from torchshard.layout.pieces import piece
from torchshard.layout.placements import Placement, R, Shard
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.interop import to_torch
from torchshard.tensor.layout import TensorLayout, layout_for
from torchshard.tensor.mesh import BoundMesh, bind
from torchshard.tensor.moving.redistribute import redistribute_local
from torchshard.tensor.owners import ours
from torchshard.tensor.sharded import specs
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor


def as_ours(x: Any) -> DTensor | None:
    """A DTensor of either class as one of this package; None of anything else."""
    return ours(x) if isinstance(x, (DTensor, upstream.DTensor)) else None


def on_larger_mesh(sharding: Sharding, larger: BoundMesh) -> Sharding:
    """The same sharding as ranks of a larger mesh see it, replicated along the axes that the smaller one lacks.

    Raises:
        ShardingError: the smaller mesh is not a slice of the larger one, by names and ranks.
    """
    smaller = sharding.mesh
    if smaller is larger:
        return sharding
    axes = [larger.names.index(name) if name in larger.names else -1 for name in smaller.names]
    if -1 in axes or larger.coordinate is None or larger.line(axes) != list(smaller.ranks):
        raise ShardingError(
            "The mesh of a DTensor parameter is no part of the mesh that FSDP's was cut out of.",
            expected=f"a slice of the mesh {larger}, as by mesh[{larger.names[-1]!r}]",
            got=f"the mesh {smaller} of the ranks {list(smaller.ranks)}",
            where=f"this rank is at {larger.coordinate} of the mesh {larger}, ranks {list(larger.ranks)}",
            fix="make one mesh by init_device_mesh with mesh_dim_names, and give slices of it to both",
        )
    placements: list[Placement] = [R] * larger.ndim
    for axis, placement in zip(axes, sharding.placements, strict=True):
        placements[axis] = placement
    return larger.sharding(placements, {dim: [axes[a] for a in order] for dim, order in sharding.order})


def as_dtensor(tensor: Tensor, device_mesh: DeviceMesh) -> Tensor:
    """See DTensorExtensions.chunk_dtensor."""
    root = bind(_torch.root_mesh(device_mesh))
    name = (device_mesh.mesh_dim_names or ("?",))[-1]
    if name not in root.names or tensor.ndim == 0:
        raise ShardingError(
            "FSDP cannot split this tensor by rows along its axis.",
            expected=f"a tensor of one dim or more, and an axis among {root.names}",
            got=f"{tensor.ndim} dims, axis {name!r}",
            where=f"dim 0, mesh {device_mesh}, a slice of {root}",
        )
    axis, x = root.names.index(name), as_ours(tensor)
    if x is None:
        held, part = root.replicated(), tensor.detach()
    else:
        held, part = on_larger_mesh(x._spec.sharding, root), x._local_tensor.detach()
    source = layout_for(held, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    placements = list(held.placements)
    placements[axis] = Shard(0)
    orders = {dim: axes for dim, axes in held.order if dim}
    target = source.to(root.sharding(placements, orders))
    # A copy: FSDP will free the memory that the part is a view of.
    return to_torch(wrap(redistribute_local(part, source, target).clone(), target))


def gathered(tensor: Tensor, parent: DeviceMesh | None, kept: Collection[str]) -> Tensor:
    """See DTensorExtensions.all_gather_dtensor.

    Args:
        tensor: on the mesh `parent`.
        parent: the mesh that FSDP's was cut out of.
        kept: names of axes that are not FSDP's; along these it stays as it is.
    """
    x = as_ours(tensor)
    if x is None or x.device_mesh != parent:
        raise ShardingError(
            "A sharded state dict is of another mesh than the module it is loaded into.",
            expected=f"a DTensor on the mesh {parent}",
            got=f"a {type(tensor).__name__}" + ("" if x is None else f" on the mesh {x._spec.mesh}, {x._spec}"),
            fix="save with torch.distributed.checkpoint and load it into the module's own state_dict()",
        )
    source = x._spec
    placements = [p if name in kept else R for name, p in zip(source.mesh.names, source.placements, strict=True)]
    target = source.to(source.mesh.sharding(placements))
    part = redistribute_local(x._local_tensor.detach(), source, target)
    part.saved_as = target  # type: ignore[attr-defined]  # what it is a part of, for part_of
    return part


def part_of(x: Any, layout: TensorLayout, where: str = "") -> Any:
    """This rank's part of a parameter with this layout, as a plain tensor.

    Args:
        x: a DTensor of either class, on the mesh of `layout` or a larger one; a plain tensor, of the whole or the part;
            a ShardedTensor as chunk_tensor makes it: then that of the part.
        layout: of the parameter.
        where: what it is, for messages.

    Raises:
        ShardingError: it is of another shape, or lives elsewhere.
    """
    ours = as_ours(x)
    source: TensorLayout | None = getattr(x, "saved_as", None) if ours is None else ours._spec
    if source is not None:
        if source.shape != layout.shape:
            raise other_part(x, layout, where)
        target = source.to(on_larger_mesh(layout.sharding, source.mesh))  # type: ignore[arg-type]
        return redistribute_local(x if ours is None else ours._local_tensor.detach(), source, target)
    if _torch.is_sharded_tensor(x):
        return innermost(x, where or None)[0]
    if tuple(x.shape) == layout.shape and layout.box is not None:
        return x[layout.box.slices]
    if tuple(x.shape) != tuple(layout.local_shape):
        raise other_part(x, layout, where)
    return x


def other_part(x: Tensor, layout: TensorLayout, where: str = "") -> ShardingError:
    """The error that a tensor is neither the whole of a parameter nor this rank's part of it."""
    splits = ", ".join(
        f"dim {dim} along axis {'/'.join(layout.mesh.names[a] for a in axes)}"
        for dim, axes in layout.sharding.splits.items()
    )
    return ShardingError(
        "A tensor is neither the whole of a parameter nor this rank's part of it.",
        expected=f"shape {layout.shape}, or {tuple(layout.local_shape)}: split by {splits or 'nothing'}",
        got=f"shape {tuple(x.shape)}",
        where=f"{where}{', ' if where else ''}mesh {layout.mesh}, this rank at {layout.mesh.coordinate}",
    )


def as_sharded_tensor(
    tensor: Tensor, world: int, devices: int, group: dist.ProcessGroup, device: torch.device | None
) -> Tensor:
    """See DTensorExtensions.chunk_tensor."""
    if (x := as_ours(tensor)) is not None:
        return _nested(x, world, devices, group, device or tensor.device)
    theirs: Any = tensor.to_torch() if isinstance(tensor, ShardedTensor) else tensor
    if not _torch.is_sharded_tensor(theirs):
        return _rows(tensor, world, devices, group, device or tensor.device)
    if len(theirs.local_shards()) != 1:
        raise ShardingError(
            "A ShardedTensor is chunked where every rank has one part of it.",
            expected="one part",
            got=f"{len(theirs.local_shards())} parts",
            where=f"rank {dist.get_rank()}, a tensor of shape {tuple(theirs.size())}",
            fix="DTensor parameters: state_dict.to_dtensor(x, mesh, placements)",
        )
    (shard,) = theirs.local_shards()
    device = device or shard.tensor.device  # optimizer states may have been brought elsewhere than their parameters
    metadata = theirs.metadata()
    held = {s.placement.rank(): specs.box_of(s, metadata.size) for s in metadata.shards_metadata}
    inner = _rows(shard.tensor, world, devices, group, device)
    dtype, over = metadata.tensor_properties.dtype, _torch.group_of_theirs(theirs)
    return _of_parts(inner, metadata.size, dtype, held, device.type, devices, over)


def _rows(x: Tensor, world: int, devices: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """torch's ShardedTensor of the rows of a tensor that every rank of `group` holds; a copy."""
    held, rank = _boxes_of_rows(x.shape, world, group), dist.get_rank()
    mine = x.detach()[held[rank].slices].to(device, copy=True) if rank in held else None
    return _of_parts(mine, x.shape, x.dtype, held, device.type, devices, group)


def _boxes_of_rows(shape: Sequence[int], world: int, group: dist.ProcessGroup) -> dict[int, Box]:
    """Global rank -> the rows that it gets, of ranks that get some."""
    found = {}
    for k in range(world):
        start, length = piece(shape[0], world, k)
        box = Box((start, *[0] * (len(shape) - 1)), (length, *shape[1:]))
        if box.numel:
            found[dist.get_global_rank(group, k)] = box
    return found


def _nested(x: DTensor, world: int, devices: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    layout = x._spec
    axes = tuple([a for a, p in enumerate(layout.placements) if p is not R])
    empty = next((box for box in layout.boxes() if not box.numel), None)
    if empty is not None:
        raise ShardingError(
            "A ShardedTensor of chunks of a part needs parts with elements on every rank.",
            expected="at least one row for each rank",
            got=f"{layout}, of which a rank holds {empty}",
            where=f"mesh {layout.mesh}, dims {list(layout.sharding.splits)}",
            fix="state dicts of DTensors: give FSDP device_mesh= instead of process_group=",
        )
    inner = _rows(x._local_tensor, world, devices, group, device)
    if not axes:
        return inner
    mesh: BoundMesh = layout.mesh  # type: ignore[assignment]
    held = {}
    for rank in mesh.line(axes):
        place = mesh.coordinate_of(rank)
        assert place is not None, "a rank of the mesh that has no place there"
        held[rank] = layout.sharding.box(layout.shape, place)
    outer = mesh.process_group(axes)
    return _of_parts(inner, layout.shape, layout.dtype, held, device.type, devices, outer)


def _of_parts(
    mine: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    held: Mapping[int, Box],
    kind: str,
    devices: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """torch's ShardedTensor with one shard a rank at most.

    Args:
        mine: this rank's shard, a tensor or a ShardedTensor; None where it has none.
        shape: global shape.
        dtype: of all shards.
        held: global rank -> its shard, with elements.
        kind: type of the devices of all shards.
        devices: number of devices on a machine, to tell those of other ranks.
        group: the ranks that may have shards.
    """

    def metadata(rank: int) -> Any:
        place = specs.place_of(rank, kind if kind in ("cpu", "meta") else f"{kind}:{rank % devices}")
        return specs.ShardMetadata(list(held[rank].offset), list(held[rank].size), place)

    shards = [] if mine is None else [specs.Shard(mine, metadata(dist.get_rank()))]
    properties = specs.TensorProperties(dtype)
    whole = specs.ShardedTensorMetadata([metadata(rank) for rank in held], torch.Size(shape), properties)
    return _torch.their_sharded_tensor(shards, whole, None, group)  # type: ignore[no-any-return]


def innermost(tensor: Tensor, where: str | None = None) -> tuple[Tensor, list[Any]]:
    """See DTensorExtensions.pre_load_state_dict_transform; `where` it is, for errors, as far as is known."""
    if isinstance(tensor, ShardedTensor):
        tensor = tensor.to_torch()
    if not _torch.is_sharded_tensor(tensor):
        raise ShardingError(
            "A sharded state dict of ShardedTensors is expected.",
            expected="a ShardedTensor",
            got=type(tensor).__name__,
            where=where,
            fix="state_dict.to_sharded_tensor(x); or give FSDP device_mesh= instead of process_group=, and DTensors",
        )
    shards = tensor.local_shards()  # type: ignore[attr-defined]
    if len(shards) == 1 and _torch.is_sharded_tensor(shards[0].tensor):
        return innermost(shards[0].tensor, where)
    _require_rows(tensor, where)
    return tensor, shards


def _require_rows(theirs: Any, where: str | None) -> None:
    """Raise ShardingError unless ranks have rows as FSDP cuts them: it joins their elements, whatever they are of."""
    metadata, group = theirs.metadata(), _torch.group_of_theirs(theirs)
    boxes = [(s.placement.rank(), specs.box_of(s, metadata.size)) for s in metadata.shards_metadata]
    held = {rank: box for rank, box in boxes if box.numel}
    expected = _boxes_of_rows(metadata.size, group.size(), group) if metadata.size else held
    if held != expected:
        shape = tuple(metadata.size)
        raise ShardingError(
            "FSDP loads ShardedTensors of which each rank has the rows that FSDP gives it.",
            expected=", ".join([f"rank {rank}: {box}" for rank, box in sorted(expected.items())]),
            got=", ".join([f"rank {rank}: {box}" for rank, box in sorted(held.items())]),
            where=f"{where}, a ShardedTensor of shape {shape}" if where else f"a ShardedTensor of shape {shape}",
            fix="state_dict.to_sharded_tensor(state_dict.to_full(x)), which splits dim 0",
        )
