"""What is cut out of a dim, and joined along it: the dim is whole, or split within the runs that are cut or joined.

Queries, keys and values lie behind one another in the columns of one layer. Where each of these three runs is split, a
part of the layer's result has a piece of each, and to take one of them out sends nothing, nor does their join, as in
the gradient. Nor does it to take every second column, where gates alternate with what they let through and pairs stay
together.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchshard.layout.layout import Layout
from torchshard.layout.pieces import Symbolic
from torchshard.layout.placements import WHOLE
from torchshard.rules.reducing import letters
from torchshard.rules.rule import Made, Rule, named, options

_RUN = "run"
"""The factor that is split: a dim of which others are whole multiples."""

_STRIDE = "stride"
"""The factor of which a slice takes one item each time."""


def is_all(length: int, start: int | None = None, end: int | None = None, step: int = 1) -> bool:
    """Whether a slice takes all of a dim.

    Whether a symbolic length goes beyond an end that was left open is not asked: the answer would bound the symbol.
    """
    return not start and step == 1 and (end in (None, sys.maxsize) or end >= length)


def _line(ndim: int, dim: int, operands: Iterable[str], results: Iterable[str]) -> str:
    """A line of tensors that differ in one dim only, whose factors these are."""
    names = letters(ndim)
    sides = [[" ".join([*names[:dim], f, *names[dim + 1 :]]) for f in side] for side in (operands, results)]
    return " -> ".join([", ".join(side) for side in sides])


def _unchanged(x: Layout) -> str:
    return f"{' '.join(letters(x.ndim))} -> {' '.join(letters(x.ndim))}"


def _whole(dim: int) -> str:
    """The name of a dim that is whole."""
    return letters(dim + 1, [dim])[dim]


def _runs(factor: str, count: int) -> str:
    """So many runs, behind one another in a dim."""
    return _RUN if count == 1 else f"({factor} {_RUN})"


def _length_of_runs(x: Layout, dim: int) -> int | None:
    """How long the runs are in which a dim is split; None where it is not, or may not be asked for its length."""
    n, runs = x.shape[dim], x.sharding.cuts.get(dim, WHOLE).runs
    return n // runs if runs > 1 and _may_be_asked(n) else None


def _may_be_asked(*lengths: int) -> bool:
    """Whether a rule may depend on these; of symbols it may where a trace is made anew for others.

    Then it has to: another rank may know them as numbers, and ranks have to send the same.
    """
    return all(type(n) is int for n in lengths) or Symbolic.renewed()


def _slice(x: Layout, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> str | Made:
    dim %= x.ndim
    n, run = x.shape[dim], _length_of_runs(x, dim)
    if is_all(n, start, end, step):
        return _unchanged(x)
    if takes_one_of_each(n, start, end, step) and dim in x.sharding.splits:
        line = _line(x.ndim, dim, [f"({_RUN} {_STRIDE})"], [_RUN])
        return Made(line, {_RUN: n // step, _STRIDE: step}, local=lambda f, t, *_: f(t, dim, start, end, step))
    bounds = _bounds(n, start, end, step) if run else None
    if run and bounds and bounds[0] < bounds[1] and bounds[0] % run == 0 and bounds[1] % run == 0:
        return _cut_in_runs(x, dim, run, [bounds], lambda f, t, own: f(t, dim, *own[0]))
    return _line(x.ndim, dim, [_whole(dim)], ["Z"])


def _split(x: Layout, size: int | Sequence[int], dim: int = 0) -> str | Made:
    dim %= x.ndim
    n, run = x.shape[dim], _length_of_runs(x, dim)
    if run:
        sizes = [*size] if isinstance(size, Sequence) else [min(size, n - at) for at in range(0, int(n), int(size))]
        if sum(sizes) == n and all(length > 0 and length % run == 0 for length in sizes):
            bounds = [(sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(len(sizes))]

            def cut(function: Any, part: Any, own: Sequence[tuple[int, int]]) -> Any:
                lengths = [last - first for first, last in own]
                if isinstance(size, Sequence):
                    return function(part, lengths, dim)
                # Of a part without elements one length does not tell how many results there are.
                return function(part, lengths[0], dim) if lengths[0] else [part.narrow(dim, 0, 0) for _ in own]

            return _cut_in_runs(x, dim, run, bounds, cut)
    # The number of results is no symbol, even where the lengths are.
    count = len(size) if isinstance(size, Sequence) else max(1, int(-(-n // max(size, 1))))
    return _line(x.ndim, dim, [_whole(dim)], [f"Z{k}" for k in range(count)])


def _cut_in_runs(x: Layout, dim: int, run: int, bounds: Sequence[tuple[int, int]], cut: Callable[..., Any]) -> Made:
    """Some stretches of a dim, each of whole runs; `cut` takes the operator, a part, and their bounds in that."""
    runs, steps = int(x.shape[dim] // run), [(int(first // run), int(last // run)) for first, last in bounds]
    counts = {f"Z{k}": last - first for k, (first, last) in enumerate(steps)}

    def local(function: Any, part: Any, *_: Any) -> Any:
        own = part.shape[dim] // runs
        return cut(function, part, [(first * own, last * own) for first, last in steps])

    line = _line(x.ndim, dim, [_runs(_whole(dim), runs)], [_runs(name, count) for name, count in counts.items()])
    return Made(line, {_whole(dim): runs, _RUN: run, **counts}, local=local)


def _bounds(n: int, start: int | None, end: int | None, step: int) -> tuple[int, int] | None:
    """Where a slice begins and ends; None where it skips something, or its bounds may not be asked for."""
    given = 0 if start is None else start, n if end in (None, sys.maxsize) else end
    if step != 1 or not _may_be_asked(*given):
        return None
    first, last = [max(min(b + n if b < 0 else b, n), 0) for b in given]
    return first, last


def takes_one_of_each(n: int, start: int | None, end: int | None, step: int) -> bool:
    """Whether a slice takes one item of each `step` neighbours, to the end."""
    first, last = start or 0, n if end in (None, sys.maxsize) else end
    return step > 1 and _may_be_asked(n, first, last) and 0 <= first < step and last >= n > 0 and n % step == 0


def _slice_backward(grad: Layout, size: Sequence[int], dim: int, start: int, end: int, step: int) -> Made:
    dim %= len(size)
    n = size[dim]
    if is_all(n, start, end, step):
        return Made(_unchanged(grad), local_size=1)
    if takes_one_of_each(n, start, end, step) and dim in grad.sharding.splits:

        def apart(function: Any, part: Any, *_: Any) -> Any:
            whole = [*part.shape[:dim], part.shape[dim] * step, *part.shape[dim + 1 :]]
            return function(part, whole, dim, start, sys.maxsize, step)

        line = _line(grad.ndim, dim, [_RUN], [f"({_RUN} {_STRIDE})"])
        return Made(line, {_RUN: n // step, _STRIDE: step}, local=apart)
    run = _length_of_all_runs([grad], dim)
    bounds = _bounds(n, start, end, step) if run else None
    if not run or not bounds or n % run or bounds[0] % run:
        return Made(_line(grad.ndim, dim, [_whole(dim)], ["Z"]), {"Z": n}, local_size=1)
    first, count, runs = [int(length // run) for length in (bounds[0], grad.shape[dim], n)]

    def local(function: Any, part: Any, *_: Any) -> Any:
        own = part.shape[dim] // count
        whole = [*part.shape[:dim], runs * own, *part.shape[dim + 1 :]]
        return function(part, whole, dim, first * own, (first + count) * own, 1)

    line = _line(grad.ndim, dim, [_runs(_whole(dim), count)], [_runs("Z", runs)])
    return Made(line, {_whole(dim): count, _RUN: run, "Z": runs}, local=local)


def _cat(tensors: Sequence[Layout], dim: int = 0) -> Made:
    # torch lets an empty 1-D tensor join anything; such a one has no dims to name.
    ndim = max(t.ndim for t in tensors)
    dim %= max(ndim, 1)
    joined = [t for t in tensors if t.ndim == ndim and ndim]
    linear = {"linear": (tuple(range(len(tensors))),)}
    total = sum([t.shape[dim] for t in joined])
    run = _length_of_all_runs(joined, dim) if len(joined) == len(tensors) else None
    if run:
        counts = {f"W{k}": int(t.shape[dim] // run) for k, t in enumerate(joined)}
        runs = sum(counts.values())
        line = _line(ndim, dim, [_runs(name, count) for name, count in counts.items()], [_runs("Z", runs)])
        return Made(line, {_RUN: run, **counts, "Z": runs}, linear)
    operands, _, result = _line(ndim, dim, [f"W{k}" for k in range(len(tensors))], ["Z"]).partition(" -> ")
    names = [
        f"W{k}" if t.ndim < ndim else name
        for k, (t, name) in enumerate(zip(tensors, operands.split(", "), strict=True))
    ]
    return Made(f"{', '.join(names)} -> {result}", {"Z": total}, linear)


def _length_of_all_runs(tensors: Sequence[Layout], dim: int) -> int | None:
    """How long the runs of a dim are that all of these are made of, each split in its own; None without such runs."""
    split = [t for t in tensors if dim in t.sharding.splits]
    if not split or not _may_be_asked(*[t.shape[dim] for t in tensors]) or any(t.shape[dim] == 0 for t in tensors):
        return None
    run, *others = [t.shape[dim] // t.sharding.cuts.get(dim, WHOLE).runs for t in split]
    return run if all(n == run for n in others) and all(t.shape[dim] % run == 0 for t in tensors) else None


def meet_in_runs(tensors: Sequence[Layout], dim: int, length: int | None = None, start: int = 0) -> bool:
    """Whether all runs of a dim are of one length, so that to join these, or to put the one into a dim of this length
    from a row on, sends nothing by the rule.
    """
    run = _length_of_all_runs(tensors, dim)
    return run is not None and (length is None or (length % run == 0 and start % run == 0))


def _glu(x: Layout, dim: int = -1) -> str | Made:
    dim %= x.ndim
    return _of_halves(x, dim, lambda two, one: _line(x.ndim, dim, [two], [one]))


def _glu_backward(grad: Layout, x: Layout, dim: int) -> str | Made:
    dim %= x.ndim
    return _of_halves(x, dim, lambda two, one: _line(x.ndim, dim, [one, two], [two]))


def _of_halves(x: Layout, dim: int, line: Callable[[str, str], str]) -> str | Made:
    """The rule of an operator that has both halves of a dim meet, of the line for the names of both and of one."""
    run = _length_of_runs(x, dim)
    if run is None or 2 * run != x.shape[dim]:
        return line(_whole(dim), f"Z{_whole(dim)}")
    return Made(line(_runs(_whole(dim), 2), _RUN), {_whole(dim): 2, _RUN: run})


RULES = {
    **named("slice.Tensor slice_copy.Tensor", Rule(_slice, options("moves"))),
    **named("split.Tensor split_copy.Tensor unsafe_split.Tensor", Rule(_split, options("moves"))),
    **named("split_with_sizes split_with_sizes_copy unsafe_split_with_sizes", Rule(_split, options("moves"))),
    **named("slice_backward", Rule(_slice_backward, options("lin=0"))),
    **named("cat", Rule(_cat)),
    **named("glu", Rule(_glu)),
    **named("glu_backward", Rule(_glu_backward, options("lin=0"))),
}
