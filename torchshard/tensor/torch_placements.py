"""The border where torch's placement objects become ours and back; and the one that torch has no class for."""

import math
from collections.abc import Mapping, Sequence

import torch.distributed.tensor as upstream
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchshard._torch import norm_partial, orders_of_axes, register_placement, strided_shard
from torchshard.errors import ShardingError
from torchshard.layout.layout import Layout, Mesh, Sharding
from torchshard.layout.placements import Cut, Partial, Placement, R, Shard
from torchshard.layout.reductions import parse_norm
from torchshard.layout.strided import (
    factors_from_levels,
    factors_from_order,
    levels_from_factors,
    order_from_factors,
)


class UnitShard(TorchPlacement):
    """`Shard(dim)` of units: so many neighbours along the dim stay on one rank.

    The dim has a whole number of units, and these are split as `Shard` splits single items: of 14 heads of 64 columns,
    of which four ranks get 4, 4, 4 and 2, `UnitShard(0, 64)` splits the 896 columns. Where all ranks get as much, it is
    `Shard(dim)`, and DTensors say so. Operators leave it where a dim that is split unevenly has been flattened with
    faster ones: rows `(batch, time)` of a batch of 7 on two ranks. torch's DTensor has nothing like it.

    Args:
        dim: the dim that is split; negative counts from the end.
        unit: how many items stay together.
        runs: so many equal runs of the dim are each split so, and a rank holds its piece of each, joined (what
            torch's `_StridedShard` calls its split factor).
    """

    def __init__(self, dim: int, unit: int = 1, runs: int = 1) -> None:
        super().__init__()
        if unit < 1 or runs < 1:
            raise ShardingError(
                "UnitShard takes the length of a unit and a number of runs.",
                expected="at least one item, and at least one run",
                got=f"UnitShard({dim}, {unit}, {runs})",
                fix="UnitShard(dim, unit)",
            )
        self.dim, self.unit, self.runs = dim, unit, runs

    def is_shard(self, dim: int | None = None) -> bool:
        """True: the dim is split; with `dim`, whether it is that one."""
        return dim is None or self.dim == dim

    def is_replicate(self) -> bool:
        """False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnitShard):
            return False
        return (self.dim, self.unit, self.runs) == (other.dim, other.unit, other.runs)

    def __hash__(self) -> int:
        return hash((UnitShard, self.dim, self.unit, self.runs))

    def __reduce__(self) -> tuple[type["UnitShard"], tuple[int, int, int]]:
        return UnitShard, (self.dim, self.unit, self.runs)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return repr(self), {"UnitShard": UnitShard}

    def __repr__(self) -> str:
        return f"UnitShard(dim={self.dim}, unit={self.unit}{f', runs={self.runs}' if self.runs > 1 else ''})"


register_placement(UnitShard, "dim", "unit", "runs")


def or_replicated(placements: Sequence[TorchPlacement] | None, mesh: Mesh) -> Sequence[TorchPlacement]:
    """These placements, or for None those of a tensor that every rank has as a whole; an empty list is no None.

    Raises:
        ShardingError: something that is no sequence, or the wrong number of placements.
    """
    return [upstream.Replicate()] * mesh.ndim if placements is None else _one_an_axis(placements, mesh)


def _one_an_axis(placements: Sequence[TorchPlacement], mesh: Mesh) -> Sequence[TorchPlacement]:
    if not isinstance(placements, (list, tuple)) and hasattr(placements, "__getitem__"):
        placements = tuple(placements)  # of another sequence
    if not isinstance(placements, (list, tuple)) or len(placements) != mesh.ndim:
        raise ShardingError(
            "Placements are a list with one for each axis of the mesh.",
            expected=f"{mesh.ndim} placements for the mesh {mesh}",
            got=repr(placements),
            fix=f"[{', '.join(['Replicate()'] * mesh.ndim)}], with Shard(dim) or Partial() where it applies",
        )
    return placements


def from_front(placement: TorchPlacement, ndim: int) -> TorchPlacement:
    """The same placement, its dim counted from the front of a tensor of so many dims."""
    dim = getattr(placement, "dim", 0)
    if dim >= 0:
        return placement
    if isinstance(placement, UnitShard):
        return UnitShard(dim + ndim, placement.unit, placement.runs)
    return upstream.Shard(dim + ndim) if isinstance(placement, upstream.Shard) else placement


def placements_of(x: upstream.DTensor) -> tuple[TorchPlacement, ...]:
    """Those of one of torch's DTensors; an order of axes that it says apart from them is in them as strided splits.

    Raises:
        ShardingError: a length of which a strided split would hold other pieces.
    """
    made = list(x.placements)
    for dim, order in orders_of_axes(x).items():
        if order != tuple(sorted(order)):
            factors = factors_from_order(x.shape[dim], order, tuple(x.device_mesh.shape))
            for axis, factor in factors.items():
                made[axis] = _to_torch(Shard(dim), factor)
    return tuple(made)


def from_torch(
    placements: Sequence[TorchPlacement], mesh: Mesh, shape: Sequence[int], *, known: bool = True
) -> Sharding:
    """The sharding that torch's placements mean for a tensor of this global shape; negative dims count from the end.

    Args:
        placements: one an axis.
        mesh: ours.
        shape: of the whole.
        known: whether that is its shape; one that is only assumed says nothing of units.

    Raises:
        ShardingError: something that is no placement, the wrong number of them, a dim out of range, or a strided split
            whose pieces are no nesting of axes.
    """
    placements = _one_an_axis(placements, mesh)
    ours = [_from_torch(p, axis, mesh, len(shape)) for axis, p in enumerate(placements)]
    factors: dict[int, dict[int, int]] = {}
    for axis, (theirs, p) in enumerate(zip(placements, ours, strict=True)):
        if isinstance(p, Shard):
            factors.setdefault(p.dim, {})[axis] = getattr(theirs, "split_factor", 1)
    orders: dict[int, tuple[int, ...]] = {}
    for dim, by_axis in factors.items():
        if any(factor != 1 for factor in by_axis.values()):
            cuts, order = _nesting(placements, dim, shape[dim], by_axis, mesh)
            orders.update(order)
            for axis in by_axis:
                if not isinstance(placements[axis], UnitShard):  # that one tells its own
                    ours[axis] = Shard(dim, *cuts[axis])
    found = mesh.sharding(ours, orders)
    return found.evened(shape) if known else found


def _nesting(
    placements: Sequence[TorchPlacement], dim: int, n: int, factors: Mapping[int, int], mesh: Mesh
) -> tuple[Mapping[int, Cut], Mapping[int, tuple[int, ...]]]:
    """How axes cut a dim by a strided split, and the order in which they do, where it is not left to right.

    All cut it in the runs that their factors share, and nest in some order; or each in runs that others leave.
    """
    runs = math.gcd(*factors.values())
    order = order_from_factors(n // runs, {a: f // runs for a, f in factors.items()}, mesh.shape)
    if order is not None and n % runs == 0:
        return dict.fromkeys(factors, Cut(runs)), {dim: order}
    cuts = levels_from_factors(n, factors, mesh.shape)
    if cuts is not None:
        return cuts, {}
    raise ShardingError(
        "A strided split whose pieces are no nesting of axes.",
        expected="split factors that nest, and a length that they divide",
        got=f"{placements} of dim {dim}, length {n}, on the mesh {mesh}",
        fix="redistribute to Shard(dim) with torch's own class first",
    )


def _from_torch(placement: TorchPlacement, axis: int, mesh: Mesh, ndim: int) -> Placement:
    if type(placement) is not upstream.Shard:  # what is one passes by a metaclass, and names that have to be found
        if isinstance(placement, upstream.Replicate):
            return R
        if type(placement) is upstream.Partial:
            return Partial(placement.reduce_op)
        if type(placement) is norm_partial():
            return Partial(f"norm({float(placement.norm_type)})")  # type: ignore[attr-defined]
    if isinstance(placement, (upstream.Shard, strided_shard(), UnitShard)):
        dim = placement.dim + ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < ndim:
            raise ShardingError(
                f"Shard({placement.dim}) on a tensor of {ndim} dims.",
                expected=f"a dim from {-ndim} to {ndim - 1}" if ndim else "no Shard: a scalar has no dims",
                got=str(placement),
                where=f"axis {mesh.names[axis]} of the mesh {mesh}",
            )
        return Shard(dim, placement.runs, placement.unit) if isinstance(placement, UnitShard) else Shard(dim)
    raise ShardingError(
        "A placement of a kind that is not known here.",
        expected="Shard(dim), UnitShard(dim, unit), Replicate() or Partial(op)",
        got=f"{type(placement).__name__}: {placement!r}",
        where=f"axis {mesh.names[axis]} of the mesh {mesh}",
    )


def to_torch(layout: Layout) -> tuple[TorchPlacement, ...]:
    """The placements of a layout as torch's objects, and UnitShard.

    Raises:
        ShardingError: a nesting order for which there is none.
    """
    factors: dict[int, int | None] = {}  # of torch's strided splits; None for UnitShard
    for dim, levels in layout.sharding.levels.items():
        cut, order = levels[0]
        if len(levels) > 1:
            found = factors_from_levels(layout.shape[dim], levels, layout.mesh.shape)
            factors.update(found or dict.fromkeys(layout.sharding.splits[dim]))
        elif order == tuple(sorted(order)):
            factors.update(dict.fromkeys(order, cut.runs if cut.unit == 1 else None))
        elif cut.unit > 1:
            raise ShardingError(
                "There is no placement for this nesting order of axes that split a dim in units.",
                expected="axes that split it from left to right",
                got=layout.sharding,
                fix="redistribute it to the default order first",
            )
        else:
            nested = factors_from_order(layout.shape[dim] // cut.runs, order, layout.mesh.shape)
            factors.update({axis: cut.runs * factor for axis, factor in nested.items()})
    return tuple([_to_torch(p, factors.get(axis, 1)) for axis, p in enumerate(layout.placements)])


def _to_torch(placement: Placement, factor: int | None) -> TorchPlacement:
    made: TorchPlacement
    if isinstance(placement, Shard) and factor is None:
        made = UnitShard(placement.dim, placement.unit, placement.runs)
    elif isinstance(placement, Shard):
        made = upstream.Shard(placement.dim) if factor == 1 else strided_shard()(placement.dim, split_factor=factor)
    elif isinstance(placement, Partial):
        order = parse_norm(placement.op)
        made = upstream.Partial(placement.op) if order is None else norm_partial()(order)
    else:
        made = upstream.Replicate()
    return made
