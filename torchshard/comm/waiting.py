"""Waiting for collectives, with an eye on the reason when it takes long."""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from torchshard.comm.agreement import Agreement

_GLANCE = timedelta(seconds=1)


def wait_for(
    works: Iterable[dist.Work], agreement: Agreement, position: int, device: torch.device, what: str = "a collective"
) -> None:
    """Wait until all are done; raise RankMismatchError if one is not, for other plans or for want of a rank.

    Args:
        works: what has been started.
        agreement: between the ranks concerned.
        position: how many collectives this rank has issued.
        device: of the tensors.
        what: is waited for, for messages.

    On a CPU the wait is cut into slices of a second, and between them the agreement is asked. On an accelerator
    Work.wait() does not hold up the host; it orders streams, and that is all that is done.
    """
    for work in works:
        if device.type == "cpu":
            _wait_in_slices(work, agreement, position, what)
        else:
            work.wait()


def _wait_in_slices(work: dist.Work, agreement: Agreement, position: int, what: str) -> None:
    while True:
        ended = work.is_completed()  # if so, what is raised now is not for want of time in this slice
        try:
            work.wait(_GLANCE)
        except RuntimeError as error:
            agreement.check(position, what)
            if ended:
                agreement.blame(what, error)
        else:
            return
