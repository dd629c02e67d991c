"""DTensors from nothing: the factories of torch.distributed.tensor, with two more."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchshard._torch import current_mesh, exported_whole, skip_alone
from torchshard.errors import ShardingError
from torchshard.layout.layout import contiguous_stride
from torchshard.tensor.distribute import as_leaf
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.handlers.random import draw
from torchshard.tensor.layout import TensorLayout, layout_for
from torchshard.tensor.mesh import bind
from torchshard.tensor.moving.redistribute import redistribute_local
from torchshard.tensor.regions.caching import one_node, tie
from torchshard.tensor.torch_placements import from_torch, or_replicated

Placements = Sequence[TorchPlacement] | None


class Options(TypedDict, total=False):
    """What every factory takes by name."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    device_mesh: DeviceMesh | None
    placements: Placements


def zeros(*size: Any, **options: Unpack[Options]) -> DTensor:
    """A DTensor of zeros.

    Args:
        size: lengths of the dims, as numbers or as one sequence.
        options: `dtype`, `requires_grad`, `device_mesh` (by default that of the surrounding `with mesh:`) and
            `placements` (one for each axis, that is dim of the mesh; everything replicated by default; not Partial).

    Raises:
        ShardingError: placements that do not fit.
    """
    return _made(_filled, "zeros", size, (), **options)


def ones(*size: Any, **options: Unpack[Options]) -> DTensor:
    """A DTensor of ones; arguments as of `zeros`."""
    return _made(_filled, "ones", size, (), **options)


def empty(*size: Any, **options: Unpack[Options]) -> DTensor:
    """A DTensor whose values are not set; arguments as of `zeros`."""
    return _made(_filled, "empty", size, (), **options)


def full(size: Any, fill_value: Any, **options: Unpack[Options]) -> DTensor:
    """A DTensor that holds `fill_value` everywhere; other arguments as of `zeros`."""
    return _made(_filled, "full", (size,), (fill_value,), **options)


def rand(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Uniform random numbers from [0, 1), the same for every placement; arguments as of `zeros`.

    The numbers are those that the first rank of the mesh would draw alone; every rank's generator moves on as its does.
    """
    return _made(_random, "rand", size, (), **options)


def randn(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Normal random numbers, the same for every placement; see `rand`."""
    return _made(_random, "randn", size, (), **options)


def linspace(start: float, end: float, steps: int, **options: Unpack[Options]) -> DTensor:
    """`steps` numbers from `start` to `end`, evenly spaced; options as of `zeros`."""
    return _made(_cut, "linspace", (steps,), (start, end, steps), **options)


def logspace(start: float, end: float, steps: int, base: float = 10.0, **options: Unpack[Options]) -> DTensor:
    """`steps` numbers from base**start to base**end, evenly spaced on a logarithmic scale; options as of `zeros`."""
    return _made(_cut, "logspace", (steps,), (start, end, steps, base), **options)


@skip_alone
def _made(
    maker: Callable[..., DTensor],
    kind: str,
    size: tuple[Any, ...],
    values: tuple[Any, ...],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    if layout is not torch.strided:
        raise ShardingError("A DTensor is strided.", expected="layout=torch.strided", got=layout)
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    mesh = current_mesh() if device_mesh is None else device_mesh
    return maker(kind, shape, values, mesh, placements, dtype, requires_grad, tie(mesh))


def _tell_options(*factories: Callable[..., DTensor]) -> None:
    """Have `inspect.signature`, and so help and notebooks, tell the options, as type checkers do."""
    options = [p for p in inspect.signature(_made).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for factory in factories:
        written = inspect.signature(factory)
        own = [p for p in written.parameters.values() if p.kind is not p.VAR_KEYWORD]
        factory.__signature__ = written.replace(parameters=[*own, *options])  # type: ignore[attr-defined]


_tell_options(zeros, ones, empty, full, rand, randn, linspace, logspace)


# Each of these is one call in a compiled region: (name of torch's function, shape, its other arguments, ...).


@one_node
@exported_whole
def _filled(
    kind: str, shape: tuple[int, ...], values: tuple[Any, ...], mesh: DeviceMesh, placements: Placements,
    dtype: torch.dtype | None, requires_grad: bool, tied: str | None,
) -> DTensor:  # fmt: skip
    target = _target(shape, mesh, placements, dtype)
    local = getattr(torch, kind)(target.local_shape, *values, dtype=dtype, device=mesh.device_type)
    made = wrap(local, layout_for(target.sharding, target.shape, target.stride, local.dtype))
    return as_leaf(made, requires_grad)


@one_node
@exported_whole
def _random(
    kind: str, shape: tuple[int, ...], values: tuple[Any, ...], mesh: DeviceMesh, placements: Placements,
    dtype: torch.dtype | None, requires_grad: bool, tied: str | None,
) -> DTensor:  # fmt: skip
    target, device = _target(shape, mesh, placements, dtype), torch.device(mesh.device_type)
    make = getattr(torch, kind)
    made = draw(target, device, lambda _: make(target.shape, *values, dtype=target.dtype, device=device))
    return as_leaf(made, requires_grad)


@one_node
@exported_whole
def _cut(
    kind: str, shape: tuple[int, ...], values: tuple[Any, ...], mesh: DeviceMesh, placements: Placements,
    dtype: torch.dtype | None, requires_grad: bool, tied: str | None,
) -> DTensor:  # fmt: skip
    target = _target(shape, mesh, placements, dtype)
    whole = getattr(torch, kind)(*values, dtype=target.dtype, device=mesh.device_type)
    made = wrap(redistribute_local(whole, target.to(target.mesh.replicated()), target), target)
    return as_leaf(made, requires_grad)


def _target(
    shape: tuple[int, ...], device_mesh: DeviceMesh, placements: Placements, dtype: torch.dtype | None
) -> TensorLayout:
    mesh = bind(device_mesh)
    sharding = from_torch(or_replicated(placements, mesh), mesh, shape)
    if sharding.partial:
        raise ShardingError(
            "A factory does not make Partial tensors.",
            expected="Shard(dim) or Replicate()",
            got=sharding,
            fix="DTensor.from_local(term, mesh, [Partial()])",
        )
    return layout_for(sharding, shape, contiguous_stride(shape), dtype or torch.get_default_dtype())
