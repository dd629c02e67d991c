"""Sums over the ranks of one machine, made in one another's memory where a transport would copy through sockets.

A tensor is cut into as many segments as there are ranks, and in three steps becomes the sum of all ranks' tensors:

1. Each rank tells the others where its tensor lies, and adds what they hold in its segment to what it holds there.
2. When all have, it fetches the other segments from their owners.
3. When all have, the tensor may change again.

Each segment is summed by one rank, so that all end with the same bits. It takes no memory but a scratch that stays in
the cache. What is small is told to all in one step, and each rank adds it up in the same order.

neighbours.py knows who can read whose memory; what ranks tell one another goes over the lines of lines.py, and one that
breaks says which rank is lost.
"""

import struct
import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard import _torch
from torchshard.comm.lines import MOST_RANKS, Lines, Near, connect, hang_up, shut
from torchshard.comm.neighbours import process_ids, read
from torchshard.comm.waiting import Promise
from torchshard.comm.workers import Worker
from torchshard.errors import RankMismatchError

SMALL = 64 * 1024
"""Bytes that a rank tells at most, to all others together: a tensor up to that goes without anybody's memory."""

_READ = 128 * 1024
"""Elements that are read at a time: they stay in the cache until they are added."""

_ADDED = 32 * 1024
"""Elements that are added at a time: torch does not take more threads for so few."""

_WORD = struct.Struct("6q")

_ASYNC = dist.AllreduceOptions()
_ASYNC.asyncOp = True

_known: "weakref.WeakKeyDictionary[dist.ProcessGroup, Neighbours | None]" = weakref.WeakKeyDictionary()
"""A fact about each group, asked for by all its ranks in the same order."""


def look_for_neighbours(group: dist.ProcessGroup, device: torch.device) -> None:
    """Find out whether this group's tensors can be summed in memory; the first call for a group is a collective.

    That is so if they lie on the CPU, the group's transport is gloo itself, and all ranks can read and reach one
    another.

    Raises:
        RuntimeError: a rank is lost.
    """
    if group not in _known and device.type == "cpu":
        _known[group] = _found(group, device) if 1 < group.size() <= MOST_RANKS and _torch.is_gloo(group) else None


def _found(group: dist.ProcessGroup, device: torch.device) -> "Neighbours | None":
    if not (pids := process_ids(group, device)):
        return None
    lines = connect(group, Near(pids), _torch.group_timeout(group, device))
    return Neighbours(group.rank(), pids, lines) if lines else None


def all_reduce_of(group: dist.ProcessGroup, owner: int = 0) -> Callable[[Tensor], Any]:
    """What starts to sum a tensor in place over the ranks of a group, and returns its work, as dist.Work.

    Args:
        group: of the ranks.
        owner: whose sums these are, of several users of the group. Ranks that sum for different owners say so where
            sums are made here; the transport of the group does not ask.
    """
    return partial(all_reduce, group=group, owner=owner)


def all_reduce(x: Tensor, group: dist.ProcessGroup, owner: int = 0) -> Any:
    """Start to sum a tensor in place over the ranks of a group; the work. Arguments as above."""
    neighbours = _known.get(group)
    if neighbours is not None and neighbours.can_sum(x):
        return neighbours.all_reduce(x, owner)
    # What dist.all_reduce does with a plain tensor, at a fourth of the time in Python.
    return group.allreduce([torch.view_as_real(x) if x.is_complex() else x], _ASYNC)


class Neighbours:
    """The ranks of a group that read one another's memory. Sums are made one after another, on a thread of their own.

    Args:
        rank: this one.
        pids: of all ranks.
        lines: to the others.
    """

    def __init__(self, rank: int, pids: Sequence[int], lines: Lines) -> None:
        self._meeting, self._count = partial(_Meeting, rank, pids, lines), 0
        self._worker = Worker(last=partial(hang_up, lines), stop=partial(shut, lines))

    def can_sum(self, x: Tensor) -> bool:
        """Whether it is one of those that are summed here; the same on all ranks."""
        return x.layout is torch.strided and x.numel() > 0 and x.device.type == "cpu" and x.is_contiguous()

    def all_reduce(self, x: Tensor, owner: int = 0) -> Promise:
        """Start to sum a tensor in place."""
        self._count += 1
        future: torch.futures.Future[Any] = torch.futures.Future()
        _torch.profiled("gloo:all_reduce", future)  # as the group's own
        promise = Promise(future)  # done behind the profiler
        self._worker.do(partial(_play, self._meeting(self._count, owner), x, future))
        return promise


def _play(meeting: "_Meeting", x: Tensor, future: "torch.futures.Future[Any]") -> None:
    try:
        flat = x.data.view(-1)  # not counted as a change of the tensor, as of any collective
        (_sum_told if flat.nbytes * len(meeting.lines) <= SMALL else _sum)(meeting, flat)
    except RankMismatchError as error:
        future.set_exception(error.with_traceback(None))  # which holds the tensor, and is held by the future
    except Exception as error:
        future.set_exception(RuntimeError(f"sum {meeting.number} over {len(meeting.pids)} ranks: {error}"))
    else:
        future.set_result([x])


def _sum_told(meeting: "_Meeting", x: Tensor) -> None:
    told = meeting.tell(x, x.view(torch.uint8).numpy().tobytes())
    terms = {rank: torch.frombuffer(bytearray(its), dtype=x.dtype) for rank, (_, its) in told.items()}
    terms[meeting.rank] = x.clone()
    x.copy_(terms[0])
    for rank in range(1, len(terms)):
        x.add_(terms[rank])


def _sum(meeting: "_Meeting", x: Tensor) -> None:
    size, begin = x.element_size(), x.data_ptr()
    bounds = segments(x.numel(), len(meeting.pids))
    others = {rank: there for rank, (there, _) in meeting.tell(x).items()}
    own, end = bounds[meeting.rank]
    scratch = torch.empty(min(_READ, end - own), dtype=x.dtype, device=x.device)
    for at in range(own, end, _READ):
        mine = x[at : min(at + _READ, end)]
        theirs = scratch[: len(mine)]
        for rank, there in others.items():
            read(meeting.pids[rank], theirs.data_ptr(), there + at * size, theirs.nbytes)
            for part, term in zip(mine.split(_ADDED), theirs.split(_ADDED), strict=True):
                part.add_(term)
    meeting.gather()
    for rank, there in others.items():
        at, end = (size * bound for bound in bounds[rank])
        if at < end:
            read(meeting.pids[rank], begin + at, there + at, end - at)
    meeting.gather()


def segments(numel: int, ranks: int) -> list[tuple[int, int]]:
    """Where the segment of each rank begins and ends, in elements; the last ones may be shorter, or empty."""
    step = -(-numel // ranks)
    return [(min(rank * step, numel), min((rank + 1) * step, numel)) for rank in range(ranks)]


class Summand(NamedTuple):
    """What a rank sums, as numbers that mean the same on all ranks."""

    numel: int
    dtype: int
    owner: int

    @classmethod
    def of(cls, x: Tensor, owner: int) -> "Summand":
        """Of this tensor, for one of the users of the group."""
        return cls(x.numel(), zlib.crc32(str(x.dtype).encode()), owner)


def require_same(x: Tensor, mine: Summand, its: Summand, rank: int, other: int, number: int) -> None:
    """Raise RankMismatchError unless another rank sums a tensor of the same length and dtype, for the same owner.

    Args:
        x, mine: of this rank.
        its: of the other one.
        rank, other: this rank, and the other one.
        number: of the sum, in this group.
    """
    if mine == its:
        return
    same, fix = mine._replace(owner=0) == its._replace(owner=0), "run the same model, with the same settings"
    if same:
        fix = "run the backwards of several wrappers in the same order, or give each wrapper a process group of its own"
    dtype = "the same" if its.dtype == mine.dtype else "another"
    raise RankMismatchError(
        f"rank {rank} and rank {other} sum different tensors",
        expected=f"{mine.numel} elements of {x.dtype}, as on rank {rank}",
        got="as many for another wrapper" if same else f"{its.numel} elements of {dtype} dtype",
        where=f"sum {number} of this process group",
        fix=f"{fix}, on every rank",
    )


class _Meeting:
    """The ranks that make one sum, and what they tell one another.

    Args:
        rank: this one.
        pids: of all.
        lines: to the others.
        number: of the sum, in this group.
        owner: whose sum it is.
    """

    def __init__(self, rank: int, pids: Sequence[int], lines: Lines, number: int, owner: int) -> None:
        self.rank, self.pids, self.lines, self.number, self._owner = rank, pids, lines, number, owner
        self._step = 0

    def tell(self, x: Tensor, said: bytes = b"") -> dict[int, tuple[int, bytes]]:
        """Return where the tensors of the others lie, and what they say, by rank.

        RankMismatchError if one of them sums something else.
        """
        found, mine = {}, Summand.of(x, self._owner)
        answers = self._exchange(*mine, x.data_ptr(), said=said)
        for rank, ((*numbers, address), its) in answers.items():
            require_same(x, mine, Summand(*numbers), self.rank, rank, self.number)
            found[rank] = address, its
        return found

    def gather(self) -> None:
        """Return when all ranks have come here."""
        self._exchange(0, 0, 0, 0)

    def _exchange(self, *numbers: int, said: bytes = b"") -> "dict[int, tuple[tuple[int, ...], bytes]]":
        self._step += 1
        mine = _WORD.pack(self.number, self._step, *numbers) + said
        for rank in self.lines:
            self._say(rank, mine)
        return {rank: self._hear(rank, len(mine)) for rank in self.lines}

    def _say(self, rank: int, word: bytes) -> None:
        try:
            self.lines[rank].send(word)
        except OSError as error:
            raise RuntimeError(f"rank {rank} cannot be told: {error}") from error

    def _hear(self, rank: int, size: int) -> tuple[tuple[int, ...], bytes]:
        try:
            word = self.lines[rank].recv(size)  # the rest of a longer one, of another tensor, is dropped
        except OSError as error:
            raise RuntimeError(f"rank {rank} does not answer: {error}") from error
        if not word:
            raise RuntimeError(f"rank {rank} has gone")
        number, step, *numbers = _WORD.unpack_from(word)
        if (number, step) != (self.number, self._step):
            raise RuntimeError(f"rank {rank} is at step {step} of sum {number}, and this one at step {self._step}")
        return tuple(numbers), word[_WORD.size :]
