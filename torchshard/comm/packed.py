"""Sums over a slow link, of which each byte is worth more than the work to save it.

A tensor is cut into as many segments as there are ranks, and its sum is made in three steps, each chunk by chunk on a
thread of its own, so that the link is never idle:

1. Each rank packs what it holds in the segments of the others (packing.py), and sends it to their owners.
2. Each adds what comes to what it holds in its own segment, packs the sum, and sends that to all.
3. Each puts what comes from the owners in place.

So as many numbers travel as in a ring, and nothing is lost: all ranks end with the same bits, those of a sum of the
owner's term and the others' in the order of the ranks. Two TCP connections join each two ranks, one for terms and one
for sums. All three steps take the chunks of all sums in one order, and those of a place in the order of the ranks; the
third only receives. So no step waits for itself, even if a connection holds less than a chunk.
"""

import copy
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard import _torch
from torchshard.comm.lines import MOST_RANKS, Far, Lines, connect, hang_up, receive, shut
from torchshard.comm.packing import can_pack, pack, unpack
from torchshard.comm.terms import Term, require_same, segments
from torchshard.comm.waiting import Promise
from torchshard.comm.workers import Worker
from torchshard.errors import RankMismatchError

SWITCH = "TORCHSHARD_PACK_SUMS"
"""Environment variable; 0 on any rank: ranks never pack what they sum."""

SMALLEST = 64 * 1024
"""Bytes of a tensor below which it is not packed: it would not be faster."""

CHUNK = 64 * 1024
"""Elements that are packed at a time."""

_ADDED = 32 * 1024
"""Elements that are added at a time: torch does not take more threads for so few."""

_MOMENT = 0.5
"""Seconds that the other steps of a sum have to end by themselves when one has failed."""

_HEAD = struct.Struct("6q")
"""Number of the sum; elements, dtype and owner of the tensor; where in it the chunk begins; bytes that follow."""

_known: "weakref.WeakKeyDictionary[dist.ProcessGroup, PackedSums | None]" = weakref.WeakKeyDictionary()
"""A fact about each group, asked for by all its ranks in the same order."""


def look_for_lines(group: dist.ProcessGroup, device: torch.device) -> "PackedSums | None":
    """What packs sums of this group, if its ranks can reach one another; the first call for a group is a collective.

    That is for tensors on the CPU, where the group's transport is gloo itself.

    Raises:
        RuntimeError: a rank is lost.
    """
    if group not in _known:
        able = device.type == "cpu" and 1 < group.size() <= MOST_RANKS and _torch.is_gloo(group)
        _known[group] = _connected(group, device) if able else None
    return _known[group]


def _connected(group: dist.ProcessGroup, device: torch.device) -> "PackedSums | None":
    limit, places = _torch.group_timeout(group, device), Far() if os.environ.get(SWITCH, "1") != "0" else None
    terms = connect(group, places, limit)
    sums = connect(group, places, limit) if terms else {}
    if not sums:
        hang_up(terms)
        return None
    return PackedSums(group.rank(), terms, sums)


def packed_all_reduce_of(group: dist.ProcessGroup, owner: int = 0) -> Callable[[Tensor], Any]:
    """As all_reduce_of, for a group for which `look_for_lines` has found something."""
    found = _known[group]
    assert found is not None, "sums are packed where that has been measured"
    sums: PackedSums = found

    def all_reduce(x: Tensor) -> Any:
        return sums.all_reduce(x, owner) if sums.can_sum(x) else dist.all_reduce(x, group=group, async_op=True)

    return all_reduce


def normal_numbers(count: int) -> Tensor:
    """Some that lie around zero as gradients do; always the same."""
    generator = torch.Generator("cpu").manual_seed(0)
    return 1e-3 * torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")


def seconds_to_pack(ranks: int) -> float:
    """That this rank is at work for each byte of float32 that so many ranks sum; the best of some tries."""
    x = normal_numbers(CHUNK)
    packing, unpacking = [], []
    for _ in range(5):
        begin = time.perf_counter()
        packed = pack(x)
        middle = time.perf_counter()
        unpack(packed, x)
        packing.append(middle - begin)
        unpacking.append(time.perf_counter() - middle)
    return (min(packing) + 2 * (ranks - 1) / ranks * min(unpacking)) / x.nbytes


class PackedSums:
    """Makes the sums of a group, in the order in which they are begun.

    Args:
        rank: this one.
        terms, sums: two connections to each of the others.
    """

    def __init__(self, rank: int, terms: Lines, sums: Lines) -> None:
        self._peers, self._count = _Peers(rank, terms, sums), 0
        self._workers = [Worker(last=self._peers.leave, stop=self._peers.stop) for _ in _STEPS]

    def can_sum(self, x: Tensor) -> bool:
        """Whether it is one of those that are summed here; the same on all ranks."""
        return can_pack(x) and x.nbytes >= SMALLEST and x.device.type == "cpu"

    def all_reduce(self, x: Tensor, owner: int = 0) -> Promise:
        """Start to sum a tensor in place."""
        self._count += 1
        future: torch.futures.Future[Any] = torch.futures.Future()
        _torch.profiled("gloo:all_reduce", future)  # as the group's own
        promise = Promise(future)  # done behind the profiler
        job = _Sum(self._count, x, owner, self._peers, future)
        for worker, step in zip(self._workers, _STEPS, strict=True):
            worker.do(partial(job.play, step))
        return promise


class _Peers:
    """The connections to the other ranks, and why they cannot be used any more, if so."""

    def __init__(self, rank: int, terms: Lines, sums: Lines) -> None:
        self.rank, self.terms, self.sums, self.ranks = rank, terms, sums, len(terms) + 1
        self._failed: tuple[int, Exception] | None = None
        self._lock, self._users = threading.Lock(), len(_STEPS)

    def fail(self, number: int, error: Exception) -> None:
        """No sum after this one can be made; the earliest reason counts."""
        with self._lock:
            if self._failed is None or number < self._failed[0]:
                self._failed = number, copy.copy(error)  # without the traceback that it will have

    def failed_before(self, number: int) -> Exception | None:
        """Why a sum cannot be made, if so: an earlier one could not."""
        return copy.copy(self._failed[1]) if self._failed and self._failed[0] < number else None

    def shut(self) -> None:
        """Whoever waits, here or elsewhere, shall not wait in vain."""
        shut(self.terms)
        shut(self.sums)

    def stop(self) -> None:
        """The process ends."""
        self.fail(0, RuntimeError("this process ends"))
        self.shut()

    def leave(self) -> None:
        """A thread ends."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        hang_up(self.terms)
        hang_up(self.sums)


class _Sum:
    """One sum that is being made.

    Args:
        number: of the sum, in this group.
        x: the tensor, and the place of the result.
        owner: whose sum it is.
        peers: the other ranks.
        future: is given the tensor when it is done with.
    """

    def __init__(self, number: int, x: Tensor, owner: int, peers: _Peers, future: "torch.futures.Future[Any]") -> None:
        self.number, self.x, self.peers, self._future = number, x, peers, future
        self.flat = x.data.view(-1)  # not counted as a change of the tensor, as of any collective
        self.term, self.bounds = Term.of(x, "sum", owner), segments(x.numel(), peers.ranks)
        self._lock, self._left, self._ended = threading.Lock(), len(_STEPS), threading.Event()
        self._failed: Exception | None = None

    def play(self, step: Callable[["_Sum"], None]) -> None:
        """Do one of the three steps, unless an earlier sum has failed; the last to end tells who waits.

        When a step fails, the others have a moment to end by themselves: what has been sent already may say why it did.
        """
        failed = self.peers.failed_before(self.number)
        try:
            if failed is None:
                step(self)
        except RankMismatchError as error:
            failed = error.with_traceback(None)  # which holds the tensor, and is held by the future
        except Exception as error:
            failed = RuntimeError(f"sum {self.number} over {self.peers.ranks} ranks: {error}")
        with self._lock:
            if failed and not isinstance(self._failed, RankMismatchError):  # of several reasons the one that explains
                self._failed = failed
            self._left -= 1
            last = not self._left
        if failed:
            self.peers.fail(self.number, failed)
        if last:
            self._tell()
        elif failed and not self._ended.wait(_MOMENT):
            self.peers.shut()

    def _tell(self) -> None:
        self._ended.set()
        if self._failed:
            self.peers.shut()
            self._future.set_exception(self._failed)
        else:
            self._future.set_result([self.x])

    def chunks(self, ranks: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
        """The rank, the first element and the chunk, of the segments of these ranks, first chunks first."""
        for at in range(0, self.bounds[0][1], CHUNK):
            for rank in ranks:
                begin, end = self.bounds[rank]
                if begin + at < end:
                    yield rank, begin + at, self.flat[begin + at : min(begin + at + CHUNK, end)]

    def send(self, lines: Lines, ranks: Sequence[int], begin: int, chunk: Tensor) -> None:
        """Pack a chunk, and send it to these ranks."""
        packed = pack(chunk)
        data = _HEAD.pack(self.number, *self.term, begin, len(packed)) + packed
        for rank in ranks:
            try:
                lines[rank].sendall(data)
            except OSError as error:
                raise RuntimeError(f"rank {rank} cannot be reached: {error}") from error

    def take(self, lines: Lines, rank: int, begin: int, chunk: Tensor) -> None:
        """Fill a chunk with what comes from this rank; RankMismatchError if it is another tensor's."""
        try:
            number, *its, its_begin, size = _HEAD.unpack(receive(lines[rank], _HEAD.size))
            ranks, where = (self.peers.rank, rank), f"sum {self.number} of this process group"
            require_same(self.flat, self.term, Term(*its), ranks, where)
            if (number, its_begin) != (self.number, begin):
                raise RuntimeError(f"rank {rank} is at element {its_begin} of sum {number}, and this one at {begin}")
            packed = receive(lines[rank], size)
        except OSError as error:
            raise RuntimeError(f"rank {rank} does not answer: {error}") from error
        unpack(packed, chunk)


def _send_terms(job: _Sum) -> None:
    others = [*job.peers.terms]
    for rank, begin, chunk in job.chunks(others):
        job.send(job.peers.terms, [rank], begin, chunk)


def _add_up(job: _Sum) -> None:
    others, own = [*job.peers.terms], job.peers.rank
    scratch = torch.empty(CHUNK, dtype=job.flat.dtype, device=job.flat.device)
    for _, begin, chunk in job.chunks([own]):
        for rank in others:
            term = scratch[: len(chunk)]
            job.take(job.peers.terms, rank, begin, term)
            for part, added in zip(chunk.split(_ADDED), term.split(_ADDED), strict=True):
                part.add_(added)
        job.send(job.peers.sums, others, begin, chunk)


def _take_sums(job: _Sum) -> None:
    for rank, begin, chunk in job.chunks([*job.peers.sums]):
        job.take(job.peers.sums, rank, begin, chunk)


_STEPS = (_send_terms, _add_up, _take_sums)
