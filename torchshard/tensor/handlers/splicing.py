"""Rows that lie with another rank in the result are sent there, and only they: what slices and joins share.

The result is split as the operand is; where pieces of both end at the same rows, nothing is sent.

Left to rules: dims that are split in runs or units, terms of extremes where something lies between rows, and symbols.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchshard.comm import collectives
from torchshard.comm.group import Group
from torchshard.layout.layout import Sharding
from torchshard.layout.pieces import nested_pieces
from torchshard.layout.splicing import Run, Splice, counted, splice
from torchshard.tensor.calls import guards
from torchshard.tensor.dtensor import DTensor, dtensors_in, wrap
from torchshard.tensor.handlers.parts import EagerAlone
from torchshard.tensor.handlers.sliding import described, layouts
from torchshard.tensor.layout import TensorLayout, dense_stride, layout_for
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.moving.redistribute import check_assumed

aten = torch.ops.aten
Handler = Callable[..., Any]


class Told(NamedTuple):
    """What an operator does along one split dim.

    Attributes:
        dim: the dim.
        runs: of its results.
        lengths: of these.
        gaps: whether there are places without a row.
    """

    dim: int
    runs: Sequence[Run]
    lengths: Sequence[int]
    gaps: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """What Told says, on this rank: `lengths` are those of its parts of the results. Outside of the mesh, there is no
    group, and it tells only whether others send.
    """

    dim: int
    lengths: Sequence[int]
    gaps: bool
    splice: Splice
    group: Group | None

    @classmethod
    def of(cls, told: Told, sharding: Sharding, lengths: Sequence[int]) -> "Way":
        """The way of parts of tensors of these lengths, all in one sharding."""
        mesh, axes = sharding.mesh, sharding.splits[told.dim]
        assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
        sizes, group = [mesh.shape[a] for a in axes], None if outside(sharding) else mesh.group(axes)
        here = group.position if group else 0
        held, wanted = [[nested_pieces(n, sizes) for n in some] for some in (lengths, told.lengths)]
        own = [pieces[here][1] for pieces in wanted]
        return cls(told.dim, own, told.gaps, splice(told.runs, held, wanted, here), group)

    def made(self, parts: Sequence[Tensor], order: Sequence[int], fill: Any = 0) -> list[Tensor]:
        """This rank's parts of the results, `fill` in their gaps; in memory, dims are in the order of these strides."""
        made, like = [], parts[0]
        for length in self.lengths:
            size = (*like.shape[: self.dim], length, *like.shape[self.dim + 1 :])
            into = like.new_empty_strided(size, dense_stride(size, order))
            made.append(into.fill_(fill) if self.gaps else into)
        return self.written(made, parts)

    def written(self, into: list[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        """`into`, with all rows at their places."""
        here, coming = self.splice.here, None
        if self.splice.apart and self.group:
            given = [self._rows(parts, () if k == here else runs) for k, runs in enumerate(self.splice.given)]
            counts = [0 if k == here else counted(runs) for k, runs in enumerate(self.splice.taken)]
            before, after = into[0].shape[: self.dim], into[0].shape[self.dim + 1 :]
            shapes = [(*before, n, *after) if n else (0,) for n in counts]
            coming = collectives.start_exchange(given, shapes, self.group)
        for run in self.splice.taken[here]:
            self._put(into, run, self._rows(parts, [run]))
        for k, block in enumerate(coming.wait() if coming else ()):
            at = 0
            for run in self.splice.taken[k] if k != here else ():
                self._put(into, run, block.narrow(self.dim, at, run.length))
                at += run.length
        return into

    def seen(self, x: Tensor) -> Tensor:
        """The rows of a slice that are here, where none need to go anywhere: a view."""
        for run in self.splice.taken[self.splice.here]:
            return spaced(x, self.dim, run.start, run.step, run.length)
        return x.narrow(self.dim, 0, 0)

    def back(self) -> "Way":
        """From the result of a slice to where its rows were."""
        there = self.splice
        given, taken = ([[run.turned() for run in runs] for runs in way] for way in (there.taken, there.given))
        return Way(self.dim, (), False, Splice(there.here, given, taken, there.apart), self.group)

    def _rows(self, parts: Sequence[Tensor], runs: Sequence[Run]) -> Tensor:
        found = [spaced(parts[run.source], self.dim, run.start, run.step, run.length) for run in runs]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim) if found else parts[0].new_empty(0)

    def _put(self, into: Sequence[Tensor], run: Run, rows: Tensor) -> None:
        spaced(into[run.target], self.dim, run.at, run.apart, run.length).copy_(rows)


def spaced(x: Tensor, dim: int, start: int, step: int, count: int) -> Tensor:
    """A view of so many rows of a tensor, every so many; of none, wherever they start."""
    if step == 1 or not count:
        return x.narrow(dim, start if count else 0, count)
    return aten.slice(x, dim, start, start + (count - 1) * step + 1, step)  # type: ignore[no-any-return]


def parts_of(sharding: Sharding, dim: int) -> int:
    """How many ranks split a dim."""
    return math.prod([sharding.mesh.shape[a] for a in sharding.splits.get(dim, ())])


def bounds(n: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """The first row of a slice, and how many there are."""
    taken = range(n)[start:end:step]
    return taken.start, len(taken)


def results(func: Any, sharding: Sharding, *given: Any) -> list[TensorLayout]:
    """The layouts of the results; none where the operator refuses its arguments."""
    first = given[0][0] if isinstance(given[0], (list, tuple)) else given[0]
    return [layout_for(sharding, *told) for told in layouts(sharding, func, first.device.type, described(given))]


def outside(sharding: Sharding) -> bool:
    """Whether this rank is outside of the mesh: it holds nothing, but knows the layouts of results."""
    return sharding.mesh.coordinate is None


def nothing(out: TensorLayout, func: Any, x: Any, *_: Any, **__: Any) -> DTensor:
    """What a handler gives there, once the layout of its result is known."""
    base = next(dtensors_in([x]))
    return guards.new_view(DTensor, base._local_tensor.new_empty(0, dtype=out.dtype), out, False, base)


def sending(ways: Iterable[Way], handler: Handler) -> Handler:
    """A handler that has traces too, where nothing is sent; also outside of the mesh, to know of the same layouts."""
    return EagerAlone(handler) if any(way.splice.apart for way in ways) else handler


def sent(
    layout: TensorLayout, out: TensorLayout, make: Callable[..., Tensor], func: Any, x: DTensor, *rest: Any
) -> Any:
    """A handler, once its first arguments are known: layouts of x and of the new tensor, and what makes its part of
    that of x and the arguments after it.
    """
    if layout.assumed:
        check_assumed(x._local_tensor, layout)
    return wrap(make(x._local_tensor, *rest), out)
