"""Slices along a split dim: rows go where the result has them. Fewer than there are ranks are split along another dim.

Where nothing is sent, as for `x[:, :-1]` of even pieces, a slice is a view. Elsewhere it is severed (calls/guards.py),
and what is written to it goes the way back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchshard.comm import collectives
from torchshard.comm.group import Group
from torchshard.layout.layout import Sharding
from torchshard.layout.pieces import Interval, nested_pieces
from torchshard.layout.placements import Shard
from torchshard.layout.splicing import Run
from torchshard.rules.slicing import is_all
from torchshard.tensor.calls import guards
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import EagerAlone, ForKind, eliminated
from torchshard.tensor.handlers.splicing import (
    Handler,
    Told,
    Way,
    bounds,
    nothing,
    outside,
    parts_of,
    results,
    sending,
    sent,
    spaced,
)
from torchshard.tensor.layout import SEVERED, TURNED, TensorLayout, known
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.moving.redistribute import check_assumed, in_memory_order

aten = torch.ops.aten
MOST_RESULTS = 16  # of one split; more are moved as they are, and seen there


def _slice(
    func: Any, x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Handler | None:
    d = _split_dim(x, dim, start, end, step)
    if d is None or is_all(x.shape[d], start, end, step):
        return None
    layout, run = x._spec, _run(*bounds(x.shape[d], start, end, step), step)
    few = 0 < run.length < parts_of(layout.sharding, d)
    sharding, other = _spread(layout, d) if few else (layout.sharding, None)
    outs = results(func, sharding, x, dim, start, end, step)
    if not outs:
        return None
    if few:
        return _sending_few(func, layout, outs[0], d, run, other)
    way = Way.of(Told(d, [run], [run.length]), sharding, [x.shape[d]])
    if outside(sharding):
        return sending([way], partial(nothing, outs[0]))
    if func is aten.slice_copy.Tensor:
        return sending([way], partial(sent, layout, outs[0], _fetching(way, outs[0])))
    return sending([way], partial(_first, _views(layout, outs, way, [way])))


def _select(func: Any, x: Any, dim: int, index: int) -> Handler | None:
    d = _split_dim(x, dim, index)
    if d is None or not -x.shape[d] <= index < x.shape[d]:
        return None
    layout, (sharding, other) = x._spec, _spread(x._spec, d)
    sharding = eliminated(sharding, (d,), False)[0]
    outs = results(func, sharding, x, dim, index)
    if not outs:
        return None
    return _sending_few(func, layout, outs[0], d, _run(index % x.shape[d], 1, 1), other, keeps=False)


def _sending_few(
    func: Any, layout: TensorLayout, out: TensorLayout, dim: int, run: Run, other: int | None, keeps: bool = True
) -> Handler:
    if outside(out.sharding):
        return EagerAlone(partial(nothing, out))
    return Few.of(layout, dim, run, other, keeps).handler(func, layout, out)


def _spread(layout: TensorLayout, dim: int) -> tuple[Sharding, int | None]:
    """A sharding for a few rows of a split dim, by another; and which: one that comes out even, if there is one.

    Their gradient is then in parts of the whole, which are brought back; one that all ranks have would be of all of it.
    """
    (whole, axes), parts = eliminated(layout.sharding, (dim,), True), parts_of(layout.sharding, dim)
    free = [e for e, n in enumerate(layout.shape) if e != dim and e not in whole.splits and n > 1]
    longest = max(free, key=lambda e: layout.shape[e], default=None)
    other = next((e for e in free if layout.shape[e] % parts == 0), longest)
    if other is None:
        return whole, None
    placements = [Shard(other) if a in axes else p for a, p in enumerate(whole.placements)]
    return layout.mesh.sharding(placements, {**whole.splits, other: layout.sharding.splits[dim]}), other


def _split(func: Any, x: Any, size: Any, dim: int = 0) -> Handler | None:
    d = _split_dim(x, dim, size)
    if d is None:
        return None
    n, layout = x.shape[d], x._spec
    lengths = list(size) if isinstance(size, (list, tuple)) else [min(size, n - at) for at in range(0, n, size or 1)]
    if sum(lengths) != n or not 0 < len(lengths) <= MOST_RESULTS or min(lengths) < 0:
        return None
    outs = results(func, layout.sharding, x, size, dim)
    if not outs:
        return None
    runs = [_run(sum(lengths[:k]), length, 1) for k, length in enumerate(lengths)]
    ways = [Way.of(Told(d, [run], [run.length]), layout.sharding, [n]) for run in runs]
    together = Told(d, [run._replace(target=k) for k, run in enumerate(runs)], lengths)
    way = Way.of(together, layout.sharding, [n])
    if outside(layout.sharding):
        return sending([way], lambda *values: [nothing(out, *values) for out in outs])
    return sending([way], _views(layout, outs, way, ways))


def _run(start: int, length: int, step: int) -> Run:
    return Run(start, step, 0, 1, length)


@dataclass(frozen=True, slots=True)
class Few:
    """Fewer rows than there are ranks that split them, and all of these get parts of them.

    Attributes:
        keeps: whether the result has the dim; else there is one row.
        dim: of the rows.
        other: along which they are split then; None where each rank gets all.
        rows: for each rank, those that it holds: where in its part, and where in the result.
        cuts: for each, what it gets of the other dim.
        group: the ranks.
    """

    keeps: bool
    dim: int
    other: int | None
    rows: Sequence[Run]
    cuts: Sequence[Interval]
    group: Group

    @classmethod
    def of(cls, layout: TensorLayout, dim: int, run: Run, other: int | None, keeps: bool = True) -> "Few":
        """The way of a run of a tensor's rows."""
        mesh, axes = layout.mesh, layout.sharding.splits[dim]
        assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
        sizes = [mesh.shape[a] for a in axes]
        rows = [run.of(held) for held in nested_pieces(layout.shape[dim], sizes)]
        cuts = [(0, 0)] * len(rows) if other is None else nested_pieces(layout.shape[other], sizes)
        return cls(keeps, dim, other, rows, cuts, mesh.group(axes))

    def handler(self, func: Any, layout: TensorLayout, out: TensorLayout) -> Handler:
        """Of an operator on a tensor of this layout, whose result has the other."""

        def fetch(x: Tensor, *_: Any) -> Tensor:
            made = self._fetched(x)
            return in_memory_order(made if self.keeps else made.squeeze(self.dim), out)

        def give(part: Tensor, held: Tensor) -> None:
            self._give(part if self.keeps else part.unsqueeze(self.dim), held)

        def view(func: Any, x: DTensor, *_: Any, **__: Any) -> DTensor:
            if layout.assumed:
                check_assumed(x._local_tensor, layout)
            return _severed(x, out, fetch(x._local_tensor), fetch, give)

        copies = func in (aten.slice_copy.Tensor, aten.select_copy.int)
        return EagerAlone(partial(sent, layout, out, fetch) if copies else view)

    def _fetched(self, x: Tensor) -> Tensor:
        own = self._own(x)
        blocks = [self._cut(own, cut) for cut in self.cuts]
        like = blocks[self.group.position].shape
        shapes = [(*like[: self.dim], run.length, *like[self.dim + 1 :]) for run in self.rows]
        return torch.cat(collectives.exchange(blocks, shapes, self.group), self.dim)

    def _give(self, part: Tensor, held: Tensor) -> None:
        own = self._own(held)
        if self.other is None:
            run = self.rows[self.group.position]
            own.copy_(spaced(part, self.dim, run.at, 1, run.length))
            return
        blocks = [spaced(part, self.dim, run.at, 1, run.length) for run in self.rows]
        shapes = [self._cut(own, cut).shape for cut in self.cuts]
        own.copy_(torch.cat(collectives.exchange(blocks, shapes, self.group), self.other))

    def _own(self, x: Tensor) -> Tensor:
        run = self.rows[self.group.position]
        return spaced(x, self.dim, run.start, run.step, run.length)

    def _cut(self, rows: Tensor, cut: Interval) -> Tensor:
        return rows if self.other is None else rows.narrow(self.other, *cut)


def _split_dim(x: Any, dim: Any, *numbers: Any) -> int | None:
    """The dim, counted from the first, if x is split along it and lengths and bounds are known; None elsewhere."""
    if type(x) is not DTensor or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        return None
    dim, sharding = dim % x.ndim, x._spec.sharding
    plain = known(x._spec.shape, *numbers) and dim not in sharding.cuts
    return dim if plain and parts_of(sharding, dim) > 1 else None


def _views(layout: TensorLayout, outs: Sequence[TensorLayout], way: Way, ways: Sequence[Way]) -> Handler:
    """A handler that gives slices of a tensor.

    Args:
        layout: of the tensor.
        outs: of the slices.
        way: of all of them together.
        ways: of each.
    """
    marks = layout.terms | layout.marks & TURNED
    seen = [(one, out.marked(marks)) for one, out in zip(ways, outs, strict=True)]
    fetched = [(out, _fetching(one, out), _giving(one)) for one, out in zip(ways, outs, strict=True)]

    def views(func: Any, x: DTensor, *_: Any, **__: Any) -> list[DTensor]:
        if layout.assumed:  # of other pieces, others may have to send
            check_assumed(x._local_tensor, layout)
        if way.splice.apart:
            parts = zip(way.made([x._local_tensor], outs[0].stride), fetched, strict=True)
            return [_severed(x, out, part, fetch, give) for part, (out, fetch, give) in parts]
        made = [guards.new_view(DTensor, one.seen(x._local_tensor), out, False) for one, out in seen]
        return [guards.sever(view, x._window) for view in made] if layout.marks & SEVERED else made

    return views


def _first(made: Handler, *values: Any) -> DTensor:
    return made(*values)[0]  # type: ignore[no-any-return]


def _severed(x: DTensor, out: TensorLayout, local: Tensor, fetch: guards.Move, give: guards.Give) -> DTensor:
    view = guards.new_view(DTensor, local, out.marked(x._spec.terms), False, x)
    return guards.sever(view, guards.Window.on(x, local, fetch, give))


def _fetching(way: Way, out: TensorLayout) -> guards.Move:
    return lambda local, *_: way.made([local], out.stride)[0]


def _giving(way: Way) -> guards.Give:
    back = way.back()
    return lambda rows, held: back.written([held], [rows])


HANDLERS: Mapping[str, ForKind] = {
    **dict.fromkeys(["slice.Tensor", "slice_copy.Tensor"], ForKind(_slice)),
    **dict.fromkeys(["split.Tensor", "split_with_sizes.default"], ForKind(_split)),
    **dict.fromkeys(["select.int", "select_copy.int"], ForKind(_select)),
}
