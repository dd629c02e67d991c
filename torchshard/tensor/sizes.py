"""The layout that one rank's part makes up together with those of the others: assumed, asked for or told."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchshard._torch import is_traced
from torchshard.comm import collectives
from torchshard.comm.comparing import known_alike
from torchshard.errors import ShardingError
from torchshard.layout.layout import Sharding
from torchshard.tensor.layout import TensorLayout, dense_stride, layout_for
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.moving.redistribute import require_same
from torchshard.unsupported import unsupported


def even_shape(local: Tensor, placements: Sequence[TorchPlacement], mesh: BoundMesh) -> list[int]:
    """The global shape if all parts are as large as this one."""
    shape = list(local.shape)
    for parts, placement in zip(mesh.shape, placements, strict=False):
        dim = getattr(placement, "dim", None)
        if isinstance(dim, int) and -local.ndim <= dim < local.ndim:
            shape[dim] *= parts
    return shape


def even_layout(local: Tensor, sharding: Sharding, shape: Sequence[int]) -> TensorLayout:
    """The layout of this shape, which the first collective looks at."""
    layout = layout_for(sharding, tuple(shape), dense_stride(shape, local.stride()), local.dtype)
    unsure = (sharding.splits or sharding.partial) and sharding.mesh.size > 1
    return layout.marked(assumed=frozenset((layout,))) if unsure else layout


def asked_layout(
    local: Tensor, sharding: Sharding, shape: Sequence[int] | None, stride: Sequence[int] | None
) -> TensorLayout:
    """The layout that the sizes of all ranks' parts make up; every rank finds the same, or raises the same.

    Args:
        local: this rank's part.
        sharding: how the parts lie.
        shape, stride: of the whole, where they are known.

    Raises:
        ShardingError: the parts are no pieces of one tensor.
        RankMismatchError: ranks have parts of other kinds.
    """
    if is_traced(local):
        return _traced_layout(local, sharding, shape, stride)
    mesh = sharding.mesh
    assert isinstance(mesh, BoundMesh), "a sharding that belongs to no DeviceMesh"
    kind = f"{local.ndim} dims of {local.dtype} as {sharding}{', with a gradient' if local.requires_grad else ''}"
    everywhere, mine = tuple(range(mesh.ndim)), [*local.shape, *local.stride()]
    require_same(kind, local.device, everywhere, mesh, "give from_local")
    alike = known_alike(repr(mine).encode(), local.device, mesh.process_group(everywhere))
    said = [mine] * mesh.size if alike else collectives.of_all_ranks(mine, local.device, mesh.everyone)
    held = [tuple(numbers[: local.ndim]) for numbers in said]
    if shape is None or stride is None:
        shape = list(local.shape)
        for dim, axes in sharding.splits.items():
            line = [c for c in mesh.coordinates() if all(k == 0 for a, k in enumerate(c) if a not in axes)]
            shape[dim] = sum(held[mesh.linear(c)][dim] for c in line)
        stride = dense_stride(shape, said[0][local.ndim :])
    layout = layout_for(sharding, tuple(shape), tuple(stride), local.dtype)
    for rank, size, place in zip(mesh.ranks, held, mesh.coordinates(), strict=True):
        wanted = sharding.part(shape, place)
        if size != wanted:
            raise ShardingError(
                "The local tensors are not the pieces of one tensor.",
                expected=f"rank {rank} to hold {wanted} of the shape {layout.shape}, as torch.chunk cuts",
                got=f"{size}; all ranks: {held}",
                where=f"from_local, or local_map, {sharding}",
                fix="use distribute_tensor, or cut into pieces of ceil(n / parts) with a short tail",
            )
    return layout


def _traced_layout(
    local: Tensor, sharding: Sharding, shape: Sequence[int] | None, stride: Sequence[int] | None
) -> TensorLayout:
    """The layout of a part in a trace, where each rank can check its own part only."""
    if shape is None or stride is None:
        if sharding.splits:
            raise unsupported(
                "A compiled region cannot ask the other ranks for the sizes of their parts.",
                expected="from_local(..., run_check=True, shape=global_shape, stride=global_stride) for a split tensor",
                got="neither shape nor stride",
                where=f"from_local, {sharding}",
                fix="pass them, or call from_local outside of the region",
            )
        shape, stride = tuple(local.shape), dense_stride(local.shape, local.stride())
    layout = layout_for(sharding, tuple(shape), tuple(stride), local.dtype)
    check_part(local, layout)
    return layout


def check_part(local: Tensor, layout: TensorLayout) -> None:
    """Raise ShardingError unless `local` has the shape of this rank's part."""
    if tuple(local.shape) != tuple(layout.local_shape):
        raise ShardingError(
            "A local tensor does not have the shape of this rank's part.",
            expected=f"{tuple(layout.local_shape)}, the part of {layout.shape} at {layout.mesh.coordinate}",
            got=tuple(local.shape),
            where=layout.sharding,
            fix="pass the piece that torch.chunk would give this rank",
        )
