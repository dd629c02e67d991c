"""What is cut out of a dim, and joined along it: the dim is whole, or split within the runs that are cut or joined.

Queries, keys and values lie behind one another in the columns of one layer. Where each of these three runs is split, a
part of the layer's result has a piece of each, and to take one of them out sends nothing, nor does their join, as in
the gradient.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from torchshard.layout.layout import Layout
from torchshard.layout.placements import WHOLE
from torchshard.rules.reducing import letters
from torchshard.rules.rule import Made, Rule, named, options

_RUN = "run"
"""The factor that is split: a dim of which others are whole multiples."""


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
    """How long the runs are in which a dim is split; None where it is not, or no number tells."""
    n, runs = x.shape[dim], x.sharding.cuts.get(dim, WHOLE).runs
    return n // runs if runs > 1 and type(n) is int else None


def _slice(x: Layout, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> str | Made:
    dim %= x.ndim
    n, run = x.shape[dim], _length_of_runs(x, dim)
    if is_all(n, start, end, step):
        return _unchanged(x)
    bounds = _bounds(n, start, end, step) if run else None
    if run and bounds and bounds[0] < bounds[1] and bounds[0] % run == bounds[1] % run == 0:
        return _cut_in_runs(x, dim, run, [bounds], lambda f, t, own: f(t, dim, *own[0]))
    return _line(x.ndim, dim, [_whole(dim)], ["Z"])


def _split(by_sizes: Callable[..., Any], x: Layout, size: int | Sequence[int], dim: int = 0) -> str | Made:
    # In parts, which may be empty, not even a number of results follows from one size.
    dim %= x.ndim
    n, run = x.shape[dim], _length_of_runs(x, dim)
    if run and (type(size) is int or isinstance(size, Sequence)):
        sizes = [*size] if isinstance(size, Sequence) else [min(size, n - at) for at in range(0, n, size)]
        if sum(sizes) == n and all(length and length % run == 0 for length in sizes):
            bounds = [(sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(len(sizes))]
            return _cut_in_runs(x, dim, run, bounds, lambda _, t, own: by_sizes(t, [b - a for a, b in own], dim))
    # The number of results is no symbol, even where the lengths are.
    count = len(size) if isinstance(size, Sequence) else max(1, int(-(-n // max(size, 1))))
    return _line(x.ndim, dim, [_whole(dim)], [f"Z{k}" for k in range(count)])


def _cut_in_runs(x: Layout, dim: int, run: int, bounds: Sequence[tuple[int, int]], cut: Callable[..., Any]) -> Made:
    """Some stretches of a dim, each of whole runs; `cut` takes the operator, a part, and their bounds in that."""
    runs = x.shape[dim] // run
    counts = {f"Z{k}": (last - first) // run for k, (first, last) in enumerate(bounds)}

    def local(function: Any, part: Any, *_: Any) -> Any:
        own = part.shape[dim] // runs
        return cut(function, part, [(first // run * own, last // run * own) for first, last in bounds])

    line = _line(x.ndim, dim, [_runs(_whole(dim), runs)], [_runs(name, count) for name, count in counts.items()])
    return Made(line, {_whole(dim): runs, _RUN: run, **counts}, local=local)


def _bounds(n: Any, start: Any, end: Any, step: int) -> tuple[int, int] | None:
    """Where a slice begins and ends, if numbers tell, and it skips nothing."""
    if step != 1 or any(b is not None and type(b) is not int for b in (n, start, end)):
        return None
    first, last, _ = slice(start, end).indices(n)
    return first, last


def _slice_backward(grad: Layout, size: Sequence[int], dim: int, start: int, end: int, step: int) -> Made:
    dim %= len(size)
    n, run = size[dim], _length_of_all_runs([grad], dim)
    if is_all(n, start, end, step):
        return Made(_unchanged(grad), local_size=1)
    bounds = _bounds(n, start, end, step) if run else None
    if not run or not bounds or n % run or bounds[0] % run:
        return Made(_line(grad.ndim, dim, [_whole(dim)], ["Z"]), {"Z": n}, local_size=1)
    first, count, runs = bounds[0] // run, grad.shape[dim] // run, n // run

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
        counts = {f"W{k}": t.shape[dim] // run for k, t in enumerate(joined)}
        line = _line(ndim, dim, [_runs(name, count) for name, count in counts.items()], [_runs("Z", total // run)])
        return Made(line, {_RUN: run, **counts, "Z": total // run}, linear)
    operands, _, result = _line(ndim, dim, [f"W{k}" for k in range(len(tensors))], ["Z"]).partition(" -> ")
    names = [
        f"W{k}" if t.ndim < ndim else name
        for k, (t, name) in enumerate(zip(tensors, operands.split(", "), strict=True))
    ]
    return Made(f"{', '.join(names)} -> {result}", {"Z": total}, linear)


def _length_of_all_runs(tensors: Sequence[Layout], dim: int) -> int | None:
    """How long the runs of a dim are that all of these are made of, each split in its own; None without such runs."""
    split = [t for t in tensors if dim in t.sharding.splits]
    if not split or any(type(t.shape[dim]) is not int or not t.shape[dim] for t in tensors):
        return None
    run, *others = {t.shape[dim] // t.sharding.cuts.get(dim, WHOLE).runs for t in split}
    return run if not others and all(t.shape[dim] % run == 0 for t in tensors) else None


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
    **named("split.Tensor split_with_sizes", Rule(partial(_split, torch.split_with_sizes), options("moves"))),
    **named(
        "split_copy.Tensor split_with_sizes_copy", Rule(partial(_split, torch.split_with_sizes_copy), options("moves"))
    ),
    **named(
        "unsafe_split.Tensor unsafe_split_with_sizes",
        Rule(partial(_split, torch.unsafe_split_with_sizes), options("moves")),
    ),
    **named("slice_backward", Rule(_slice_backward, options("lin=0"))),
    **named("cat", Rule(_cat)),
    **named("glu", Rule(_glu)),
    **named("glu_backward", Rule(_glu_backward, options("lin=0"))),
}
