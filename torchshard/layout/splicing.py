"""Rows of a dim that lie elsewhere in a result: whose rows a slice, a pad, a concatenation or a roll takes.

Results are split by the rule of pieces, as operands are; so who needs which rows of whom follows from lengths alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchshard.layout.pieces import Interval

Pieces = Sequence[Interval]  # of one tensor, those of all ranks


class Run(NamedTuple):
    """Rows of one tensor, evenly spaced, and their places in a result.

    Attributes:
        start, step: the first of its rows, and how far the next is.
        at, apart: the place of the first row, and how far the next is.
        length: how many rows.
        source: which tensor, by its number.
        target: which result.
    """

    start: int
    step: int
    at: int
    apart: int
    length: int
    source: int = 0
    target: int = 0

    def within(self, wanted: Interval) -> "Run":
        """Those rows that have their places in a piece of the result, counted from where that begins."""
        run = self._some(*_numbers(self.at, self.apart, wanted))
        return run._replace(at=run.at - wanted[0])

    def of(self, held: Interval) -> "Run":
        """Those rows that lie in a piece of the tensor, counted from where that begins."""
        run = self._some(*_numbers(self.start, self.step, held))
        return run._replace(start=run.start - held[0])

    def _some(self, first: int, last: int) -> "Run":
        first = max(first, 0)
        length = max(min(last, self.length) - first, 0)
        return self._replace(start=self.start + first * self.step, at=self.at + first * self.apart, length=length)

    def turned(self) -> "Run":
        """The way back."""
        return Run(self.at, self.apart, self.start, self.step, self.length, self.target, self.source)


def _numbers(start: int, step: int, interval: Interval) -> tuple[int, int]:
    """From which number on, and up to which, `start + number * step` lies in an interval."""
    first, last = interval[0] - start, interval[0] + interval[1] - start
    return -(-first // step), -(-last // step)


@dataclass(frozen=True, slots=True)
class Splice:
    """What one rank has to do with the runs of results.

    Attributes:
        here: its place among the ranks that split the dim.
        given: for each of these, the rows of this rank's pieces that it needs.
        taken: from each, the rows that this rank's pieces of the results need.
        apart: whether some rank needs rows of another.
    """

    here: int
    given: Sequence[Sequence[Run]]
    taken: Sequence[Sequence[Run]]
    apart: bool


def splice(
    runs: Sequence[Run], held: Sequence[Sequence[Interval]], wanted: Sequence[Sequence[Interval]], here: int
) -> Splice:
    """Who needs which rows of whom.

    Args:
        runs: of the results; no place is in two of them.
        held: of each tensor.
        wanted: of each result.
        here: the place of this rank.
    """
    places = range(len(wanted[0]))

    def between(giver: int, taker: int) -> list[Run]:
        found = [run.within(wanted[run.target][taker]).of(held[run.source][giver]) for run in runs]
        return [run for run in found if run.length]

    apart = any(counted(run.within(wanted[run.target][k]) for run in runs) != counted(between(k, k)) for k in places)
    return Splice(here, [between(here, k) for k in places], [between(k, here) for k in places], apart)


def counted(runs: Iterable[Run]) -> int:
    """How many rows there are."""
    return sum([run.length for run in runs])
