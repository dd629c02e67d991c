"""How one sharding becomes another: the cheapest sequence of collectives, with the bytes and memory of each.

A shortest path (Dijkstra). Nodes are shardings; edges are the collectives below, on one axis unless said otherwise.
p is the size of the axis, m the bytes of the largest part involved; every number is that of the largest part, never of
one rank, because all ranks must find the same path.

    all_gather      Shard -> Replicate      one or more axes, last in their dim's order  receives (p - 1) m
    slice           Replicate -> Shard      appended last to the order; says nothing     0
    all_to_all      Shard(a) -> Shard(b)    last in a's order, appended last to b's      (p - 1) m of the blocks
    all_reduce      Partial -> Replicate    several axes at once where it is cheaper     2 (p - 1) m of the p pieces
    reduce_scatter  Partial -> Shard        one or more axes, appended last to the order (p - 1) m of the p pieces
    exchange        any -> any with equal Partial axes, over all axes concerned          what a rank lacks
    mask            Replicate -> Partial    keeps the value on coordinate 0, or on all   0

Between two shardings that both split the tensor, where nothing is Partial, no way is taken on which a rank would hold
more than twice the larger of its two parts beside the one that it starts from, unless there is no other.

The byte counts of gather, scatter and reduction are those of ring algorithms, which no algorithm beats. An exchange
counts as two launches: its blocks are irregular and have to be packed and unpacked, so a regular collective is better.
Of ways that cost the same, one gathers along later dims first: pieces along dim 0 already lie as they should where they
arrive, and the last gather is the largest.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torchshard.errors import ShardingError
from torchshard.layout.copies import Copies, most_given
from torchshard.layout.cost import DEFAULT_LINK, Link, slowest
from torchshard.layout.layout import Mesh, Sharding
from torchshard.layout.pieces import largest_piece
from torchshard.layout.placements import Partial, R, Shard
from torchshard.layout.reductions import masking, may_mix

Kind = Literal["all_gather", "slice", "all_to_all", "all_reduce", "reduce_scatter", "exchange", "mask"]

_PER_DIM = 1e-9  # of a gather's cost: decides between equal ones, and nothing else

MAX_CACHED = 4096  # transitions kept a mesh; when full, all are dropped (they are cheap to find again)


@dataclass(frozen=True, slots=True)
class Step:
    """One collective.

    Attributes:
        kind: which.
        axes: the axes of the mesh over which it runs.
        before: the sharding that it starts from.
        after: the sharding that it leads to.
        nbytes: bytes that a rank receives at most.
        rounds: messages that follow one another on a ring.
        peak: bytes that a rank holds at most while it runs: its input, its output and what is on the wire.
    """

    kind: Kind
    axes: tuple[int, ...]
    before: Sharding
    after: Sharding
    nbytes: int
    rounds: int
    peak: int

    def seconds(self, links: Sequence[Link]) -> float:
        """Time by the cost model, with one link an axis."""
        exchanges = 2 if self.nbytes else 0  # nothing is sent where every rank has what it shall hold
        launches = exchanges if self.kind == "exchange" else 1 if self.rounds else 0
        return slowest([links[a] for a in self.axes]).seconds(launches, self.rounds, self.nbytes)

    @property
    def op(self) -> str:
        """The reduction that it carries out."""
        placement = self.before.placements[self.axes[0]]
        assert isinstance(placement, Partial), f"{self} reduces nothing"
        return placement.op

    def dim(self, sharding: Sharding) -> int:
        """The dim that its axes split in `sharding`, which is that before or after it."""
        placement = sharding.placements[self.axes[0]]
        assert isinstance(placement, Shard), f"{self} splits nothing"
        return placement.dim

    def copies(self, shape: tuple[int, ...]) -> Copies:
        """Who gives what to whom, for an exchange."""
        assert self.kind == "exchange", f"copies of {self.kind}"
        return Copies(self.before, self.after, shape)

    def __repr__(self) -> str:
        over = " x ".join(self.before.mesh.names[a] for a in self.axes)
        return f"{self.kind}({over}) {self.before.placements} -> {self.after.placements}, {self.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class Transition:
    """The steps from one sharding to another, for a tensor of one shape and item size."""

    source: Sharding
    target: Sharding
    shape: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that a rank receives at most, in all steps together."""
        return sum(step.nbytes for step in self.steps)

    @property
    def peak(self) -> int:
        """Bytes that a rank holds at most at any time; 0 where nothing is to be done."""
        return max((step.peak for step in self.steps), default=0)

    def seconds(self, links: Sequence[Link]) -> float:
        """Time by the cost model, with one link an axis."""
        return sum(step.seconds(links) for step in self.steps)


def transition(
    source: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    itemsize: int,
    *,
    links: tuple[Link, ...] | None = None,
    limit: int | None = None,
    regular: bool = False,
) -> Transition:
    """The cheapest way from `source` to `target`, two shardings of one mesh.

    Args:
        source: what the tensor is.
        target: what it shall be.
        shape: its global shape.
        itemsize: bytes of one element.
        links: cost constants, one an axis.
        limit: bytes that a rank may hold at most while it happens.
        regular: without exchanges, which look different on every rank. A compiler that rearranges a graph would
            rearrange them differently, and ranks would wait for each other.

    Returns:
        The steps; none where source is target. The same on every rank.

    Raises:
        ShardingError: a reduction that cannot be undone (Replicate to Partial product), or no way within `limit`.
    """
    mesh = source.mesh
    assert target.mesh is mesh, "between two meshes: see passages.py"
    key = source, target, shape, itemsize, links, limit, regular
    try:
        found = mesh.transitions.get(key)
    except TypeError:  # symbolic sizes
        return Transition(source, target, shape, _search(source, target, shape, itemsize, links, limit, regular))
    if found is None:
        if len(mesh.transitions) >= MAX_CACHED:
            mesh.transitions.clear()
        found = Transition(source, target, shape, _search(source, target, shape, itemsize, links, limit, regular))
        mesh.transitions[key] = found
    return found


def _search(
    source: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    itemsize: int,
    links: tuple[Link, ...] | None,
    limit: int | None,
    regular: bool,
) -> tuple[Step, ...]:
    if source is target:
        return ()
    links = links or (DEFAULT_LINK,) * source.mesh.ndim
    sizes = _Sizes(source.mesh, shape, itemsize, {})
    if limit is None and source.splits and target.splits and not source.partial and not regular:
        modest = _dijkstra(source, target, sizes, links, limit, _roof(source, target, sizes), regular)
        if modest is not None:
            return modest
    found = _dijkstra(source, target, sizes, links, limit, None, regular)
    assert found is not None, "a search without a roof finds a way, or raises"
    return found


def _roof(source: Sharding, target: Sharding, sizes: "_Sizes") -> int:
    """Bytes that a rank may hold beside its part of the source: twice its larger part, and a little for odd lengths."""
    larger = max(sizes.part(source), sizes.part(target))
    return 2 * larger + larger // 64


def _dijkstra(
    source: Sharding,
    target: Sharding,
    sizes: "_Sizes",
    links: tuple[Link, ...],
    limit: int | None,
    roof: int | None,
    regular: bool,
) -> tuple[Step, ...] | None:
    """The cheapest path whose steps stay within `limit` and `roof`; None if only `roof` stands in the way."""
    axes = _axes_concerned(source, target)
    counter = itertools.count()
    queue: list[tuple[float, int, int, Sharding, tuple[Step, ...]]] = [(0.0, 0, next(counter), source, ())]
    settled: set[Sharding] = set()
    over_limit: list[int] = []
    over_roof = False
    bound = math.inf  # of the best whole path so far: no dearer beginning is followed
    least = min(link.seconds(1, 1, 0) for link in links)
    while queue:
        cost, length, _, here, path = heapq.heappop(queue)
        if here is target:
            return path
        if here in settled:
            continue
        settled.add(here)
        for step in _edges(here, target, axes, sizes, not regular and _only_reduced(source, here)):
            if step.after in settled:
                continue
            if limit is not None and step.peak > limit:
                over_limit.append(step.peak)
                continue
            beside = step.peak - (sizes.part(source) if here is source else 0)
            if roof is not None and beside > roof and not (here is source and step.after is target):
                over_roof = True
                continue
            seconds = step.seconds(links)
            total = cost + (seconds * (1 + _PER_DIM * step.dim(here)) if step.kind == "all_gather" else seconds)
            if step.after is target:
                bound = min(bound, total)
            if total + (0.0 if _only_local(step.after, target) else least) <= bound:
                heapq.heappush(queue, (total, length + 1, next(counter), step.after, (*path, step)))
    if over_roof:
        return None
    if over_limit:
        raise ShardingError(
            f"No way from {source} to {target} stays within the memory limit.",
            expected=f"at most {limit} bytes a rank, for shape {sizes.shape}",
            got=f"the next collective would need {min(over_limit)} bytes",
            fix=f"limit={min(over_limit)}, or go through an intermediate layout of your choice",
        )
    raise ShardingError(
        f"There is no way from {source} to {target}.",
        expected="a target that is Partial only where the source is, or in sum, avg, max or min",
        got=f"placements {target.placements}",
        fix="redistribute to Replicate() or Shard(dim) instead",
    )


def _axes_concerned(source: Sharding, target: Sharding) -> tuple[int, ...]:
    """Axes whose placement differs, or which split a dim whose order differs: no other is ever touched."""
    axes = {a for a in range(source.mesh.ndim) if source.placements[a] is not target.placements[a]}
    for dim in {*source.splits, *target.splits}:
        before, after = source.splits.get(dim, ()), target.splits.get(dim, ())
        if before != after:
            axes.update(before, after)
    return tuple(sorted(axes))


def _only_local(here: Sharding, target: Sharding) -> bool:
    """Whether slices and masks may be all that is left to do (False: some communication is for certain)."""
    return all(now is wanted or now is R for now, wanted in zip(here.placements, target.placements, strict=True))


def _only_reduced(source: Sharding, here: Sharding) -> bool:
    """Whether nothing has happened yet but reductions."""
    return all(
        now is before or isinstance(before, Partial)
        for now, before in zip(here.placements, source.placements, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of the largest parts of one tensor."""

    mesh: Mesh
    shape: tuple[int, ...]
    itemsize: int
    known: dict[Sharding, int]

    def part(self, sharding: Sharding) -> int:
        nbytes = self.known.get(sharding)
        if nbytes is None:
            nbytes = self.known[sharding] = math.prod(sharding.largest(self.shape)) * self.itemsize
        return nbytes

    def group(self, axes: Sequence[int]) -> int:
        return math.prod([self.mesh.shape[a] for a in axes])


def _edges(
    here: Sharding, target: Sharding, axes: tuple[int, ...], sizes: _Sizes, may_exchange: bool
) -> Iterator[Step]:
    """What may follow: each axis goes from what it is to Replicate, or straight to what it shall be."""
    part = sizes.part(here)
    if may_exchange:  # it does all at once: never of use after a step that it would contain
        exchanged = _exchanged(here, target)
        if exchanged is not here:
            yield _exchange(here, exchanged, part, sizes)
    for axis in axes:
        now, wanted = here.placements[axis], target.placements[axis]
        if isinstance(now, Shard):
            order = here.splits[now.dim]
            yield _all_gather(here, order[order.index(axis) :], part, sizes)
            if isinstance(wanted, Shard) and wanted is not now and order[-1] == axis:
                yield _all_to_all(here, axis, wanted.dim, part, sizes)
        elif isinstance(now, Partial):
            yield _all_reduce(here, (axis,), part, sizes)
            if isinstance(wanted, Shard):
                yield _reduce_scatter(here, (axis,), wanted.dim, part, sizes)
        elif isinstance(wanted, Shard):
            after = here.replace(axis, wanted)
            yield Step("slice", (axis,), here, after, 0, 0, part + sizes.part(after))
        elif isinstance(wanted, Partial) and masking(wanted.op) and _mixes(here, wanted):
            yield Step("mask", (axis,), here, here.replace(axis, wanted), 0, 0, 2 * part)
    yield from _fused(here, target, axes, part, sizes)


def _all_gather(here: Sharding, axes: tuple[int, ...], part: int, sizes: _Sizes) -> Step:
    p, after = sizes.group(axes), here
    for axis in axes:
        after = after.replace(axis, R)
    return Step("all_gather", axes, here, after, (p - 1) * part, p - 1, (p + 1) * part + sizes.part(after))


def _all_to_all(here: Sharding, axis: int, dim: int, part: int, sizes: _Sizes) -> Step:
    p, after = sizes.mesh.shape[axis], here.replace(axis, Shard(dim))
    local = here.largest(sizes.shape)
    block = part // local[dim] * largest_piece(local[dim], [p]) if local[dim] else 0
    peak = part + p * block + max(p * block, sizes.part(after))  # packed and received, then received and joined
    return Step("all_to_all", (axis,), here, after, (p - 1) * block, p - 1, peak)


def _reduce_scatter(here: Sharding, axes: tuple[int, ...], dim: int, part: int, sizes: _Sizes) -> Step:
    p, after = sizes.group(axes), here
    for axis in axes:
        after = after.replace(axis, Shard(dim))
    piece = sizes.part(after)
    return Step("reduce_scatter", axes, here, after, (p - 1) * piece, p - 1, part + (p + 1) * piece)


def _all_reduce(here: Sharding, axes: tuple[int, ...], part: int, sizes: _Sizes) -> Step:
    p, after = sizes.group(axes), here
    for axis in axes:
        after = after.replace(axis, R)
    piece = -(-part // (p * sizes.itemsize)) * sizes.itemsize
    return Step("all_reduce", axes, here, after, 2 * (p - 1) * piece, 2 * (p - 1), 2 * part)


def _fused(here: Sharding, target: Sharding, axes: Sequence[int], part: int, sizes: _Sizes) -> Iterator[Step]:
    """One collective for all axes that reduce alike: all-reduces after another would carry the whole tensor twice."""
    alike: dict[Partial, list[int]] = {}
    for axis in axes:
        if isinstance(now := here.placements[axis], Partial):
            alike.setdefault(now, []).append(axis)
    for reduced in alike.values():
        if len(reduced) > 1:
            yield _all_reduce(here, tuple(reduced), part, sizes)
        for dim, order in target.splits.items():
            if len(together := tuple([a for a in order if a in reduced])) > 1:
                yield _reduce_scatter(here, together, dim, part, sizes)


def _mixes(here: Sharding, wanted: Partial) -> bool:
    return all(may_mix(wanted.op, p.op) for p in here.placements if isinstance(p, Partial))


def exchange(source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> Transition:
    """An exchange that leads as near to the target as one can; the parts of both are boxes, in units or not."""
    sizes, after = _Sizes(source.mesh, shape, itemsize, {}), _exchanged(source, target)
    return Transition(source, after, shape, (_exchange(source, after, sizes.part(source), sizes),))


def _exchanged(here: Sharding, target: Sharding) -> Sharding:
    """The sharding nearest to the target that has the Partial axes of `here`."""
    placements, kept = [], {}
    for now, wanted in zip(here.placements, target.placements, strict=True):
        placements.append(now if isinstance(now, Partial) else R if isinstance(wanted, Partial) else wanted)
    for dim, axes in target.splits.items():
        kept[dim] = tuple([a for a in axes if isinstance(placements[a], Shard)])
    return here.mesh.sharding(placements, {dim: axes for dim, axes in kept.items() if axes})


def _exchange(here: Sharding, after: Sharding, part: int, sizes: _Sizes) -> Step:
    changed = [d for d in {*here.splits, *after.splits} if _split(here, d) != _split(after, d)]
    axes = tuple(sorted({a for d in changed for a in (*here.splits.get(d, ()), *after.splits.get(d, ()))}))
    lacks = Copies(here, after, sizes.shape).most_lacked(axes) * sizes.itemsize
    gives = most_given(here, after, part) if lacks else 0
    peak = part + lacks + max(gives, sizes.part(after))  # cut and packed, packed and received, received and put
    return Step("exchange", axes, here, after, lacks, sizes.group(axes) - 1, peak)


def _split(sharding: Sharding, dim: int) -> tuple[object, ...]:
    return sharding.splits.get(dim), sharding.cuts.get(dim)
