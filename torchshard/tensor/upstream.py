"""DTensors of this package as torch's own, and back: the same local tensor in another wrapper, nothing is copied."""

import torch.distributed.tensor as upstream

from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.layout import from_torch, layout_for
from torchshard.tensor.mesh import bind


def to_upstream(x: DTensor) -> upstream.DTensor:
    """torch's DTensor over the local tensor of `x`; without history.

    Raises:
        ShardingError: the axes nest in an order that torch has no placement for.
    """
    layout = x._spec
    made = upstream.DTensor.from_local(
        x._local_tensor.detach(),
        x.device_mesh,
        layout.torch_placements,
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )
    return made.requires_grad_(x.requires_grad)  # type: ignore[return-value]


def from_upstream(x: upstream.DTensor) -> DTensor:
    """A DTensor over the local tensor of torch's; without history.

    Raises:
        ShardingError: a strided split whose pieces are no nesting of axes.
    """
    mesh = bind(x.device_mesh)
    layout = layout_for(from_torch(x.placements, mesh, x.shape), tuple(x.shape), tuple(x.stride()), x.dtype)
    return wrap(x.to_local().detach(), layout).requires_grad_(x.requires_grad)  # type: ignore[return-value]
