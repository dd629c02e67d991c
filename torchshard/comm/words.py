"""What ranks of one machine say to one another: words over lines of the kernel, and bytes behind them.

A collective would take a turn of the transport, and its answer, on an accelerator, a wait for all that is under way
there. Words go from host to host, while devices work.
"""

import ctypes
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchshard import _torch
from torchshard.comm.group import Group
from torchshard.comm.lines import MOST_RANKS, Lines, Near, Tell, connect, hang_up, machine, shut
from torchshard.comm.lost import raise_lost
from torchshard.comm.transport import Transport, waited
from torchshard.errors import RankMismatchError

_WORD = struct.Struct("5q")
"""How many times ranks have spoken; a Word."""

Bytes = bytearray | ctypes.Array[ctypes.c_char]

NOTHING = bytearray()
"""To be said or heard with a word alone."""

_known: "weakref.WeakKeyDictionary[dist.ProcessGroup, Words | None]" = weakref.WeakKeyDictionary()
"""A fact about each group, asked for by all its ranks in the same order."""


class Word(NamedTuple):
    """What one rank says to another one, in numbers of 63 bits.

    Attributes:
        said: it.
        address: where more lies.
    """

    said: tuple[int, int, int]
    address: int = 0


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
        _known[group] = None if alone or group.size() > MOST_RANKS else _connected(group, device)
    return _known[group]


def _connected(group: dist.ProcessGroup, device: torch.device) -> "Words | None":
    ranks = Group(group.group_name, group.size(), group.rank())
    with _torch.outside_of_traces():
        machines, pids = zip(*_of_all_ranks([machine(), os.getpid()], device, ranks), strict=True)
        if 0 in machines or len({*machines}) > 1 or len({*pids}) < len(pids):  # ranks that are threads have one
            return None
        lines = connect(group, Near(pids), _torch.group_timeout(group, device), _telling(ranks, device))
    return Words(group, lines) if lines else None


def _telling(ranks: Group, device: torch.device) -> Tell:
    def tell(said: bytes) -> list[bytes]:
        numbers = struct.unpack(f"{len(said) // 8}q", said)
        return [struct.pack(f"{len(told)}q", *told) for told in _of_all_ranks(numbers, device, ranks)]

    return tell


def _of_all_ranks(numbers: Sequence[int], device: torch.device, ranks: Group) -> list[list[int]]:
    """As collectives.of_all_ranks, but always by the transport: that one would ask for words first."""
    mine = torch.tensor([[*numbers]], dtype=torch.int64, device=device)
    said: list[list[int]] = waited(Transport(ranks).all_gather(mine), ranks).tolist()
    return said


class Words:
    """What ranks say to the others, one word after another. All of them speak as often.

    Args:
        group: of the ranks.
        lines: to the others.

    Attributes:
        turn: held by whoever speaks; more than once, for what belongs together.
        longest: bytes that surely fit into a socket with a word; the system's setting, and so the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, lines: Lines) -> None:
        self._lines, self._count, self.turn, self._process = lines, 0, threading.RLock(), os.getpid()
        self.longest = min(line.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for line in lines.values()) // 2
        weakref.finalize(self, hang_up, lines).atexit = False
        self._group: Callable[[], dist.ProcessGroup] = weakref.ref(group)  # type: ignore[assignment]  # who asks has it

    def same(self, number: int) -> bool:
        """Whether all ranks say the same number of 63 bits; each of them asks.

        Raises:
            RankMismatchError: a rank is lost, and named; or all are there, and yet one has not answered in time, or has
                been interrupted. From then on, always.
        """
        mine = Word((number, 0, 0))
        with self.failing("what the others are about to do"):
            heard = self.exchange(dict.fromkeys(self._lines, (mine, NOTHING)), dict.fromkeys(self._lines, NOTHING))
        return all(word == mine for word in heard.values())

    def exchange(
        self, said: Mapping[int, tuple[Word, Bytes]], into: Mapping[int, Bytes], again: bool = False
    ) -> dict[int, Word]:
        """Say a word and some bytes to ranks, and hear those of ranks; the words, by rank.

        Args:
            said: to whom.
            into: of whom, and where the bytes go; as many as that rank says, if its word is the one that is expected.
            again: whether it belongs to what was said last, and is no turn of all ranks.

        Raises:
            OSError: a line is broken, or has ended, or the time is over; names the rank.
        """
        with self.turn:
            self._count += not again
            for rank, (word, data) in said.items():
                self._say(rank, word, data)
            return {rank: self._hear(rank, data) for rank, data in into.items()}

    def _say(self, rank: int, word: Word, data: Bytes) -> None:
        try:
            self._lines[rank].sendmsg((_WORD.pack(self._count, *word.said, word.address), data))
        except OSError as error:
            raise ConnectionError(f"rank {rank} cannot be told: {error}") from error

    def _hear(self, rank: int, data: Bytes) -> Word:
        heard = bytearray(_WORD.size)
        try:
            size, *_ = self._lines[rank].recvmsg_into((heard, data))  # what does not fit is dropped
        except OSError as error:
            raise ConnectionError(f"rank {rank} does not answer: {error}") from error
        if not size:
            raise ConnectionError(f"rank {rank} has gone")
        count, *said, address = _WORD.unpack(heard)
        if count != self._count:
            raise ConnectionError(f"rank {rank} says word {count}, and this one word {self._count}")
        return Word((said[0], said[1], said[2]), address)

    def shut(self) -> None:
        """End all lines at both ends: whoever waits, or comes later, gets an error."""
        shut(self._lines)

    def hang_up(self) -> None:
        """Close them here; they also are when nobody has this any more."""
        hang_up(self._lines)

    @contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Within, an OSError ends the lines, and is raised as same() says; `what` is waited for.

        An interrupt ends them, too: what was said before it would be the answer to what comes next.
        """
        try:
            yield
        except OSError as error:
            if os.getpid() != self._process:  # nor may it use the connection to the store, which is the rank's
                raise RankMismatchError(
                    f"{what[0].upper()}{what[1:]} needs all ranks, and this process is none: it was forked off one.",
                    expected=f"process {self._process}, which made the process group",
                    got=f"process {os.getpid()}",
                    fix="give a process that is forked off, as a DataLoader's worker, x.full_tensor() or x.to_local()",
                ) from error
            self.shut()
            said = RankMismatchError(
                f"word {self._count} of {len(self._lines) + 1} ranks: {error}",
                expected="ranks that run the same steps, each of them to its end",
                got="one that is late, does something else, or has been interrupted, now or before",
                fix="destroy the process group and make another, with its meshes and tensors, or start all ranks again",
            )
            raise_lost(self._group(), what, said)
        except BaseException as error:
            if not isinstance(error, Exception):
                self.shut()
            raise
