"""Statistics along dims that are split: formulas of sums and maxima, which are reduced, instead of gathering.

Where the dims are whole on every rank, the rule of the operator is as good, and is left to run.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard.comm import collectives
from torchshard.layout.placements import Partial, R, Shard
from torchshard.rules.reducing import Dims, dims_of
from torchshard.rules.terms import converts_sums, is_whole_number
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import (
    FLOATS,
    INTEGERS,
    EagerAlone,
    in_boxes,
    made_of,
    part,
    split_along,
    wide,
)
from torchshard.tensor.handlers.rows import Rows
from torchshard.tensor.mesh import BoundMesh


def _variance(finish: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> Callable[..., Any]:
    """What `finish` makes of the variance and the mean of each row: one result, or several."""

    def run(func: Any, x: Any, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
        dims = tuple(dims_of(dim, x.ndim))
        if not split_along(x, dims) or not x.numel() or not (x.is_floating_point() or x.is_complex()):
            return NotImplemented
        rows, local = Rows(x._spec, dims), x._local_tensor.new_empty(0)
        variance, mean = local.abs(), local
        if not rows.outside:
            mean, squares = rows.moments(rows.piece(x))
            variance = squares / max(rows.length - (1 if correction is None else correction), 0)
        real = x.dtype.to_real()
        found = [rows.of_each(t, x.dtype if t is mean else real, keepdim) for t in finish(variance, mean)]
        return found[0] if len(found) == 1 else tuple(found)

    return run


def _dist(func: Any, x: Any, y: Any, p: float = 2) -> Any:
    return torch.linalg.vector_norm(x - y, p)


def _allclose(func: Any, x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    return bool(torch.isclose(x, y, rtol, atol, equal_nan).all())


def _equal(func: Any, x: Any, y: Any) -> Any:
    """Parts are compared where they lie, and each rank says whether its parts are equal."""
    pair = [t._spec for t in (x, y) if type(t) is DTensor]
    split = next((layout.sharding for layout in pair if layout.sharding.splits), None)
    mesh = pair[0].mesh
    assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
    if split is None or len(pair) < 2 or x.shape != y.shape or any(layout.sharding.partial for layout in pair):
        return NotImplemented
    if mesh.coordinate is None:
        return NotImplemented
    same = torch.tensor(func(part(x, split), part(y, split)), device=x._local_tensor.device)
    axes = tuple(sorted([axis for axes in split.splits.values() for axis in axes]))
    return bool(collectives.all_reduce(same, "band", mesh.group(axes)))


def _trace(func: Any, x: Any) -> Any:
    """The diagonals of all parts, where those add up."""
    x = in_boxes(x)
    layout = x._spec
    passes = converts_sums(x.dtype, torch.int64 if is_whole_number(x.dtype) else x.dtype)  # as a sum's terms may wrap
    adds = all(
        p.op == "sum" and passes if isinstance(p, Partial) else p is R or isinstance(p, Shard)
        for p in layout.placements
    )
    if x.ndim != 2 or x.dtype is torch.bool or not adds or layout.box is None:  # the kernel refuses truth values
        return NotImplemented
    found = part(x, layout.sharding).diagonal(layout.box.offset[0] - layout.box.offset[1]).sum()
    return made_of(found, layout.mesh.sharding([p if p is R else Partial("sum") for p in layout.placements]), ())


def _bincount(func: Any, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """As many zeros as all ranks' largest number asks for, to which every part adds its ones or weights."""
    counts = not x.is_floating_point() and x.dtype is not torch.bool and x.ndim == 1 and split_along(x, [0])
    if not counts or not x.numel() or (weights is not None and weights.shape != x.shape):
        return NotImplemented
    least, largest = x.aminmax()
    if least < 0 or minlength < 0:  # the value is known to all ranks; the kernel would ask about a part
        raise RuntimeError(
            "minlength should be >= 0" if minlength < 0 else "bincount only supports 1-d non-negative integral inputs."
        )
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.double()
    return weights.new_zeros([max(int(largest) + 1, minlength)]).index_add(0, x.long(), weights)


def _running(
    kinds: Collection[torch.dtype], nothing: float, join: Callable[..., Tensor], add: Callable[..., Tensor]
) -> Callable[..., Any]:
    """What runs along a split dim: each rank adds what the parts before its own come to.

    Args:
        kinds: dtypes that the kernel takes, of whatever lengths: what it refuses, it refuses of elements alone.
        nothing: what a part of no elements comes to.
        join: of what several parts come to, along dim 0.
        add: of two.
    """

    def run(func: Any, x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        dims, layout, kind = dims_of(dim, x.ndim), x._spec, dtype or x.dtype
        sharding = layout.sharding
        if not split_along(x, dims) or sharding.partial or sharding.cuts or kind not in kinds:
            return NotImplemented
        result = dtype or (kind if kind in FLOATS else torch.int64)
        mine = part(x, sharding).to(kind)
        if layout.box is None:  # outside of the mesh there is nothing but layouts
            return made_of(mine.to(result), sharding, x.shape)
        found = func(wide(mine), *dims)
        total = found.narrow(*dims, -1, 1) if mine.shape[dims[0]] else torch.full_like(found.sum(dims, True), nothing)
        group = layout.mesh.group(sharding.splits[dims[0]])
        before = collectives.all_gather(total[None], 0, [1] * group.size, group)[: group.position]
        # Of the first rank as well, before which there is nothing: graphs of all ranks read what came.
        return made_of(add(found, join(before, 0)).to(result), sharding, x.shape)

    return run


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "var.correction": _variance(lambda variance, mean: [variance]),
    "std.correction": _variance(lambda variance, mean: [variance.sqrt()]),
    "var_mean.correction": _variance(lambda variance, mean: [variance, mean]),
    "std_mean.correction": _variance(lambda variance, mean: [variance.sqrt(), mean]),
    "cumsum.default": _running(FLOATS + INTEGERS, 0, torch.sum, torch.add),
    "cumprod.default": _running(FLOATS + INTEGERS, 1, torch.prod, torch.mul),
    "logcumsumexp.default": _running(FLOATS, -math.inf, torch.logsumexp, torch.logaddexp),
    "dist.default": _dist,
    "trace.default": _trace,
    "bincount.default": _bincount,
    "allclose.default": _allclose,
    "equal.default": EagerAlone(_equal),
}
