"""The ways in which a rule lets an operator run on one axis of a mesh: what each makes of operands and results.

On one axis an operator can run with everything whole; with one factor split between the ranks, wherever it occurs; or
on Partial terms, where it is linear in them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchshard.layout.layout import Layout
from torchshard.layout.levels import may_nest
from torchshard.layout.pieces import Symbolic, piece
from torchshard.layout.placements import WHOLE, Cut, Partial, Placement, Placements, R, Shard
from torchshard.layout.reductions import exists_of_nothing, may_mix
from torchshard.rules.bind import Bound
from torchshard.rules.notation import Dim, is_whole
from torchshard.rules.rule import Options

NO_CUTS: Mapping[str, Iterable[Cut]] = {}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run on one axis.

    Attributes:
        operands: what the axis does to each operand.
        results: what it then does to each result.
        factor: the one that is split; None where nothing is.
        cut: what of it is.
        length: of the factor, where it is known.
        even: every rank must hold an equal piece of each run of the factor.
        full: no rank may hold an empty piece of it.
        told: symbolic lengths, whose numbers the placements are for.
    """

    operands: Placements
    results: Placements
    factor: str | None = None
    cut: Cut = WHOLE
    length: int | None = None
    even: bool = False
    full: bool = False
    told: tuple[int, ...] = ()


def ways(
    bound: Bound, options: Options, kinds: Iterable[Partial], cuts: Mapping[str, Iterable[Cut]] = NO_CUTS
) -> Iterator[Way]:
    """All ways to run on one axis.

    Args:
        bound: the rule for these shapes.
        options: what else is true of the operator.
        kinds: the Partials that operands may hold.
        cuts: factor -> how operands may have it cut.
    """
    count, results = len(bound.operands), len(bound.results)
    yield Way((R,) * count, (R,) * results)
    for factor in factors_of(bound):
        for cut in (WHOLE, *sorted(cuts.get(factor, ()))):
            way = _split(bound, options, factor, cut)
            if way is not None:
                yield way
    for partial in dict.fromkeys(kinds):
        for group in _passing(partial, options):
            if max(group) < count:
                operands = tuple([partial if k in group else R for k in range(count)])
                yield Way(operands, (partial,) * results)


def factors_of(bound: Bound) -> Iterable[str]:
    """The factors of the operands that may be split."""
    return dict.fromkeys(f for dims in bound.operands for dim in dims for f in dim if not is_whole(f))


def cuts_of(bound: Bound, layouts: Sequence[Layout]) -> Mapping[str, Iterable[Cut]]:
    """How operands have factors cut: what is left of the runs and units of a dim beside its other factors."""
    found: dict[str, set[Cut]] = {}
    for dims, layout in zip(bound.operands, layouts, strict=True):
        for d in layout.sharding.cuts:
            for place, factor in enumerate(dims[d]):
                slower, faster = _around(bound, dims[d], place)
                if None in slower or any(type(n) is not int for n in faster):
                    continue
                runs, unit = _steps(slower), _steps(faster)
                for cut, _ in layout.sharding.levels[d]:
                    if cut.runs % runs == 0 and cut.unit % unit == 0 and cut != (runs, unit):
                        found.setdefault(factor, set()).add(Cut(cut.runs // runs, cut.unit // unit))
    return found


def _around(bound: Bound, dim: Dim, place: int) -> tuple[list[int | None], list[int | None]]:
    """The lengths of the factors of a dim that are slower than one, and of those that are faster."""
    lengths = [bound.sizes.get(f) for f in dim]
    return lengths[:place], lengths[place + 1 :]


def _split(bound: Bound, options: Options, factor: str, cut: Cut) -> Way | None:
    """The way that splits the middle of one factor; None where some operand or result does not allow it.

    Where other factors of its dim are slower, each of their steps is a run of the dim; those that are faster stay
    together in units. Of lengths that are not known there are none, and pieces have to be equal; so they have in a
    trace that is for all lengths, as nothing tells whether units come out even.
    """
    length = bound.sizes.get(factor)
    asked = type(length) is int or Symbolic.renewed()
    apart = cut.apart
    if isinstance(length, int) and apart > 1 and (length <= apart or length % apart):
        return None  # nothing to split
    lacking = options.reduces.get("..." if factor[0] == "." else factor)
    partial = lacking if isinstance(lacking, Partial) else None
    reduced = not any(factor in dim for dims in bound.results for dim in dims)
    even = False
    operands: list[Placement] = []
    results: list[Placement] = []
    told: list[int] = []
    for side, placements in ((bound.operands, operands), (bound.results, results)):
        for k, dims in enumerate(side):
            at = [d for d, dim in enumerate(dims) if factor in dim]
            if len(at) > 1:
                return None
            if at:
                dim = dims[at[0]]
                slower, faster = _around(bound, dim, dim.index(factor))
                symbolic = [n for n in slower if n is not None and type(n) is not int]
                if None in slower or (symbolic and not Symbolic.renewed()):
                    return None  # a number of runs that is not known
                told += symbolic
                known = not faster or (asked and all(type(n) is int for n in faster))
                even = even or not known
                around = Cut(_steps(slower), _steps(faster) if known else 1)
                placements.append(Shard(at[0], *cut.within(around)))
            elif side is bound.operands:
                placements.append(partial if reduced and partial and k in options.plus else R)
            elif lacking is None:
                return None
            else:
                placements.append(lacking)
    # Terms of an average count alike only where pieces are equal.
    lossy = partial if any(p is partial for p in results) else None
    even = even or (lossy is not None and lossy.op == "avg")
    full = options.full or (lossy is not None and not exists_of_nothing(lossy.op))
    return Way(tuple(operands), tuple(results), factor, cut, length, even, full, tuple(told))


def _steps(lengths: Iterable[int | None]) -> int:
    return math.prod([Symbolic.expected(n or 1) or 1 for n in lengths])


def settle(way: Way) -> None:
    """A way may be gone: a trace is for just those lengths from here on that its numbers of runs are made of."""
    for n in way.told:
        int(n)


def _passing(partial: Partial, options: Options) -> tuple[tuple[int, ...], ...]:
    """Groups of operands that may be Partial in this way while the others are whole."""
    if options.moves:
        return ((0,),)
    if partial.op in ("sum", "avg"):
        return options.linear
    groups = {"max": options.max, "min": options.min}.get(partial.op)
    return groups or (((0,),) if options.mono and groups is not None else ())


Pieces = dict[tuple[str, Cut], list[int]]
"""What axes so far have left of the runs of factors that they split: the lengths of the longest and the shortest."""


def _runs_left(way: Way, pieces: Mapping[tuple[str, Cut], list[int]]) -> list[int]:
    assert way.factor is not None
    left = pieces.get((way.factor, way.cut))
    if left is not None:
        return left
    assert way.length is not None, f"no operand tells the length of {way.factor}"
    return [way.length // way.cut.runs if way.cut.runs > 1 else way.length]


def cut_pieces(pieces: Pieces, way: Way, parts: int) -> None:
    """Note in `pieces` the lengths that a way leaves of the runs of its factor."""
    if way.factor is not None:
        ends = [(n, k) for n in _runs_left(way, pieces) for k in (0, parts - 1)]
        pieces[way.factor, way.cut] = [piece(n, parts, k, way.cut.unit)[1] for n, k in ends]


def lengths_left(way: Way, pieces: Mapping[tuple[str, Cut], list[int]]) -> list[int]:
    """How many a way could split: the longest and the shortest piece, in units; none where it splits nothing."""
    if way.factor is None:
        return []
    runs = _runs_left(way, pieces)
    return [n // way.cut.unit for n in runs] if way.cut.unit > 1 else runs


def is_possible(way: Way, parts: int, pieces: Mapping[tuple[str, Cut], list[int]], chosen: Iterable[Way]) -> bool:
    """Whether lengths, and the ways of the axes before, allow a way."""
    if way.factor is not None:
        assert way.length is not None, f"no operand tells the length of {way.factor}"
        if way.cut.apart > 1 and way.length % way.cut.apart:
            return False
        lengths = lengths_left(way, pieces)
        if way.even and any(n % parts for n in lengths):
            return False
        if way.full and any(piece(n, parts, parts - 1)[1] == 0 for n in lengths):
            return False
    for before in chosen:
        for one, other in zip(before.results + before.operands, way.results + way.operands, strict=True):
            if isinstance(one, Partial) and isinstance(other, Partial) and not may_mix(one.op, other.op):
                return False
            if not (isinstance(one, Shard) and isinstance(other, Shard) and one.dim == other.dim):
                continue
            if one is other:  # axes split the same factor of a dim, cut in the same way
                if before.factor != way.factor:
                    return False
            elif not _lie_apart((before, one), (way, other)):
                return False
    return True


def _lie_apart(*ways: tuple[Way, Shard]) -> bool:
    """Whether axes may split a dim in these ways, other factors of it or one by two cuts: each within the other.

    What is expected of symbolic lengths is so once the ways are settled, which are told each that is slower.
    """
    lengths, cuts = set(), []
    for way, placement in ways:
        cuts.append(Cut(placement.runs, placement.unit))
        lengths.add(Symbolic.expected(way.length or 0) // way.cut.apart * cuts[-1].apart)
    return len(lengths) == 1 and may_nest(lengths.pop(), sorted(cuts))


def padding_of(way: Way, parts: int, pieces: Mapping[tuple[str, Cut], list[int]]) -> float:
    """How much more is sent where a factor is too short for all ranks to have some of it."""
    return max([parts / n for n in map(Symbolic.expected, lengths_left(way, pieces)) if 0 < n < parts], default=1.0)
