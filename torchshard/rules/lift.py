"""From a rule to a decision: each axis of the mesh on its own, the cheapest way to run the operator there.

Of the ways that ways.py knows, the price is what it costs to bring the operands there; a way without communication is
always taken; beyond that, what results will cost later counts too. Axes are decided one after another, so
the work grows with their number, not exponentially; what an axis splits is smaller for the next. All numbers are those
of the largest pieces: every rank decides the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchshard.layout.cost import DEFAULT_LINK
from torchshard.layout.cuts import is_as
from torchshard.layout.layout import Layout, Mesh, Sharding
from torchshard.layout.pieces import Symbolic
from torchshard.layout.placements import Partial, Placement, R, Shard
from torchshard.layout.reductions import masking
from torchshard.rules.bind import Bound
from torchshard.rules.notation import Operand
from torchshard.rules.rule import Options
from torchshard.rules.ways import Pieces, Way, cut_pieces, cuts_of, is_possible, lengths_left, padding_of, settle, ways

_LAUNCH = 20_000.0  # bytes that a link carries in the time that starting a collective takes
_COPY = 1.0  # a slice: next to nothing, but not nothing
# Statistics of rows, scattered though no operand asks for it, are gathered soon: a launch more, by layout/cost.py.
_SCATTERED = DEFAULT_LINK.launch * DEFAULT_LINK.bandwidth


@dataclass(frozen=True, slots=True)
class Lifted:
    """How to run an operator: the sharding that each operand must have, and that each result will have."""

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]


def lift(bound: Bound, options: Options, layouts: Sequence[Layout], fixed: Mapping[int, int | None]) -> Lifted | None:
    """Decide how to run.

    Args:
        bound: the rule for these shapes.
        options: what else is true of the operator.
        layouts: of the operands, all on one mesh.
        fixed: operands that cannot be moved; to each the result that it becomes (an operand written in place), or None:
            a plain scalar, which may yet be terms beside one that is written to, as that cannot be reduced first.

    Returns:
        None where the operands that cannot be moved leave no way.
    """
    mesh = layouts[0].mesh
    kinds = [p for layout in layouts for p in layout.placements if isinstance(p, Partial)]
    possible = list(ways(bound, options, kinds, cuts_of(bound, layouts)))
    if any(layout.sharding.cuts for layout in layouts):  # their runs are compared with those of all ways
        for way in possible:
            settle(way)
    if options.like and len(possible) == 1:  # results that share no dim with the operands, of which nothing is read
        return Lifted(tuple([o.sharding for o in layouts]), (mesh.replicated(),) * len(bound.results))
    nbytes = [layout.largest_nbytes() for layout in layouts]
    nbytes += [layouts[0].nbytes_of(bound.known_shape(k)) for k in range(len(bound.results))]
    estimate = [float(Symbolic.expected(n)) for n in nbytes]
    pieces: Pieces = {}
    chosen: dict[int, Way] = {}
    for axis in sorted(range(mesh.ndim), key=lambda a: mesh.shape[a] == 1):  # one rank goes along with any way
        parts, ranked = mesh.shape[axis], []
        for at, way in enumerate(possible):
            price = _price(way, axis, parts, layouts, estimate, fixed, options, padding_of(way, parts, pieces))
            if price < math.inf:
                # What runs where it lies is taken: users place tensors to have it so.
                # Where all have to move, a trace is not tied to its lengths for the sake of a cheaper way.
                cost = price + _later(way, layouts, axis, parts, estimate)
                ranked.append(((1 + bool(way.told)) if price >= _LAUNCH else 0, cost, at))
        ranked.sort()
        # Lengths are asked about last, and no more than it takes: those of a trace are guarded then.
        before = chosen.values()
        first = next((k for k, (*_, at) in enumerate(ranked) if is_possible(possible[at], parts, pieces, before)), None)
        if first is None:
            return None
        launches, _, at = ranked[first]
        best = possible[at]
        settle(best)
        chosen[axis] = best
        if any(type(n) is not int for n in nbytes):
            dearer = [possible[other] for also, _, other in ranked[first + 1 :] if also == launches]
            Symbolic.asked(_ask_whether_cheapest, best, dearer, axis, parts, layouts, nbytes, fixed, options, pieces)
        cut_pieces(pieces, best, parts)
    return _assembled(mesh, bound, [chosen[axis] for axis in range(mesh.ndim)], layouts, fixed, options)


def take(bound: Bound, chosen: Sequence[Way], layouts: Sequence[Layout]) -> Lifted | None:
    """What operands and results are where each axis runs in the way given for it, whatever that costs.

    Args:
        bound: the rule for these shapes.
        chosen: one way an axis.
        layouts: of the operands; what nests several axes that split one dim.

    Returns:
        None where the lengths, or Partials that do not mix, forbid it.
    """
    mesh = layouts[0].mesh
    pieces: Pieces = {}
    for axis, (way, parts) in enumerate(zip(chosen, mesh.shape, strict=True)):
        if not is_possible(way, parts, pieces, chosen[:axis]):
            return None
        cut_pieces(pieces, way, parts)
    return _assembled(mesh, bound, chosen, layouts, {}, Options())


def _price(
    way: Way,
    axis: int,
    parts: int,
    layouts: Sequence[Layout],
    nbytes: Sequence[float],
    fixed: Mapping[int, int | None],
    options: Options,
    padding: float,
) -> float:
    """What it costs to bring the operands there; their sizes come first, then those of results."""
    price = 0.0
    for k, layout in enumerate(layouts):
        now, wanted = layout.placements[axis], way.operands[k]
        if isinstance(now, Partial) and _needs_no_terms(options, k):
            now = R
        if options.exact and isinstance(now, Partial) and isinstance(wanted, Shard):
            return math.inf
        if k in fixed and not _may_be_terms(k, wanted, fixed):
            becomes = fixed[k]
            if not _is_as(now, wanted, layout):
                return math.inf
            if becomes is not None and not _is_as(now, way.results[becomes], layout):
                return math.inf
        elif not _is_as(now, wanted, layout):
            price += _move(now, wanted, nbytes[k], parts, padding)
    return price


def _may_be_terms(k: int, wanted: Placement, fixed: Mapping[int, int | None]) -> bool:
    """Whether operand k is a plain scalar that terms are made of, for an operand that is written to."""
    return fixed[k] is None and isinstance(wanted, Partial) and any(becomes is not None for becomes in fixed.values())


def _is_as(now: Placement, wanted: Placement, layout: Layout) -> bool:
    """Whether an operand is as it is wanted."""
    if now is wanted:
        return True
    if not (isinstance(now, Shard) and isinstance(wanted, Shard) and now.dim == wanted.dim):
        return False
    if len(layout.sharding.levels[now.dim]) > 1:
        return False  # each cut has a way of its own
    sizes = [layout.mesh.shape[a] for a in layout.sharding.splits[now.dim]]
    return is_as(now, wanted, layout.shape[now.dim], sizes)


def _needs_no_terms(options: Options, k: int) -> bool:
    """Whether nothing is read of operand k that its terms, or their sum, would tell: so it need not be reduced."""
    return options.like or k in options.unread


def _move(now: Placement, wanted: Placement, nbytes: float, parts: int, padding: float) -> float:
    if isinstance(wanted, Partial):
        return 2 * _COPY if now is R and masking(wanted.op) else math.inf
    if now is R:
        return _COPY
    share = nbytes * (parts - 1) / parts
    if isinstance(now, Partial):
        return _LAUNCH + share * (padding if isinstance(wanted, Shard) else 2)
    if isinstance(now, Shard) and isinstance(wanted, Shard) and now.dim != wanted.dim:
        return _LAUNCH + share * padding
    return _LAUNCH + nbytes * (parts - 1) + (_COPY if isinstance(wanted, Shard) else 0)


def _later(way: Way, layouts: Sequence[Layout], axis: int, parts: int, nbytes: Sequence[float]) -> float:
    """What results will cost: a new Partial when it is reduced (scattered, at best); what a reduction has left a dim of
    length 1 of, and is split for no operand's sake, when it meets what it was made of, which is split otherwise.
    """
    terms = [layout for layout in layouts if isinstance(layout.placements[axis], Partial)]
    if terms:
        alone = way.factor is not None and not any(isinstance(layout.placements[axis], Shard) for layout in layouts)
        return _SCATTERED if alone and any(type(n) is int and n == 1 for x in terms for n in x.shape) else 0.0
    sizes = zip(way.results, nbytes[len(layouts) :], strict=True)
    return sum([n * (parts - 1) / parts for p, n in sizes if isinstance(p, Partial)])


def _ask_whether_cheapest(
    best: Way,
    others: Sequence[Way],
    axis: int,
    parts: int,
    layouts: Sequence[Layout],
    nbytes: Sequence[int],
    fixed: Mapping[int, int | None],
    options: Options,
    pieces: Pieces,
) -> None:
    """Ask of symbolic lengths what the choice depends on: a trace is guarded by it, and is made anew where it turns.

    Costs are sums of a number and multiples of sizes, and multiples of 1 / parts, as long as padding is what it is.
    """
    known = [0.0 if type(n) is not int else float(n) for n in nbytes]
    expected = [float(Symbolic.expected(n)) for n in nbytes]
    symbolic = [k for k, n in enumerate(nbytes) if type(n) is not int]

    def cost(way: Way, sizes: Sequence[float], padding: float) -> int:
        price = _price(way, axis, parts, layouts, sizes, fixed, options, padding)
        return round(parts * (price + _later(way, layouts, axis, parts, sizes)))

    def terms(way: Way) -> list[int]:
        padding = padding_of(way, parts, pieces)
        start = cost(way, known, padding)
        found = [start, *[cost(way, [*known[:k], 1.0, *known[k + 1 :]], padding) - start for k in symbolic]]
        if (way is best or padding > 1) and cost(way, expected, 1.0) != cost(way, expected, 2.0):
            for n in lengths_left(way, pieces):
                bool(n >= parts) if Symbolic.expected(n) >= parts else int(n)
        return found

    of_best = terms(best)
    for more in dict.fromkeys(
        tuple([other - own for other, own in zip(terms(way), of_best, strict=True)]) for way in others
    ):
        if min(more) < 0:
            bool(more[0] + sum([m * nbytes[k] for m, k in zip(more[1:], symbolic, strict=True) if m]) >= 0)


def _assembled(
    mesh: Mesh,
    bound: Bound,
    chosen: Sequence[Way],
    layouts: Sequence[Layout],
    fixed: Mapping[int, int | None],
    options: Options,
) -> Lifted | None:
    orders = _orders(bound, chosen, layouts, fixed)
    operands, results = [], []
    for k, layout in enumerate(layouts):
        placements = [way.operands[k] for way in chosen]
        if _needs_no_terms(options, k):
            placements = [
                p if isinstance(p, Partial) else w for p, w in zip(layout.placements, placements, strict=True)
            ]
        wanted = mesh.sharding(placements, _by_dim(bound.operands[k], placements, orders))
        operands.append(wanted.evened(layout.shape))
        if fixed.get(k) is not None and operands[-1] is not layout.sharding:
            return None  # the same placements in another order
    for k, dims in enumerate(bound.results):
        placements = [way.results[k] for way in chosen]
        results.append(mesh.sharding(placements, _by_dim(dims, placements, orders)))
    for k, becomes in fixed.items():
        if becomes is not None and results[becomes].evened(layouts[k].shape) is not layouts[k].sharding:
            return None
    return Lifted(tuple(operands), tuple(results))


def _orders(
    bound: Bound, chosen: Sequence[Way], layouts: Sequence[Layout], fixed: Mapping[int, int | None]
) -> dict[str, tuple[int, ...]]:
    """Factor -> its axes, the first to split first: as an operand has them, above all one that cannot move."""
    axes: dict[str, tuple[int, ...]] = {}
    for axis, way in enumerate(chosen):
        if way.factor is not None:
            axes[way.factor] = (*axes.get(way.factor, ()), axis)
    nested = {factor: split for factor, split in axes.items() if len(split) > 1}
    if nested:
        ranked = sorted(range(len(layouts)), key=lambda k: (k not in fixed, -layouts[k].largest_nbytes()))
        for factor, split in nested.items():
            for k in ranked:
                dim = next((d for d, factors in enumerate(bound.operands[k]) if factor in factors), None)
                have = layouts[k].sharding.splits.get(dim, ()) if dim is not None else ()
                if sorted(have) == list(split):
                    axes[factor] = have
                    break
    return axes


def _by_dim(
    dims: Operand, placements: Sequence[Placement], orders: Mapping[str, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    split = {p.dim for p in placements if isinstance(p, Shard)}
    return {
        dim: tuple([a for f in dims[dim] for a in orders.get(f, ()) if _splits(placements[a], dim)]) for dim in split
    }


def _splits(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard) and placement.dim == dim
