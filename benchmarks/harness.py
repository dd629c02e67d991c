"""Comparisons that hold on a noisy machine: two sides take turns in one run; what counts is the ratio of each round."""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tabulate import tabulate

_Side = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out: medians in seconds, the median ratio ours / theirs of the rounds, and its 95 % interval."""

    name: str
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float


def compare(name: str, rounds: Sequence[tuple[float, float]]) -> Comparison:
    """Rounds of (ours, theirs) in seconds to one Comparison.

    The interval is that of the median by order statistics (binomial, normal approximation), which assumes no shape.
    """
    ratios = sorted(a / b for a, b in rounds)
    n = len(ratios)
    reach = 0.98 * math.sqrt(n)  # 1.96 standard deviations of a binomial(n, 1/2)
    low, high = math.floor((n - 1) / 2 - reach), math.ceil((n - 1) / 2 + reach)
    ours, theirs = zip(*rounds, strict=True)
    return Comparison(
        name,
        statistics.median(ours),
        statistics.median(theirs),
        statistics.median(ratios),
        ratios[max(low, 0)],
        ratios[min(high, n - 1)],
    )


def interleaved(
    name: str,
    ours: _Side,
    theirs: _Side,
    *,
    rounds: int = 15,
    seconds: float = 0.004,
    clock: Callable[[], float] = time.process_time,
) -> Comparison:
    """Time two callables in turns, each long enough that the clock can tell, and compare.

    Args:
        name: of the row.
        ours: the one side, warmed up here.
        theirs: the other side.
        rounds: how often each side has its turn.
        seconds: about how long a turn lasts.
        clock: process_time for work on the CPU, perf_counter where waiting counts.
    """
    for side in (ours, theirs):
        for _ in range(10):
            side()
    start = clock()
    for _ in range(10):
        theirs()
    repeat = max(3, int(seconds / max((clock() - start) / 10, 1e-9)))

    def alone(side: _Side) -> float:
        start = clock()
        for _ in range(repeat):
            side()
        return (clock() - start) / repeat

    return compare(name, in_turns(ours, theirs, rounds, alone))


def in_turns(ours: _Side, theirs: _Side, rounds: int, take: Callable[[_Side], float]) -> list[tuple[float, float]]:
    """What `take` says of either side in each round; who goes first changes from round to round."""
    found = []
    for number in range(rounds):
        order = (ours, theirs) if number % 2 else (theirs, ours)
        first, second = (take(side) for side in order)
        found.append((first, second) if number % 2 else (second, first))
    return found


def rounds_on_ranks(ours: _Side, theirs: _Side, rounds: int, seconds: float) -> list[tuple[float, float]]:
    """Seconds that a call of either side took in each round, in wall time; called on all ranks of the default group.

    Args:
        ours, theirs: the two sides, warmed up before.
        rounds: how often each side has its turn.
        seconds: about how long a turn lasts.
    """
    repeat = torch.tensor(max(2, int(seconds / turn(theirs, 5))))
    dist.broadcast(repeat, 0)
    return in_turns(ours, theirs, rounds, lambda side: turn(side, int(repeat)))


def turn(side: _Side, repeat: int = 1) -> float:
    """Seconds a call, from a moment at which all ranks are ready."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        side()
    return (time.perf_counter() - start) / repeat


def cpu_seconds() -> float:
    """CPU time of this process until now, and of those that it has started and waited for."""
    return sum(os.times()[:4])


def geometric_mean(comparisons: Iterable[Comparison]) -> float:
    """Geometric mean of the ratios."""
    return math.exp(statistics.fmean(math.log(c.ratio) for c in comparisons))


def table(comparisons: Sequence[Comparison], unit: str = "us", theirs: str = "torch") -> str:
    """The comparisons as text; unit "us" or "ms"; `theirs` is the name of the other side."""
    scale = {"us": 1e6, "ms": 1e3}[unit]
    rows = [(c.name, c.ours * scale, c.theirs * scale, c.ratio, f"{c.low:.2f} .. {c.high:.2f}") for c in comparisons]
    headers = ["case", f"torchshard {unit}", f"{theirs} {unit}", "ratio", "95 % of the ratio"]
    return str(tabulate(rows, headers, tablefmt="github", floatfmt=(None, ".1f", ".1f", ".2f")))
