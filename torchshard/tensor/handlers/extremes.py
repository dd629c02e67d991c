"""The largest and the least along dims that are split, and where they are.

Each rank names the extreme of its part; among these few the first is chosen, as eager torch chooses among equal ones.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchshard.comm.group import Group
from torchshard.comm.reducing import BITS
from torchshard.layout.boxes import Box
from torchshard.rules.reducing import dims_of
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import FLOATS, INTEGERS, eliminated, made_of, part, split_along, told
from torchshard.tensor.mesh import BoundMesh


def _aminmax(func: Any, x: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    dims = dims_of(dim, x.ndim)
    return (x.amin(dims, keepdim), x.amax(dims, keepdim)) if _found_along(x, dims) else NotImplemented


def _place(largest: bool) -> Callable[..., Any]:
    def run(func: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        dims = dims_of(dim, x.ndim)
        return _first(x, tuple(dims), keepdim, largest)[1] if _has_places(x, dims) else NotImplemented

    return run


def _value_and_place(largest: bool) -> Callable[..., Any]:
    def run(func: Any, x: Any, dim: int, keepdim: bool = False) -> Any:
        dims = dims_of(dim, x.ndim)
        return _first(x, tuple(dims), keepdim, largest) if _has_places(x, dims) else NotImplemented

    return run


def _found_along(x: DTensor, dims: list[int]) -> bool:
    """Whether some of the dims are split, and there are elements to compare: else the rule is as good, or errs."""
    return split_along(x, dims) and 0 not in x.shape and not x.is_complex()


def _has_places(x: DTensor, dims: list[int]) -> bool:
    """The same, and each rank's part has a place, and kernels compare its values."""
    sharding = x._spec.sharding
    kernels = x.dtype in FLOATS + INTEGERS
    return kernels and _found_along(x, dims) and not sharding.partial and not sharding.cuts


def _first(x: DTensor, dims: tuple[int, ...], keepdim: bool, largest: bool) -> tuple[DTensor, DTensor]:
    """The extreme along dims and its number among their elements in row-major order; of equal ones, the first."""
    layout, local = x._spec, part(x, x._spec.sharding)
    sharding, axes = eliminated(layout.sharding, dims, keepdim)
    shape = tuple([1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims])
    if layout.box is None:  # outside of the mesh there is nothing but layouts
        return made_of(local, sharding, shape), made_of(local.long(), sharding, shape)
    assert isinstance(layout.mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
    group = layout.mesh.group(axes)
    own, nowhere = _of_part(local, layout.box, x.shape, dims, largest), _count(x.shape, dims)
    values, places = _of_all(*own, nowhere, group)
    extreme = values.amax(0) if largest else values.amin(0)
    others = (values != extreme) & (values == values)  # a NaN is the extreme, where there is one
    place = places.masked_fill(others, nowhere).amin(0).long()
    found = (extreme, place) if keepdim else (extreme.squeeze(dims), place.squeeze(dims))
    return made_of(found[0], sharding, shape), made_of(found[1], sharding, shape)


def _of_all(value: Tensor, place: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor]:
    """The values and places of all ranks, in one message: the bits of values as whole numbers beside the places.

    Args:
        value, place: of this rank.
        count: the largest number that a place may be.
        group: who takes part.
    """
    bits = BITS.get(value.dtype, value.dtype)
    number = torch.int32 if bits.itemsize < 8 and count < 2**31 else torch.int64
    values, places = told(group, value.view(bits).to(number), place.to(number))
    return values.to(bits).view(value.dtype), places


def _of_part(
    local: Tensor, box: Box, shape: tuple[int, ...], dims: tuple[int, ...], largest: bool
) -> tuple[Tensor, Tensor]:
    """The extreme of a part along one dim or all, which are kept, and its number among all elements along them."""
    if not _count(box.size, dims):
        kept = [1 if d in dims else n for d, n in enumerate(box.size)]
        nowhere = local.new_full(kept, _count(shape, dims), dtype=torch.int64)
        return local.new_full(kept, _worst(local.dtype, largest)), nowhere
    if len(dims) == 1:
        value, at = (torch.max if largest else torch.min)(local, dims[0], True)
        return value, at + box.offset[dims[0]]
    at = (torch.argmax if largest else torch.argmin)(local, keepdim=True)
    place, step, rest = torch.zeros_like(at), 1, at
    for d in reversed(dims):
        place = place + (rest % box.size[d] + box.offset[d]) * step
        rest, step = rest // box.size[d], step * shape[d]
    return local.reshape(-1)[at], place


def _worst(dtype: torch.dtype, largest: bool) -> float:
    """What no element is worse than."""
    if dtype in FLOATS:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _count(shape: tuple[int, ...], dims: tuple[int, ...]) -> int:
    return math.prod([shape[d] for d in dims])


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "aminmax.default": _aminmax,
    "argmax.default": _place(True),
    "argmin.default": _place(False),
    "max.dim": _value_and_place(True),
    "min.dim": _value_and_place(False),
}
