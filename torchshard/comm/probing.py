"""What connects the ranks of a group: measured once on the live group, the same answer on all ranks."""

import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torchshard.comm.summing import all_reduce_of
from torchshard.simulation import LinkSpeed

_FEW, _MANY = 64, 1 << 20  # elements of 4 bytes
_measured: "WeakKeyDictionary[dist.ProcessGroup, LinkSpeed]" = WeakKeyDictionary()
"""A fact about each group, asked for by all its ranks in the same order."""


def link_of(group: dist.ProcessGroup, device: torch.device, wait: Callable[[Sequence[Any]], None]) -> LinkSpeed | None:
    """How fast this group sums over its ranks; None where nothing is sent: one rank, or a fake group.

    The first call takes some 25 all-reduces and all ranks have to join it; later ones nothing. Of several tries the
    best counts, and of the ranks the slowest.

    Args:
        group: of the ranks.
        device: of what is summed.
        wait: waits for collectives; see `waiting`.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return None
    if group not in _measured:
        all_reduce = all_reduce_of(group)

        def summed(x: torch.Tensor) -> None:
            wait([all_reduce(x)])

        few = _seconds(torch.zeros(_FEW, device=device), summed, tries=20)
        many = _seconds(torch.zeros(_MANY, device=device), summed, tries=4)
        found = torch.tensor([few, many], dtype=torch.float64, device=device)
        wait([dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group, async_op=True)])
        latency, whole = found.tolist()
        _measured[group] = LinkSpeed(latency, 4 * (_MANY - _FEW) / max(whole - latency, 1e-9))
    return _measured[group]


def _seconds(x: torch.Tensor, summed: Callable[[torch.Tensor], None], tries: int) -> float:
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        summed(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        times.append(time.perf_counter() - start)
    return min(times)
