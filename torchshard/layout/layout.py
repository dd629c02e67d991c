"""Where the pieces of a tensor live: Mesh, Sharding (mesh, placements, order) and Layout (also shape, stride, dtype).

All three are interned and compared by identity: a Mesh keeps the one Sharding of each kind, a Sharding the one Layout,
so what follows from them (boxes, local shapes, transitions) is worked out once and found again by address. Nothing else
keeps them: with its mesh, all goes. Where lengths differ from step to step, layouts have no end: a Sharding keeps so
many, and knows of others while they are used. Only layouts with symbolic sizes, which cannot be hashed, are made anew
each time.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from torchshard.errors import ShardingError
from torchshard.layout import grid
from torchshard.layout.boxes import Box
from torchshard.layout.levels import largest_length, length_at, levels_of, may_nest
from torchshard.layout.pieces import Symbolic, is_even
from torchshard.layout.placements import WHOLE, Partial, Placement, Placements, R, Shard, without_partial
from torchshard.layout.reductions import may_mix

Order = tuple[tuple[int, tuple[int, ...]], ...]

MAX_LAYOUTS = 4096  # kept a sharding; when full, all are let go but for those that somebody else holds


class Mesh:
    """An n-dimensional array of ranks; its dimensions are called axes.

    Args:
        shape: number of ranks along each axis.
        names: a name for each axis; "0", "1", ... where none are given.
        coordinate: this process's place in the mesh; None where it has none, or where it does not matter.
        ranks: the global rank at each place, last axis fastest; 0, 1, ... where none are given.

    Meshes are compared by identity: whoever makes them keeps one for each that it knows.
    """

    __slots__ = (
        "__weakref__", "_index", "_shardings", "coordinate", "names", "ndim", "ranks", "shape", "size",
        "transitions"
    )  # fmt: skip
    layout_type: "ClassVar[type[Layout]]"

    def __init__(
        self,
        shape: Sequence[int],
        names: Sequence[str] | None = None,
        coordinate: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.shape, self.ndim, self.size = tuple(shape), len(shape), math.prod(shape)
        self.names = tuple(names) if names is not None else tuple(map(str, range(self.ndim)))
        self.coordinate = None if coordinate is None else tuple(coordinate)
        self.ranks: Sequence[int] = range(self.size) if ranks is None else tuple(ranks)
        if any(n < 1 for n in self.shape) or len(self.names) != self.ndim or len(self.ranks) != self.size:
            raise ShardingError(
                "A mesh needs at least one rank on each axis, a name for each axis and a rank for each place.",
                got=f"shape {self.shape}, names {self.names}, {len(self.ranks)} ranks",
            )
        self._index: dict[int, int] | None = None
        self._shardings: dict[tuple[Placements, Order], Sharding] = {}
        self.transitions: dict[Any, Any] = {}  # see transitions.py

    def sharding(self, placements: Sequence[Placement], order: Mapping[int, Sequence[int]] | None = None) -> "Sharding":
        """The sharding with these placements, one an axis.

        Args:
            placements: what each axis does.
            order: for a dim that several axes split, these axes, the first to split first; by default left to right.

        Raises:
            ShardingError: too many or too few placements, Partials that do not mix, an order that names other axes.
        """
        key = tuple(placements), tuple(sorted((d, tuple(axes)) for d, axes in order.items())) if order else ()
        found = self._shardings.get(key)
        if found is None:
            made = Sharding(self, *key)
            found = self._shardings.setdefault((made.placements, made.order), made)
            self._shardings[key] = found  # the same thing said with a needless order
        return found

    def replicated(self) -> "Sharding":
        """The sharding that holds everything everywhere."""
        return self.sharding((R,) * self.ndim)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """All places, last axis fastest."""
        return itertools.product(*map(range, self.shape))

    def linear(self, coordinate: Sequence[int]) -> int:
        """Position of a coordinate in `ranks`."""
        at = 0
        for n, k in zip(self.shape, coordinate, strict=True):
            at = at * n + k
        return at

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """The place of a global rank; None where it has none."""
        if self._index is None:
            self._index = {rank: at for at, rank in enumerate(self.ranks)}
        at = self._index.get(rank)
        if at is None:
            return None
        place = []
        for n in reversed(self.shape):
            at, k = divmod(at, n)
            place.append(k)
        return tuple(reversed(place))

    def __repr__(self) -> str:
        return f"({', '.join(f'{name}={n}' for name, n in zip(self.names, self.shape, strict=True))})"


class Sharding:
    """A mesh, one placement an axis, and for each dim the order in which axes split it; made by Mesh.sharding.

    Attributes:
        splits: dim -> axes that split it, first to split first; only for dims that are split.
        levels: dim -> how they do so; see levels.py.
        cuts: dim -> what of it is split, for dims that are split in runs or in units; of several levels the innermost.
        units: dim -> length of its units, where that is not 1.
        order: the part of `splits` that is not left to right, as in the argument of Mesh.sharding.
        partial: the axes with a Partial placement.
    """

    __slots__ = (
        "__weakref__", "_layouts", "_let_go", "cuts", "levels", "mesh", "order", "partial", "placements", "splits",
        "units",
    )  # fmt: skip

    def __init__(self, mesh: Mesh, placements: Placements, order: Order) -> None:
        if len(placements) != mesh.ndim or not all(isinstance(p, Placement) for p in placements):
            raise ShardingError(
                "A sharding takes one placement an axis.",
                expected=f"{mesh.ndim} placements for the mesh {mesh}",
                got=repr(placements),
                fix=f"placements={[R] * mesh.ndim}, with Shard(dim) or Partial() where it applies",
            )
        self.mesh, self.placements = mesh, placements
        self.levels = {dim: levels_of(placements, axes) for dim, axes in _splits(mesh, placements, order).items()}
        self.splits = {dim: tuple([a for _, axes in levels for a in axes]) for dim, levels in self.levels.items()}
        self.cuts = {dim: cut for dim, (*_, (cut, _)) in self.levels.items() if cut != WHOLE}
        self.units = {dim: cut.unit for dim, cut in self.cuts.items() if cut.unit > 1}
        self.order = tuple([(d, axes) for d, axes in self.splits.items() if axes != tuple(sorted(axes))])
        self.partial = tuple([a for a, p in enumerate(placements) if type(p) is Partial])
        ops = [p.op for p in placements if type(p) is Partial]
        for a, b in itertools.combinations(ops, 2):
            if not may_mix(a, b):
                raise ShardingError(
                    "One tensor cannot be Partial in two ways that do not commute.",
                    expected="the same reduction on each axis (sum and avg may be mixed)",
                    got=f"Partial({a!r}) and Partial({b!r})",
                    fix="reduce one of them first: redistribute that axis to Replicate()",
                )
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self._let_go: WeakValueDictionary[tuple[Any, ...], Layout] = WeakValueDictionary()

    def layout(self, shape: Sequence[int], stride: Sequence[int], dtype: Any) -> "Layout":
        """The layout of a tensor of this global shape, stride and dtype (anything with `.itemsize`).

        Its sharding is this one, `evened`.
        """
        key = (shape, stride, dtype)
        try:
            found = self._layouts.get(key)
        except TypeError:  # lists, or symbolic sizes
            shape, stride = tuple(map(Symbolic.number, shape)), tuple(map(Symbolic.number, stride))
            try:
                found = self._layouts.get((shape, stride, dtype))
            except TypeError:
                return self.mesh.layout_type(self.evened(shape), shape, stride, dtype)
        return self._kept_anew(tuple(shape), tuple(stride), dtype) if found is None else found

    def _kept_anew(self, *key: Any) -> "Layout":
        """The layout of this shape, stride and dtype that somebody holds, or a new one."""
        if len(self._layouts) >= MAX_LAYOUTS:
            self._let_go.update(self._layouts)
            self._layouts.clear()
        found, home = self._let_go.get(key), self.evened(key[0])
        if found is None:
            found = self.mesh.layout_type(self, *key) if home is self else home.layout(*key)
        return self._layouts.setdefault(key, found)

    def evened(self, shape: Sequence[int]) -> "Sharding":
        """This sharding of a tensor of this shape, without units where they come out even: that of its layout."""
        placements = self.placements
        for dim in [d for d in self.units if d < len(shape) and len(self.levels[d]) == 1]:
            axes, cut = self.splits[dim], self.cuts[dim]
            if is_even(shape[dim], [cut.apart, *[self.mesh.shape[a] for a in axes]]):
                placements = tuple([Shard(dim, cut.runs) if a in axes else p for a, p in enumerate(placements)])
        return self if placements is self.placements else self.mesh.sharding(placements, dict(self.order))

    def holds_as(self, other: "Sharding") -> bool:
        """Whether every rank holds the same by another sharding of this mesh: they differ on axes of one rank only."""
        return self is other or self._held() == other._held()

    def _held(self) -> tuple[object, ...]:
        ranks = self.mesh.shape
        levels = [
            (dim, cut, held)
            for dim, levels in self.levels.items()
            for cut, axes in levels
            if (held := [a for a in axes if ranks[a] > 1])
        ]
        return levels, [(a, self.placements[a]) for a in self.partial]

    def replace(self, axis: int, placement: Placement) -> "Sharding":
        """This sharding with another placement on one axis; a Shard is appended last to its dim's order."""
        splits = {d: tuple([a for a in axes if a != axis]) for d, axes in self.splits.items()}
        if type(placement) is Shard:
            splits[placement.dim] = (*splits.get(placement.dim, ()), axis)
        placements = (*self.placements[:axis], placement, *self.placements[axis + 1 :])
        return self.mesh.sharding(placements, {d: axes for d, axes in splits.items() if axes})

    def without_partial(self) -> "Sharding":
        """This sharding with Replicate for every Partial: that of a gradient."""
        return self.mesh.sharding(without_partial(self.placements), dict(self.order)) if self.partial else self

    def boxes(self, shape: Sequence[int]) -> list[Box]:
        """The boxes of all ranks, in the order of mesh.ranks.

        Raises:
            ShardingError: a dim is split in runs, so that parts are no boxes; see cuts.py.
        """
        self._require_boxes()
        return grid.boxes(shape, self.splits, self.mesh.shape, self.units)

    def box(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """The box of one coordinate; raises ShardingError as `boxes` does."""
        self._require_boxes()
        return grid.box_at(shape, self.splits, self.mesh.shape, coordinate, self.units)

    def holders(self, shape: Sequence[int], box: Box, fixed: Mapping[int, int]) -> grid.Holders:
        """Who holds which part of a box; see grid.holders. Raises ShardingError as `boxes` does."""
        self._require_boxes()
        return grid.holders(shape, self.splits, self.mesh.shape, box, fixed, self.units)

    def part(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of one coordinate, in runs or not."""
        size = list(shape)
        for dim, levels in self.levels.items():
            size[dim] = length_at(shape[dim], levels, self.mesh.shape, coordinate)
        return tuple(size)

    @property
    def boxed(self) -> bool:
        """Whether parts are boxes: no dim is split in runs."""
        return all(cut.runs == 1 for cut in self.cuts.values())

    def _require_boxes(self) -> None:
        if not self.boxed:
            raise ShardingError(
                "A part of a tensor that is split in runs is no box.",
                expected="each rank to hold an interval of every dim",
                got=self,
                fix="redistribute it to Shard(dim) or Replicate() first",
            )

    def largest(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the largest part, the same on every rank."""
        size = list(shape)
        for dim, levels in self.levels.items():
            size[dim] = largest_length(shape[dim], levels, self.mesh.shape)
        return tuple(size)

    @property
    def replicas(self) -> int:
        """How many ranks hold each element (or a term of it)."""
        return math.prod([self.mesh.shape[a] for a in self.unsplit])

    @property
    def unsplit(self) -> list[int]:
        """Axes that do not split the tensor."""
        return [a for a, p in enumerate(self.placements) if type(p) is not Shard]

    def __reduce__(self) -> Any:
        return _sharding, (self.mesh, self.placements, self.order)

    def __deepcopy__(self, memo: Any) -> "Sharding":
        return self

    def __repr__(self) -> str:
        axes = [f"{name}={n}:{p}" for name, n, p in zip(self.mesh.names, self.mesh.shape, self.placements, strict=True)]
        nested = [f"; dim {d} split by {', '.join(self.mesh.names[a] for a in axes)}" for d, axes in self.order]
        return f"({', '.join(axes)}{''.join(nested)})"


class Layout:
    """A sharding, and the global shape, stride and dtype of one tensor; made by Sharding.layout.

    Attributes:
        local_shape: shape of this rank's part; (0,) on a rank outside of the mesh.
    """

    __slots__ = (
        "__weakref__", "_box", "dtype", "local_shape", "mesh", "ndim", "placements", "shape", "sharding", "stride"
    )  # fmt: skip

    def __init__(self, sharding: Sharding, shape: tuple[int, ...], stride: tuple[int, ...], dtype: Any) -> None:
        self.sharding, self.mesh, self.placements = sharding, sharding.mesh, sharding.placements
        self.shape, self.stride, self.dtype, self.ndim = shape, stride, dtype, len(shape)
        if sharding.splits and max(sharding.splits) >= self.ndim:
            dim = max(sharding.splits)
            raise ShardingError(
                f"Shard({dim}) on a tensor of {self.ndim} dims.",
                expected=f"a dim below {self.ndim}" if shape else "no Shard: a scalar has no dims",
                got=repr(sharding),
                where=f"axis {', '.join(self.mesh.names[a] for a in sharding.splits[dim])} of the mesh, shape {shape}",
            )
        for dim in sharding.cuts:
            if not may_nest(shape[dim], cuts := [cut for cut, _ in sharding.levels[dim]]):
                raise ShardingError(
                    "A dim that is split in runs, or in units, has runs of equal length, and whole units.",
                    expected=f"a length that {math.lcm(*[cut.apart for cut in cuts])} divides"
                    + ", and runs within the units of other axes" * (len(cuts) > 1),
                    got=f"length {shape[dim]} of dim {dim}",
                    where=sharding,
                )
        coordinate = self.mesh.coordinate
        self.local_shape = (0,) if coordinate is None else sharding.part(shape, coordinate)
        self._box: Box | None = None

    @property
    def box(self) -> Box | None:
        """Offsets and sizes of this rank's part; None on a rank outside of the mesh. Raises as Sharding.boxes does."""
        if self._box is None and self.mesh.coordinate is not None:
            self._box = self.sharding.box(self.shape, self.mesh.coordinate)
        return self._box

    def to(self, sharding: Sharding) -> "Layout":
        """The same tensor in another sharding."""
        return sharding.layout(self.shape, self.stride, self.dtype)

    def boxes(self) -> list[Box]:
        """The boxes of all ranks, in the order of mesh.ranks."""
        return self.sharding.boxes(self.shape)

    def largest_nbytes(self) -> int:
        """Bytes of the largest part, the same on every rank."""
        return self.nbytes_of(self.sharding.largest(self.shape))

    def nbytes_of(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of another shape."""
        return math.prod(shape) * int(self.dtype.itemsize)

    def __reduce__(self) -> Any:
        return _layout, (self.sharding, self.shape, self.stride, self.dtype)

    def __deepcopy__(self, memo: Any) -> "Layout":
        return self

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} {self.sharding}"


Mesh.layout_type = Layout


def _splits(mesh: Mesh, placements: Placements, order: Order) -> dict[int, tuple[int, ...]]:
    splits: dict[int, tuple[int, ...]] = {}
    for axis, p in enumerate(placements):
        if type(p) is Shard:
            splits[p.dim] = (*splits.get(p.dim, ()), axis)
    for dim, axes in order:
        if sorted(axes) != sorted(splits.get(dim, ())):
            raise ShardingError(
                "An order names each axis that splits the dim once.",
                expected=f"dim {dim} split by the axes {splits.get(dim, ())}",
                got=f"the order {axes}",
                where=f"placements {placements} on the mesh {mesh}",
            )
        splits[dim] = axes
    return dict(sorted(splits.items()))


def _sharding(mesh: Mesh, placements: Placements, order: Order) -> Sharding:
    return mesh.sharding(placements, dict(order))


def _layout(sharding: Sharding, shape: tuple[int, ...], stride: tuple[int, ...], dtype: Any) -> Layout:
    return sharding.layout(shape, stride, dtype)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements (as torch computes them: a dim of length 0 counts as 1)."""
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))
