"""Waiting for collectives, with an eye on the reason when it takes long."""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from torchshard.comm.agreement import Agreement

_GLANCE = timedelta(seconds=1)


def wait_for(works: Iterable[dist.Work], agreement: Agreement, position: int, device: torch.device) -> None:
    """Wait until all are done; raise RankMismatchError if one is not because the ranks follow different plans.

    On a CPU the wait is cut into slices of a second, and between them the agreement is asked. On an accelerator
    Work.wait() does not hold up the host; it orders streams, and that is all that is done.
    """
    for work in works:
        if device.type == "cpu":
            _wait_in_slices(work, agreement, position)
        else:
            work.wait()


def _wait_in_slices(work: dist.Work, agreement: Agreement, position: int) -> None:
    while True:
        try:
            work.wait(_GLANCE)
        except RuntimeError:
            agreement.check(position)
            if work.is_completed():  # it failed, and not for want of time in this slice
                raise
        else:
            return
