"""What ranks of one machine bring to a collective, said or left in reach of the others, who read it where it lies.

What is short goes with a word (words.py). Of what is longer only the address does: the others read it
(neighbours.py), and say that they have. A reduction is made in the order of the ranks, wherever it is made, so that all
ranks end with the same bits.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchshard.comm.neighbours import read
from torchshard.comm.terms import Term, require_same, segments
from torchshard.comm.words import NOTHING, Bytes, Word, Words

SAID = 96 * 1024
"""Bytes that a rank says at most, to all others together; each message has to fit into a socket, whole."""

WHOLE = 512 * 1024
"""Bytes of all others up to which each rank reduces all of a tensor: that saves a turn."""

_READ = 128 * 1024
"""Elements that are read at a time to be reduced: they stay in the cache until they are."""

_REDUCED = 32 * 1024
"""Elements that are reduced at a time: torch does not take more threads for so few."""

_INTO: Mapping[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

_DONE = Word((0, 0, 0)), NOTHING


class Reach:
    """The ranks of a group that speak to, and read, one another. All of them take part in whatever is made.

    Args:
        rank: this one.
        pids: of all ranks.
        words: between them.

    Attributes:
        rank, ranks, others: this one; how many there are; all but this one.
    """

    def __init__(self, rank: int, pids: Sequence[int], words: Words) -> None:
        self.rank, self.ranks, self._pids, self._words = rank, len(pids), pids, words
        self.others = [other for other in range(len(pids)) if other != rank]
        self._made, self._longest = 0, min(SAID // len(self.others), words.longest)

    def give(self, what: str, given: Mapping[int, Tensor], taken: Mapping[int, Tensor], owner: int = 0) -> None:
        """Fill what is taken from other ranks with what they give; return when they have what is given to them.

        Args:
            what: is made of it, in a word.
            given, taken: tensors without gaps, of one dtype, by rank; what a rank gives has as many elements as the
                other one takes.
            owner: for which of the users of the group.

        Raises:
            OSError: a rank is lost.
            RankMismatchError: another rank makes something else.
        """
        with self._telling(what, given, taken, owner) as there:
            for other, address in there.items():
                read(self._pids[other], taken[other].data_ptr(), address, taken[other].nbytes)

    def reduce(self, x: Tensor, op: str, what: str, owner: int = 0) -> None:
        """Reduce a tensor without gaps over all ranks, in place.

        Args:
            x: this rank's term, and the result.
            op: a name that torch's functional collectives know.
            what, owner: as of give().

        Raises:
            OSError, RankMismatchError: as give().
        """
        flat = x.view(-1)
        if x.nbytes > max(self._longest, WHOLE // len(self.others)):
            self._reduce_by_segments(flat, op, what, owner)
            return
        terms = {other: torch.empty_like(flat) for other in self.others}
        self.give(what, dict.fromkeys(self.others, flat), terms, owner)
        terms[self.rank] = flat if self.rank < 2 else flat.clone()  # not to be written before it is read
        reduce_terms(terms, op, out=flat)

    def _reduce_by_segments(self, x: Tensor, op: str, what: str, owner: int) -> None:
        """In three steps, and no memory but a scratch: a tensor has as many segments as there are ranks.

        1. Each rank tells where its tensor lies, and reduces into its own segment what the others hold there.
        2. When all have, it fetches the other segments from their owners.
        3. When all have, the tensor may change again.
        """
        bounds = segments(x.numel(), self.ranks)
        everyone = dict.fromkeys(self.others, x)
        with self._telling(what, everyone, everyone, owner) as there:
            begin, end = bounds[self.rank]
            self._reduce_from({other: at + begin * x.itemsize for other, at in there.items()}, x[begin:end], op)
            self._tell_done(self.others, self.others)
            for other, address in there.items():
                begin, end = bounds[other]
                if begin < end:
                    part = x[begin:end]
                    read(self._pids[other], part.data_ptr(), address + begin * x.itemsize, part.nbytes)

    def reduce_given(self, given: Mapping[int, Tensor], mine: Tensor, op: str, what: str) -> Tensor:
        """The reduction of this rank's term and of what the others give, each as long as it.

        Args:
            given: to other ranks, without gaps.
            mine: this rank's term.
            op, what: as of reduce().

        Raises:
            OSError, RankMismatchError: as give().
        """
        if mine.nbytes > self._longest:
            result = mine.clone()
            with self._telling(what, given, dict.fromkeys(self.others, mine)) as there:
                self._reduce_from(there, result.view(-1), op)
            return result
        terms = {other: torch.empty_like(mine) for other in self.others}
        self.give(what, given, terms)
        terms[self.rank] = mine
        return reduce_terms(terms, op, out=torch.empty_like(mine))

    def _reduce_from(self, there: Mapping[int, int], result: Tensor, op: str) -> None:
        """Reduce into the result what lies at these addresses of other ranks, as long as it."""
        into, scratch = _INTO[op], torch.empty(min(_READ, len(result)), dtype=result.dtype)
        for begin in range(0, len(result), _READ):
            mine = result[begin : begin + _READ]
            theirs = scratch[: len(mine)]
            for other, address in there.items():
                read(self._pids[other], theirs.data_ptr(), address + begin * result.itemsize, theirs.nbytes)
                for part, term in zip(mine.split(_REDUCED), theirs.split(_REDUCED), strict=True):
                    into(part, term, out=part)

    @contextmanager
    def _telling(
        self, what: str, given: Mapping[int, Tensor], taken: Mapping[int, Tensor], owner: int = 0
    ) -> Iterator[dict[int, int]]:
        """Say what is given to other ranks, and hear what is taken from them; the addresses of what is to be read.

        At the end others have read what is given.
        """
        words, longest = self._words, self._longest
        with words.turn:
            self._made += 1
            held = {other: _readable(x) if x.nbytes > longest else x for other, x in given.items()}
            said = {o: (Word(Term.of(x, what, owner), x.data_ptr()), _spoken(x, longest)) for o, x in held.items()}
            heard = words.exchange(said, {other: _spoken(x, longest) for other, x in taken.items()})
            for other, word in heard.items():
                mine = Term.of(taken[other], what, owner)
                if word.said != mine:
                    where = f"{what} {self._made} of this process group"
                    require_same(taken[other], mine, Term(*word.said), (self.rank, other), where)
            there = {other: heard[other].address for other, x in taken.items() if x.nbytes > longest}
            readers = [other for other, x in held.items() if x.nbytes > longest]
            yield there
            self._tell_done(there, readers)

    def _tell_done(self, to: Iterable[int], of: Iterable[int]) -> None:
        self._words.exchange(dict.fromkeys(to, _DONE), dict.fromkeys(of, NOTHING), again=True)


def reduce_terms(terms: Mapping[int, Tensor], op: str, out: Tensor) -> Tensor:
    """Reduce those of two or more ranks, in their order, into one that may be the first of them."""
    into = _INTO[op]
    into(terms[0], terms[1], out=out)
    for rank in range(2, len(terms)):
        into(out, terms[rank], out=out)
    return out


def _spoken(x: Tensor, longest: int) -> Bytes:
    """The memory of what goes with a word; of what is longer, nothing."""
    size = x.nbytes
    return (ctypes.c_char * size).from_address(x.data_ptr()) if 0 < size <= longest else NOTHING


def _readable(x: Tensor) -> Tensor:
    """The same values in memory that can be read from outside: the driver's pinned memory cannot."""
    return x.clone() if x.is_pinned() else x
