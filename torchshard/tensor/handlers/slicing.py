"""Slices along a split dim: rows go where the result has them. One row alone is split along another dim.

Where nothing is sent, as for `x[:, :-1]` of even pieces, a slice is a view. Elsewhere it is severed (guards.py), and
what is written to it goes the way back.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchshard.comm import collectives
from torchshard.layout.layout import Sharding
from torchshard.layout.pieces import nested_pieces
from torchshard.layout.placements import Shard
from torchshard.layout.splicing import Run
from torchshard.rules.slicing import is_all
from torchshard.tensor import guards
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import EagerAlone, ForKind, eliminated
from torchshard.tensor.handlers.splicing import (
    Handler,
    Told,
    Way,
    bounds,
    known,
    nothing,
    outside,
    results,
    sending,
    sent,
)
from torchshard.tensor.layout import SEVERED, TURNED, TensorLayout
from torchshard.tensor.redistribute import check_assumed, in_memory_order

aten = torch.ops.aten
MOST_RESULTS = 16  # of one split; more are moved as they are, and seen there


def _slice(
    func: Any, x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Handler | None:
    d = _split_dim(x, dim, start, end, step)
    if d is None or is_all(x.shape[d], start, end, step):
        return None
    layout, run = x._spec, _run(*bounds(x.shape[d], start, end, step), step)
    outs = results(func, layout.sharding, x, dim, start, end, step)
    if not outs or outside(layout.sharding):
        return partial(nothing, outs[0]) if outs else None
    way = Way.of(Told(d, [run], [run.length]), layout.sharding, [x.shape[d]])
    if func is aten.slice_copy.Tensor:
        return sending([way], partial(sent, layout, outs[0], _fetching(way, outs[0])))
    return sending([way], partial(_first, partial(_views, layout, outs, way, [way])))


def _split(func: Any, x: Any, size: Any, dim: int = 0) -> Handler | None:
    d = _split_dim(x, dim, size)
    if d is None:
        return None
    n, layout = x.shape[d], x._spec
    lengths = list(size) if isinstance(size, (list, tuple)) else [min(size, n - at) for at in range(0, n, size or 1)]
    if sum(lengths) != n or not 0 < len(lengths) <= MOST_RESULTS or min(lengths) < 0:
        return None
    outs = results(func, layout.sharding, x, size, dim)
    if len(outs) < len(lengths) or outside(layout.sharding):
        return (lambda *values: [nothing(out, *values) for out in outs]) if outs else None
    runs = [_run(sum(lengths[:k]), length, 1) for k, length in enumerate(lengths)]
    ways = [Way.of(Told(d, [run], [run.length]), layout.sharding, [n]) for run in runs]
    together = Told(d, [run._replace(target=k) for k, run in enumerate(runs)], lengths)
    way = Way.of(together, layout.sharding, [n])
    return sending([way], partial(_views, layout, outs, way, ways))


def _run(start: int, length: int, step: int) -> Run:
    return Run(start, step, 0, 1, length)


def _select(func: Any, x: Any, dim: int, index: int) -> Handler | None:
    d = _split_dim(x, dim, index)
    if d is None or not -x.shape[d] <= index < x.shape[d]:
        return None
    layout, row = x._spec, index % x.shape[d]
    sharding, axes, e = _spread(layout, d)
    outs = results(func, sharding, x, dim, index)
    if not outs or outside(sharding):
        return partial(nothing, outs[0]) if outs else None
    sizes, group, out = [layout.mesh.shape[a] for a in axes], layout.mesh.group(axes), outs[0]
    held = nested_pieces(x.shape[d], sizes)
    owner, at = next((k, row - start) for k, (start, n) in enumerate(held) if start <= row < start + n)
    owns, lengths = owner == group.position, [n for _, n in nested_pieces(out.shape[e], sizes)] if e is not None else []

    def fetch(local: Tensor) -> Tensor:
        mine = local.new_empty([*local.shape[:d], *local.shape[d + 1 :]])
        if owns:
            mine.copy_(local.select(d, at))
        if e is None:
            return in_memory_order(collectives.broadcast(mine, owner, group), out)
        return in_memory_order(collectives.scatter(mine, e, lengths, owner, group), out)

    def give(part: Tensor, held: Tensor) -> None:
        if e is not None:
            blocks = [part if k == owner else part.new_empty(0) for k in range(group.size)]
            shapes = [(*part.shape[:e], n, *part.shape[e + 1 :]) if owns else (0,) for n in lengths]
            came = collectives.exchange(blocks, shapes, group)
            part = torch.cat(came, e) if owns else part
        if owns:
            held.select(d, at).copy_(part)

    if func is aten.select_copy.int:
        return EagerAlone(partial(sent, layout, out, fetch))

    def view(func: Any, x: DTensor, *_: Any, **__: Any) -> DTensor:
        if layout.assumed:
            check_assumed(x._local_tensor, layout)
        return _severed(x, out, fetch(x._local_tensor), fetch, give)

    return EagerAlone(view)


def _spread(layout: TensorLayout, dim: int) -> tuple[Sharding, tuple[int, ...], int | None]:
    """How one row is split, over which axes, and along which of its dims: one that comes out even, if there is one.

    The gradient of the row is then of parts of the whole, which are brought back; one that all ranks have would be of
    all of it.
    """
    sharding, axes = eliminated(layout.sharding, (dim,), False)
    shape, mesh = [*layout.shape[:dim], *layout.shape[dim + 1 :]], layout.mesh
    parts = math.prod([mesh.shape[a] for a in axes])
    free = [e for e, n in enumerate(shape) if e not in sharding.splits and n > 1]
    e = next((e for e in free if shape[e] % parts == 0), max(free, key=lambda e: shape[e], default=None))
    if e is None:
        return sharding, axes, None
    placements = [Shard(e) if a in axes else p for a, p in enumerate(sharding.placements)]
    return mesh.sharding(placements, {**sharding.splits, e: axes}), axes, e


def _split_dim(x: Any, dim: Any, *numbers: Any) -> int | None:
    """The dim, counted from the first, if x is split along it and lengths and bounds are known; None elsewhere."""
    if type(x) is not DTensor or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        return None
    dim, sharding = dim % x.ndim, x._spec.sharding
    plain = known(x._spec.shape, *numbers) and dim not in sharding.cuts
    return dim if plain and dim in sharding.splits else None


def _views(
    layout: TensorLayout, outs: Sequence[TensorLayout], way: Way, ways: Sequence[Way], func: Any, x: DTensor, *_: Any,
    **__: Any,
) -> list[DTensor]:  # fmt: skip
    """Slices of x, once the first arguments are known.

    Args:
        layout: of x.
        outs: of the slices.
        way: of all of them together.
        ways: of each.
    """
    if layout.assumed:  # of other pieces, others may have to send
        check_assumed(x._local_tensor, layout)
    if way.splice.apart:
        parts = way.made([x._local_tensor], outs[0].stride)
        giving = [(_fetching(one, out), _giving(one)) for one, out in zip(ways, outs, strict=True)]
        return [_severed(x, *each[:2], *each[2]) for each in zip(outs, parts, giving, strict=True)]
    marks = layout.terms | layout.marks & TURNED
    seen = [(one.seen(x._local_tensor), out.marked(marks)) for one, out in zip(ways, outs, strict=True)]
    views = [guards.new_view(DTensor, *each, False) for each in seen]
    return [guards.sever(view, x._window) for view in views] if layout.marks & SEVERED else views


def _first(made: Handler, *values: Any) -> DTensor:
    return made(*values)[0]  # type: ignore[no-any-return]


def _severed(x: DTensor, out: TensorLayout, local: Tensor, fetch: guards.Move, give: guards.Give) -> DTensor:
    view = guards.new_view(DTensor, local, out.marked(x._spec.terms), False)
    return guards.sever(view, guards.Window.on(x, local, fetch, give))


def _fetching(way: Way, out: TensorLayout) -> guards.Move:
    return lambda local: way.made([local], out.stride)[0]


def _giving(way: Way) -> guards.Give:
    back = way.back()
    return lambda rows, held: back.written([held], [rows])


HANDLERS: Mapping[str, ForKind] = {
    **dict.fromkeys(["slice.Tensor", "slice_copy.Tensor"], ForKind(_slice)),
    **dict.fromkeys(["split.Tensor", "split_with_sizes.default"], ForKind(_split)),
    **dict.fromkeys(["select.int", "select_copy.int"], ForKind(_select)),
}
