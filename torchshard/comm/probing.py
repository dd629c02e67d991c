"""What connects the ranks of a group: measured once on the live group, the same answer on all ranks."""

import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torchshard.comm.packed import look_for_lines, normal_numbers, packed_all_reduce_of, seconds_to_pack
from torchshard.comm.summing import all_reduce_of
from torchshard.simulation import LinkSpeed

_FEW, _SOME, _MANY = 64, 1 << 17, 1 << 20  # elements of 4 bytes
_SLOW = 5e8
"""Bytes a second that are summed, from which on packing them cannot be faster than sending them."""

_LONG = 0.2
"""Seconds of a sum that are not spent twice."""

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
    probe = _Probe(all_reduce_of(group), group, device, wait)
    numbers = torch.zeros(_MANY, dtype=torch.float32, device="cpu")
    few, many = probe.seconds(numbers[:_FEW], 20), probe.seconds(numbers, 4)
    return LinkSpeed(few, 4 * (_MANY - _FEW) / max(many - few, 1e-9))


def _packed(group: dist.ProcessGroup, device: torch.device, wait: Wait) -> LinkSpeed:
    """Of numbers that lie around zero as gradients do."""
    probe = _Probe(packed_all_reduce_of(group), group, device, wait)
    numbers = normal_numbers(_MANY)
    some, many = probe.seconds(numbers[:_SOME], 4), probe.seconds(numbers, 4)
    bandwidth = 4 * (_MANY - _SOME) / max(many - some, 1e-9)
    work = probe.slowest(seconds_to_pack(group.size()))
    return LinkSpeed(max(some - 4 * _SOME / bandwidth, 0.0), bandwidth, work, packed=True)


class _Probe:
    """Measures sums; see links_of."""

    def __init__(
        self, all_reduce: Callable[[torch.Tensor], Any], group: dist.ProcessGroup, device: torch.device, wait: Wait
    ) -> None:
        self._all_reduce, self._group, self._device, self._wait = all_reduce, group, device, wait

    def seconds(self, numbers: torch.Tensor, tries: int) -> float:
        """The shortest of some tries, on the slowest rank; of one, where that takes long."""
        x = numbers.to(self._device, copy=True)
        first = self.slowest(self._once(x))
        return first if first > _LONG else self.slowest(min(self._once(x) for _ in range(tries - 1)))

    def slowest(self, seconds: float) -> float:
        """The longest of all ranks."""
        found = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        self._wait([dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group, async_op=True)])
        return float(found)

    def _once(self, x: torch.Tensor) -> float:
        start = time.perf_counter()
        self._wait([self._all_reduce(x)])
        if x.device.type != "cpu":
            torch.accelerator.synchronize(x.device)
        return time.perf_counter() - start
