"""Sums over the ranks of one machine, made in one another's memory where a transport would copy through sockets.

How a tensor is summed in place is in reach.py; here it is begun, on a thread of its own for each group. What ranks say
goes over lines of its own, too: a rank that computes may be at another word.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard import _torch
from torchshard.comm.lines import MOST_RANKS, Near, connect
from torchshard.comm.neighbours import process_ids
from torchshard.comm.reach import Reach
from torchshard.comm.waiting import Promise
from torchshard.comm.words import Words
from torchshard.comm.workers import Worker
from torchshard.errors import RankMismatchError

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
    return Neighbours(group.rank(), pids, Words(group, lines)) if lines else None


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
        words: between them, which nobody else says.
    """

    def __init__(self, rank: int, pids: Sequence[int], words: Words) -> None:
        self._reach, self._count = Reach(rank, pids, words), 0
        self._worker = Worker(last=words.hang_up, stop=words.shut)

    def can_sum(self, x: Tensor) -> bool:
        """Whether it is one of those that are summed here; the same on all ranks."""
        return x.layout is torch.strided and x.numel() > 0 and x.device.type == "cpu" and x.is_contiguous()

    def all_reduce(self, x: Tensor, owner: int = 0) -> Promise:
        """Start to sum a tensor in place."""
        self._count += 1
        future: torch.futures.Future[Any] = torch.futures.Future()
        _torch.profiled("gloo:all_reduce", future)  # as the group's own
        promise = Promise(future)  # done behind the profiler
        self._worker.do(partial(_play, self._reach, self._count, owner, x, future))
        return promise


def _play(reach: Reach, number: int, owner: int, x: Tensor, future: "torch.futures.Future[Any]") -> None:
    try:
        reach.reduce(x.data, "sum", "sum", owner)  # not counted as a change of the tensor, as of any collective
    except RankMismatchError as error:
        future.set_exception(error.with_traceback(None))  # which holds the tensor, and is held by the future
    except Exception as error:
        future.set_exception(RuntimeError(f"sum {number} over {reach.ranks} ranks: {error}"))
    else:
        future.set_result([x])
