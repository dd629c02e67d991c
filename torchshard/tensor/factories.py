"""DTensors from nothing: the factories of torch.distributed.tensor, with two more."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchshard._torch import current_mesh
from torchshard.errors import ShardingError
from torchshard.layout.layout import contiguous_stride
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.handlers.random import draw
from torchshard.tensor.layout import TensorLayout, from_torch, layout_for
from torchshard.tensor.mesh import bind
from torchshard.tensor.redistribute import redistribute_local

Placements = Sequence[TorchPlacement] | None


def zeros(*size: Any, **options: Any) -> DTensor:
    """A DTensor of zeros.

    Args:
        size: lengths of the dims, as numbers or as one sequence.
        options: `dtype`, `requires_grad`, `device_mesh` (by default that of the surrounding `with mesh:`) and
            `placements` (one an axis; everything replicated by default; not Partial).

    Raises:
        ShardingError: placements that do not fit.
    """
    return _filled(lambda shape, **kw: torch.zeros(shape, **kw), size, **options)


def ones(*size: Any, **options: Any) -> DTensor:
    """A DTensor of ones; arguments as of `zeros`."""
    return _filled(lambda shape, **kw: torch.ones(shape, **kw), size, **options)


def empty(*size: Any, **options: Any) -> DTensor:
    """A DTensor whose values are not set; arguments as of `zeros`."""
    return _filled(lambda shape, **kw: torch.empty(shape, **kw), size, **options)


def full(size: Any, fill_value: Any, **options: Any) -> DTensor:
    """A DTensor that holds `fill_value` everywhere; other arguments as of `zeros`."""
    return _filled(lambda shape, **kw: torch.full(shape, fill_value, **kw), (size,), **options)


def rand(*size: Any, **options: Any) -> DTensor:
    """Uniform random numbers from [0, 1), the same for every placement; arguments as of `zeros`.

    The numbers are those that the first rank of the mesh would draw alone; every rank's generator moves on as its does.
    """
    return _random(torch.rand, size, **options)


def randn(*size: Any, **options: Any) -> DTensor:
    """Normal random numbers, the same for every placement; see `rand`."""
    return _random(torch.randn, size, **options)


def linspace(start: float, end: float, steps: int, **options: Any) -> DTensor:
    """`steps` numbers from `start` to `end`, evenly spaced; options as of `zeros`."""
    return _cut(lambda **kw: torch.linspace(start, end, steps, **kw), (steps,), **options)


def logspace(start: float, end: float, steps: int, base: float = 10.0, **options: Any) -> DTensor:
    """`steps` numbers from base**start to base**end, evenly spaced on a logarithmic scale; options as of `zeros`."""
    return _cut(lambda **kw: torch.logspace(start, end, steps, base, **kw), (steps,), **options)


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)


def _target(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> TensorLayout:
    if layout is not torch.strided:
        raise ShardingError("A DTensor is strided.", expected="layout=torch.strided", got=layout)
    mesh = bind(device_mesh or current_mesh())
    sharding = from_torch(placements or [Replicate()] * mesh.ndim, mesh, shape)
    if sharding.partial:
        raise ShardingError(
            "A factory does not make Partial tensors.",
            expected="Shard(dim) or Replicate()",
            got=sharding,
            fix="DTensor.from_local(term, mesh, [Partial()])",
        )
    return layout_for(sharding, shape, contiguous_stride(shape), dtype or torch.get_default_dtype())


def _filled(
    make: Callable[..., Tensor], size: tuple[Any, ...], *, requires_grad: bool = False, **options: Any
) -> DTensor:
    target = _target(_shape(size), **options)
    local = make(target.local_shape, dtype=options.get("dtype"), device=_device(target))
    return _leaf(wrap(local, layout_for(target.sharding, target.shape, target.stride, local.dtype)), requires_grad)


def _random(
    make: Callable[..., Tensor], size: tuple[Any, ...], *, requires_grad: bool = False, **options: Any
) -> DTensor:
    target = _target(_shape(size), **options)
    device = torch.device(_device(target))
    drawn = draw(target, device, lambda _: make(target.shape, dtype=target.dtype, device=device))
    return _leaf(drawn, requires_grad)


def _cut(
    make: Callable[..., Tensor], shape: tuple[int, ...], *, requires_grad: bool = False, **options: Any
) -> DTensor:
    target = _target(shape, **options)
    whole = make(dtype=target.dtype, device=_device(target))
    local = redistribute_local(whole, target.to(target.mesh.replicated()), target)
    return _leaf(wrap(local, target), requires_grad)


def _device(target: TensorLayout) -> str:
    return target.mesh.device_mesh.device_type  # type: ignore[attr-defined, no-any-return]


def _leaf(x: DTensor, requires_grad: bool) -> DTensor:
    return x.requires_grad_(requires_grad)  # type: ignore[return-value]
