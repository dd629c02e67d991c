"""torch's own DTensor and ours, around the same local tensor; gradients go through."""

from typing import Any

import torch
import torch.distributed.tensor as upstream
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchshard._torch import exported_whole, is_compiled, waited
from torchshard.errors import ShardingError
from torchshard.layout.layout import Sharding
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.gradients.autograd import over as ours_over
from torchshard.tensor.layout import TensorLayout, layout_for
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.moving.redistribute import check_assumed
from torchshard.tensor.regions.caching import one_node
from torchshard.tensor.torch_placements import placements_of
from torchshard.unsupported import unsupported


def to_torch(x: DTensor) -> Tensor:
    """torch's DTensor of the same local tensor, mesh and placements.

    Raises:
        ShardingError: axes nest in an order, or split a dim in runs or units, that torch cannot be told; or ranks do
            not ascend along an axis that splits; or this process was another rank when the mesh was made.
        UnsupportedOperatorError: in a compiled region, which takes the mesh of a result from its inputs: ours have none
            in their graph, so it would be that of a gradient, a stand-in, or, from a cache, None.
    """
    layout = x._spec
    if is_compiled(x._local_tensor):
        raise unsupported(
            "A compiled region cannot make a DTensor of torch's out of this one.",
            expected="to_torch() outside of it",
            got=f"a graph, and {layout}",
            fix="return the DTensor; in the region, torch's from_local of to_local() on a mesh that comes in",
        )
    require_ascending(layout.sharding, layout.mesh)
    mesh: Any = layout.mesh
    if (problem := mesh.displaced()) is not None:  # torch would take what has the group's name by now
        raise problem
    if layout.assumed:
        check_assumed(x._local_tensor, layout)
    return upstream.DTensor.from_local(
        x.to_local(), x.device_mesh, told(layout), run_check=False, shape=x.shape, stride=x.stride()
    )


def told(layout: TensorLayout) -> tuple[TorchPlacement, ...]:
    """The placements as torch's from_local reads them: strided splits of several axes it takes for an order of axes.

    Raises:
        ShardingError: there are none.
    """
    for dim, cut in layout.sharding.cuts.items():
        axes = layout.sharding.splits[dim]
        if len(axes) > 1 or cut.unit > 1:
            raise ShardingError(
                "torch's DTensor cannot be told of a dim that is split in units, or in runs by several axes.",
                expected="no units, and at most one axis for each dim that is split in runs",
                got=f"dim {dim} {cut}, split by {', '.join(layout.mesh.names[a] for a in axes)}",
                where=layout,
                fix=f"redistribute it to Shard({dim}) on these axes first",
            )
    return layout.torch_placements


@one_node
def from_torch(x: Tensor) -> DTensor:
    """Our DTensor of the same local tensor, mesh and placements as one of torch's.

    Raises:
        ShardingError: the local tensor is not the piece that shape and placements say, or a strided split (FSDP2 with
            tensor parallelism) whose pieces are no nesting of axes; or ranks do not ascend along an axis that splits.
    """
    assert isinstance(x, upstream.DTensor), "one of torch's DTensors"
    made = DTensor.from_local(x.to_local(), x.device_mesh, placements_of(x), shape=x.shape, stride=x.stride())
    require_ascending(made._spec.sharding, made._spec.mesh)
    return made


def without_history(x: Tensor) -> Tensor:
    """x.detach(), in inference mode of torch's DTensors as well.

    There autograd gives a view of a normal tensor a version counter, too. torch's class makes views that are inference
    tensors, which cannot have one; so the view is made outside of that mode.
    """
    if torch.is_inference_mode_enabled() and isinstance(x, upstream.DTensor) and not x.is_inference():
        with torch.inference_mode(False):
            return x.detach()
    return x.detach()


def require_ascending(sharding: Sharding, mesh: Any) -> None:
    """Raise ShardingError where torch's DTensor has pieces in another order: by rank in the group, not by coordinate.

    The box that such a DTensor says it holds (in checkpoints, say) is not the one that it takes part with.
    """
    for axis in [a for axes in sharding.splits.values() for a in axes]:
        if not mesh.ascends(axis):
            raise ShardingError(
                "Ranks do not ascend along an axis that splits: torch's DTensor has the pieces in another order.",
                expected="a mesh on which ranks ascend along every axis that splits",
                got=mesh.device_mesh.mesh.tolist(),
                where=sharding,
                fix="another mesh; or cross as a whole tensor, by full_tensor()",
            )


@exported_whole
def over(part: Tensor, layout: TensorLayout, kind: type[Tensor]) -> Tensor:
    """A DTensor of a class, ours or torch's, whose part on this rank is `part`, of its dtype; differentiable."""
    if part.dtype is not layout.dtype:  # mixed precision, and states of optimizers
        layout = layout_for(layout.sharding, layout.shape, layout.stride, part.dtype).with_marks(layout.marks)
    if kind is DTensor:
        return ours_over(part, layout)
    if part.requires_grad:
        part.register_hook(waited)
    mesh: BoundMesh = layout.mesh  # type: ignore[assignment]
    shape = torch.Size(layout.shape)
    return upstream.DTensor.from_local(
        part, mesh.device_mesh, told(layout), run_check=False, shape=shape, stride=layout.stride
    )
