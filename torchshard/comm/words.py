"""What ranks of one machine say before they communicate: words over lines of the kernel.

A collective would take a turn of the transport, and its answer, on an accelerator, a wait for all that is under way
there. Words go from host to host, while devices work.
"""

import os
import struct
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from torchshard import _torch
from torchshard.comm.collectives import of_all_ranks
from torchshard.comm.group import Group
from torchshard.comm.lines import MOST_RANKS, Lines, Near, Tell, connect, machine, receive, shut
from torchshard.comm.lost import raise_lost

_WORD = struct.Struct("2q")
"""How many have been said; what is said."""

_known: "weakref.WeakKeyDictionary[dist.ProcessGroup, Words | None]" = weakref.WeakKeyDictionary()
"""A fact about each group, asked for by all its ranks in the same order."""


def words_of(group: dist.ProcessGroup, device: torch.device) -> "Words | None":
    """What ranks of a group say words with, if all are processes of one machine; else None, on all ranks.

    The first call for a group is a collective, that no mode sees: it belongs to no operator.

    Args:
        group: of the ranks.
        device: of what it communicates; its time limit is that of words.

    Raises:
        RankMismatchError: a rank is lost; names it.
    """
    if group not in _known:
        alone = group.size() == 1 or dist.get_backend(group) == "fake"
        with _torch.outside_of_traces():
            _known[group] = None if alone or group.size() > MOST_RANKS else _connected(group, device)
    return _known[group]


def _connected(group: dist.ProcessGroup, device: torch.device) -> "Words | None":
    ranks = Group(group.group_name, group.size(), group.rank())
    machines, pids = zip(*of_all_ranks([machine(), os.getpid()], device, ranks), strict=True)
    if len({*machines}) > 1 or len({*pids}) < len(pids):  # ranks that are threads have one
        return None
    lines = connect(group, Near(pids), _torch.group_timeout(group, device), _telling(ranks, device))
    return Words(group, lines) if lines else None


def _telling(ranks: Group, device: torch.device) -> Tell:
    def tell(said: bytes) -> list[bytes]:
        numbers = struct.unpack(f"{len(said) // 8}q", said)
        return [struct.pack(f"{len(told)}q", *told) for told in of_all_ranks(numbers, device, ranks)]

    return tell


class Words:
    """What ranks say to all others, one word after another.

    Args:
        group: of the ranks.
        lines: to the others.
    """

    def __init__(self, group: dist.ProcessGroup, lines: Lines) -> None:
        self._lines, self._count, self._lock = lines, 0, threading.Lock()
        self._group: Callable[[], dist.ProcessGroup] = weakref.ref(group)  # type: ignore[assignment]  # who asks has it

    def same(self, number: int) -> bool:
        """Whether all ranks say the same number of 63 bits; each of them asks.

        Raises:
            RankMismatchError: a rank is lost; names it.
            RuntimeError: all are there, and yet one has not answered in time. From then on, always.
        """
        with self._lock:
            self._count += 1
            mine = _WORD.pack(self._count, number)
            try:
                for line in self._lines.values():
                    line.sendall(mine)
                theirs = [receive(line, _WORD.size) for line in self._lines.values()]
            except OSError as error:
                shut(self._lines)
                said = RuntimeError(f"word {self._count} of {len(self._lines) + 1} ranks: {error}")
                raise_lost(self._group(), "what the others are about to do", said)
        return all(word == mine for word in theirs)
