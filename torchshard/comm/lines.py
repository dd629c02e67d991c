"""Lines between processes of one machine: sockets of the kernel over which a word takes some 30 us, and which end when
the process at the other end does.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

_TO_CONNECT = 10.0
"""Seconds; all ranks connect at the same time."""

_RANK, _PEER = struct.Struct("q"), struct.Struct("3i")

Lines = Mapping[int, socket.socket]


def connect(group: dist.ProcessGroup, pids: Sequence[int], limit: timedelta) -> Lines:
    """Rank -> a socket to it, for all other ranks; nothing, on all ranks, if one of them is not reached.

    A collective of all ranks. Messages keep their borders and their order.

    Args:
        group: of the ranks.
        pids: of the ranks, as this process sees them: who connects must be one of them.
        limit: for each message; then TimeoutError.

    Raises:
        RuntimeError: a rank is lost.
    """
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as undo:
        door, name = _door()
        if door is not None:
            undo.enter_context(door)
        names = [torch.empty_like(name) for _ in pids]
        dist.all_gather(names, name, group=group)
        try:
            if door is not None:
                found.update(_reached(group.rank(), names))
                found.update(_let_in(group.rank(), door, pids))
        except OSError:
            pass  # told below
        able = torch.tensor([float(len(found) == len(pids) - 1)], device="cpu")
        dist.all_reduce(able, dist.ReduceOp.MIN, group=group)
        if not able:
            for line in found.values():
                undo.enter_context(line)
            return {}
    for line in found.values():
        line.settimeout(limit.total_seconds())
    return found


def _door() -> tuple[socket.socket | None, torch.Tensor]:
    """Where others may connect, and its name; None where there are no such sockets."""
    name = os.urandom(16)
    words = torch.frombuffer(bytearray(name), dtype=torch.int64)
    try:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.settimeout(_TO_CONNECT)
        door.bind(_address(words))
        door.listen(1024)
    except (OSError, AttributeError):
        return None, words
    return door, words


def _address(words: torch.Tensor) -> bytes:
    """An abstract one, which no file system holds."""
    return b"\0torchshard-" + words.numpy().tobytes().hex().encode()


def _reached(rank: int, names: Sequence[torch.Tensor]) -> Iterator[tuple[int, socket.socket]]:
    """Connect to the ranks below, which listen and may let this one in later."""
    for other in range(rank):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.settimeout(_TO_CONNECT)
        line.connect(_address(names[other]))
        line.send(_RANK.pack(rank))
        yield other, line


def _let_in(rank: int, door: socket.socket, pids: Sequence[int]) -> Iterator[tuple[int, socket.socket]]:
    """Those above; a stranger is left outside."""
    missing = set(range(rank + 1, len(pids)))
    while missing:
        line, _ = door.accept()
        pid, *_ = _PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        line.settimeout(_TO_CONNECT)
        word = line.recv(_RANK.size) if pid in pids else b""
        (other,) = _RANK.unpack(word) if len(word) == _RANK.size else (None,)
        if other in missing and pids[other] == pid:
            missing.remove(other)
            yield other, line
        else:
            line.close()
