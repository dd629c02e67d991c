"""torch's own DTensor and ours, around the same local tensor; gradients go through."""

import torch
import torch.distributed.tensor as upstream
from torch import Tensor

from torchshard._torch import waited
from torchshard.tensor.autograd import over as ours_over
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.layout import ASSUMED, TensorLayout, layout_for
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.redistribute import check_assumed


def to_torch(x: DTensor) -> Tensor:
    """torch's DTensor of the same local tensor, mesh and placements.

    Raises:
        ShardingError: axes nest in an order that torch has no placement for.
    """
    layout = x._spec
    if layout.marks & ASSUMED:
        check_assumed(x._local_tensor, layout)
    placements = layout.torch_placements
    return upstream.DTensor.from_local(
        x.to_local(), x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def from_torch(x: Tensor) -> DTensor:
    """Our DTensor of the same local tensor, mesh and placements as one of torch's.

    Raises:
        ShardingError: the local tensor is not the piece that shape and placements say, or a strided split (FSDP2 with
            tensor parallelism) whose pieces are no nesting of axes.
    """
    assert isinstance(x, upstream.DTensor), "one of torch's DTensors"
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


def over(part: Tensor, layout: TensorLayout, kind: type[Tensor]) -> Tensor:
    """A DTensor of a class, ours or torch's, whose part on this rank is `part`, of its dtype; differentiable."""
    if part.dtype is not layout.dtype:  # mixed precision, and states of optimizers
        layout = layout_for(layout.sharding, layout.shape, layout.stride, part.dtype)
    if kind is DTensor:
        return ours_over(part, layout)
    if part.requires_grad:
        part.register_hook(waited)
    mesh: BoundMesh = layout.mesh  # type: ignore[assignment]
    shape = torch.Size(layout.shape)
    return upstream.DTensor.from_local(
        part, mesh.device_mesh, layout.torch_placements, run_check=False, shape=shape, stride=layout.stride
    )
