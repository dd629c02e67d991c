"""Waiting for collectives, with an eye on the reason when it takes long."""

import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchshard._torch import is_gloo
from torchshard.comm.agreement import Agreement
from torchshard.errors import RankMismatchError

_GLANCE, _TO_THE_END = timedelta(seconds=1), timedelta(0)
_TAKES_NO_TIME = "finite timeout not implemented"  # say works that torch makes of futures, as of groups made in Python


class Promise:
    """A future, to be waited for as a collective is.

    Args:
        future: holds the result when all is done.
    """

    def __init__(self, future: "torch.futures.Future[Any]") -> None:
        self._future, self._done = future, threading.Event()
        future.add_done_callback(lambda _: self._done.set())

    def get_future(self) -> "torch.futures.Future[Any]":
        """As of dist.Work."""
        return self._future

    def is_completed(self) -> bool:
        """Whether waiting would return at once."""
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when there is a result; raise RuntimeError if the time is over, or what the future holds as exception.

        A time of 0 has no end, as that of torch's works.
        """
        if not self._done.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError("there is no result in time")
        result = self._future.wait()
        if isinstance(result, Exception):  # torch's own class keeps in Python that it is to be raised
            raise result
        return True


def holds_up(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether to wait for a collective of tensors on this device holds up the host, which orders streams else."""
    return device.type == "cpu" or is_gloo(group, device)


def wait_for(
    works: Iterable[Any], agreement: Agreement, position: int, held_up: bool, what: str = "a collective"
) -> None:
    """Wait until all are done; raise RankMismatchError if one is not, for other plans or for want of a rank.

    Args:
        works: what has been started; with the methods of dist.Work.
        agreement: between the ranks concerned.
        position: how many collectives this rank has issued.
        held_up: see `holds_up`.
        what: is waited for, for messages.

    A wait that holds up the host is cut into slices of a second, and between them the agreement is asked, if there is
    anybody to disagree with. Else Work.wait() orders streams, and that is all that is done.
    """
    for work in works:
        if held_up and agreement.world > 1:
            _wait_in_slices(work, agreement, position, what)
        else:
            work.wait(_TO_THE_END)  # works written in Python, as groups are, may want it said


def _wait_in_slices(work: Any, agreement: Agreement, position: int, what: str) -> None:
    while True:
        ended = work.is_completed()  # if so, what is raised now is not for want of time in this slice
        try:
            work.wait(_GLANCE)
        except RankMismatchError as error:
            agreement.fail(error)
        except Exception as error:
            if _TAKES_NO_TIME in str(error):
                work = Promise(work.get_future())
                continue
            agreement.check(position, what, error if work.is_completed() else None)
            if ended:
                agreement.blame(what, error)
        else:
            return
