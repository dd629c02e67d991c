"""What torch.amp.GradScaler asks of gradients: to be unscaled, and whether all of them are finite."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchshard.comm import collectives
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.moving.redistribute import redistribute_local
from torchshard.unsupported import unsupported


def _unscale(func: Any, grads: Sequence[DTensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply every gradient; `found_inf` (a plain scalar) becomes 1 on all ranks if any rank has found one."""
    if isinstance(found_inf, DTensor):
        raise unsupported(
            "Whether gradients are finite is told by a plain number.",
            expected="a plain scalar",
            got=found_inf,
            fix="found_inf.full_tensor(), or torch.amp.GradScaler, which makes one",
        )
    # What counts is whether the values are finite, not whether their terms are.
    moves = [(g._spec, g._spec.to(g._spec.sharding.without_partial())) for g in grads]
    locals_ = [redistribute_local(g._local_tensor, *pair) for g, pair in zip(grads, moves, strict=True)]
    func(locals_, found_inf, inverse_scale)
    for g, local, (layout, moved) in zip(grads, locals_, moves, strict=True):
        if local is not g._local_tensor:
            g._local_tensor.copy_(redistribute_local(local, moved, layout.plain))
    for mesh in dict.fromkeys(layout.mesh for layout, _ in moves):
        _largest(found_inf, mesh)


def _largest(found_inf: Tensor, mesh: Any) -> None:
    assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
    if mesh.coordinate is not None and mesh.size > 1:
        found_inf.copy_(collectives.all_reduce(found_inf, "max", mesh.everyone))


HANDLERS: Mapping[str, Callable[..., Any]] = {"_amp_foreach_non_finite_check_and_unscale_.default": _unscale}
