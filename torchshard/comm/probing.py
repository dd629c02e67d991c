"""What connects the ranks of a group: measured once on the live group, the same answer on all ranks."""

import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torchshard.comm.packed import look_for_lines, packed_all_reduce_of, seconds_to_pack
from torchshard.comm.summing import all_reduce_of
from torchshard.simulation import LinkSpeed

_FEW, _SOME, _MANY = 64, 1 << 17, 1 << 20  # elements of 4 bytes
_SLOW = 5e8
"""Bytes a second that are summed, from which on packing them cannot be faster than sending them."""

Wait = Callable[[Sequence[Any]], None]

_measured: "WeakKeyDictionary[dist.ProcessGroup, tuple[LinkSpeed, ...]]" = WeakKeyDictionary()
"""A fact about each group, asked for by all its ranks in the same order."""


def links_of(group: dist.ProcessGroup, device: torch.device, wait: Wait) -> tuple[LinkSpeed, ...]:
    """How fast this group sums over its ranks, and, where that is slow, how fast when numbers are packed.

    Nothing where nothing is sent: one rank, or a fake group. The first call takes some 25 to 35 all-reduces and all
    ranks have to join it; later ones nothing. Of several tries the best counts, and of the ranks the slowest.

    Args:
        group: of the ranks.
        device: of what is summed.
        wait: waits for collectives; see `waiting`.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return ()
    if group not in _measured:
        plain = _plain(group, device, wait)
        slow = plain.bandwidth < _SLOW and look_for_lines(group, device)
        _measured[group] = (plain, _packed(group, device, wait)) if slow else (plain,)
    return _measured[group]


def _plain(group: dist.ProcessGroup, device: torch.device, wait: Wait) -> LinkSpeed:
    summed = _summed(all_reduce_of(group), wait)
    few = _seconds(torch.zeros(_FEW, device=device), summed, tries=20)
    many = _seconds(torch.zeros(_MANY, device=device), summed, tries=4)
    few, many = _slowest([few, many], group, device, wait)
    return LinkSpeed(few, 4 * (_MANY - _FEW) / max(many - few, 1e-9))


def _packed(group: dist.ProcessGroup, device: torch.device, wait: Wait) -> LinkSpeed:
    """Of numbers that lie around zero as gradients do."""
    summed = _summed(packed_all_reduce_of(group), wait)
    numbers = torch.randn(_MANY, generator=torch.Generator().manual_seed(0)) * 1e-3
    some, many = (_seconds(numbers[:count].clone(), summed, tries=4) for count in (_SOME, _MANY))
    some, many, work = _slowest([some, many, seconds_to_pack(group.size())], group, device, wait)
    bandwidth = 4 * (_MANY - _SOME) / max(many - some, 1e-9)
    return LinkSpeed(max(some - 4 * _SOME / bandwidth, 0.0), bandwidth, work, packed=True)


def _summed(all_reduce: Callable[[torch.Tensor], Any], wait: Wait) -> Callable[[torch.Tensor], None]:
    return lambda x: wait([all_reduce(x)])


def _slowest(times: Sequence[float], group: dist.ProcessGroup, device: torch.device, wait: Wait) -> list[float]:
    """Place by place the longest of all ranks."""
    found = torch.tensor(times, dtype=torch.float64, device=device)
    wait([dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group, async_op=True)])
    slowest: list[float] = found.tolist()
    return slowest


def _seconds(x: torch.Tensor, summed: Callable[[torch.Tensor], None], tries: int) -> float:
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        summed(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        times.append(time.perf_counter() - start)
    return min(times)
