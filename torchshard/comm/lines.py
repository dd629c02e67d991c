"""Lines between the ranks of a group: sockets that end when the process at the other end does.

Between processes of one machine they are the kernel's own, over which a word takes some 30 us; else TCP, on the network
interface that gloo uses.
"""

import contextlib
import hashlib
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

MOST_RANKS = 32
"""Of a group that has lines: each tells each."""

_TO_CONNECT = 10.0
"""Seconds; all ranks connect at the same time. At most half of what a collective may take: one follows."""

_TO_GREET = 2.0
"""Seconds that one who has connected may take to say who he is."""

_GREETING, _PEER = struct.Struct("q16s"), struct.Struct("3i")
"""Who comes, with the word that only members of the group were told; who it is that the kernel has let through."""

_IPV4, _IFADDR, _IFREQ = struct.Struct("4sI"), 0x8915, struct.Struct("256s")
"""An address and a port; how Linux is asked for the address of an interface (netdevice(7))."""

_SHARED = "/proc/self/ns/net", "/proc/self/ns/pid"
"""Namespaces of Linux (namespaces(7))."""

Lines = Mapping[int, socket.socket]

Tell = Callable[[bytes], list[bytes]]
"""A collective: what each rank says, in as many bytes as the others, in the order of the group."""


_connected: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""All lines of this process. One that it forks off, such as a loader's worker, would keep them open when it is gone."""


def _leave_to_the_parent() -> None:
    hang_up(dict(enumerate(_connected)))


if hasattr(os, "register_at_fork"):  # not on every system
    os.register_at_fork(after_in_child=_leave_to_the_parent)


def machine() -> int:
    """A number of what processes that reach one another share: the machine's last start, its network, its processes.

    Containers of one machine may have networks and process ids of their own.
    """
    try:
        shared = Path("/proc/sys/kernel/random/boot_id").read_text() + "".join(map(os.readlink, _SHARED))
    except OSError:
        return 0
    return int.from_bytes(hashlib.sha256(shared.encode()).digest()[:7])


class _Line(socket.socket):
    """One that is closed when nobody has it any more: a group ends without a word, or with its process."""

    def __del__(self) -> None:
        self.close()


class Near:
    """Sockets of the kernel between processes of one machine; messages keep their borders.

    Args:
        pids: of the ranks, as this process sees them: who connects must be one of them.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    def open(self, word: bytes) -> tuple[socket.socket, bytes]:
        """Where others may connect, and what they need to know besides the word; OSError if that cannot be."""
        with contextlib.ExitStack() as undo:
            try:
                door = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            except AttributeError as error:  # not on every system
                raise OSError("no sockets of the kernel") from error
            door.bind(self._address(word))
            door.listen(1024)
            undo.pop_all()
        return door, b""

    def reach(self, word: bytes, place: bytes, within: float) -> socket.socket:
        """Connect to the door of another rank, within so many seconds; OSError if that cannot be."""
        with contextlib.ExitStack() as undo:
            line = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            line.settimeout(within)
            line.connect(self._address(word))
            undo.pop_all()
        return line

    def knows(self, line: socket.socket, rank: int | None = None) -> bool:
        """Whether a member of the group is at the other end; if given, this one."""
        pid, *_ = _PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return pid in self._pids if rank is None else pid == self._pids[rank]

    def _address(self, word: bytes) -> bytes:
        """An abstract one, which no file system holds."""
        return b"\0torchshard-" + word.hex().encode()


class Far:
    """TCP between machines: bytes without borders."""

    def open(self, word: bytes) -> tuple[socket.socket, bytes]:
        """As of Near."""
        host = _own_address()
        door = socket.create_server((host, 0), backlog=1024)
        return door, _IPV4.pack(socket.inet_aton(host), door.getsockname()[1])

    def reach(self, word: bytes, place: bytes, within: float) -> socket.socket:
        """As of Near."""
        host, port = _IPV4.unpack(place)
        line = socket.create_connection((socket.inet_ntoa(host), port), within)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return line

    def knows(self, line: socket.socket, rank: int | None = None) -> bool:
        """As of Near; the word says all."""
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return True


def connect(group: dist.ProcessGroup, places: Near | Far | None, limit: timedelta, tell: Tell | None = None) -> Lines:
    """Rank -> a socket to it, for all other ranks in their order; nothing, on all ranks, if one is not reached.

    A collective of all ranks. What is sent keeps its order.

    Args:
        group: of the ranks.
        places: where they meet; None: this one does not want to.
        limit: for each message; then TimeoutError.
        tell: how the ranks tell one another where that is, in multiples of 8 bytes; else the group gathers tensors on
            the CPU.

    Raises:
        RuntimeError: a rank is lost.
    """
    found: dict[int, socket.socket] = {}
    tell = tell or partial(_gathered, group=group)
    with contextlib.ExitStack() as undo:
        door, card = _open(places)
        if door is not None:
            undo.enter_context(door)
        told = tell(card)
        if places is None or door is None or not all(map(any, told)):
            return {}
        end = time.monotonic() + min(_TO_CONNECT, limit.total_seconds() / 2)
        with contextlib.suppress(OSError):  # told below
            found.update(_reached(group.rank(), told, places, end))
            found.update(_let_in(group.rank(), told, places, door, end))
        able = len(found) == group.size() - 1
        if not all(map(any, tell(bytes([able] * 8)))):
            for line in found.values():
                undo.enter_context(line)
            return {}
    lines = {rank: _Line(fileno=line.detach()) for rank, line in sorted(found.items())}
    for line in lines.values():
        line.settimeout(limit.total_seconds())
        _connected.add(line)
    return lines


def receive(line: socket.socket, size: int) -> bytearray:
    """So many bytes, of as many messages as that takes.

    Raises:
        OSError: the line is broken, or has ended, or the time is over.
    """
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        got = line.recv_into(rest)
        if not got:
            raise ConnectionError("it has gone")
        rest = rest[got:]
    return data


def shut(lines: Lines) -> None:
    """End them at both ends: whoever waits, or comes later, gets an error."""
    for line in lines.values():
        with contextlib.suppress(OSError):  # it has ended by itself
            line.shutdown(socket.SHUT_RDWR)


def hang_up(lines: Lines) -> None:
    """Close them."""
    for line in lines.values():
        line.close()


def _gathered(said: bytes, group: dist.ProcessGroup) -> list[bytes]:
    mine = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    others = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(others, mine, group=group)
    return [other.numpy().tobytes() for other in others]


def _open(places: Near | Far | None) -> tuple[socket.socket | None, bytes]:
    """The door of this rank, and what the others are told of it: its word and its place; zeros if it has none."""
    word, card = os.urandom(16), bytearray(16 + _IPV4.size)
    door = None
    with contextlib.suppress(OSError):
        if places is not None:
            door, place = places.open(word)
            card[: 16 + len(place)] = word + place
    return door, bytes(card)


def _reached(rank: int, cards: Sequence[bytes], places: Near | Far, end: float) -> Iterator[tuple[int, socket.socket]]:
    """Connect to the ranks below, which listen and may let this one in later."""
    for other in range(rank):
        word, place = cards[other][:16], cards[other][16:]
        line = places.reach(word, place, _until(end))
        yield other, line
        line.sendall(_GREETING.pack(rank, word))


def _let_in(
    rank: int, cards: Sequence[bytes], places: Near | Far, door: socket.socket, end: float
) -> Iterator[tuple[int, socket.socket]]:
    """Those above; a stranger is left outside."""
    missing = set(range(rank + 1, len(cards)))
    while missing:
        door.settimeout(_until(end))
        line, _ = door.accept()
        with contextlib.ExitStack() as undo:
            undo.enter_context(line)
            line.settimeout(min(_TO_GREET, _until(end)))
            other, word = _greeting(line) if places.knows(line) else (None, b"")
            if other in missing and word == cards[rank][:16] and places.knows(line, other):
                missing.remove(other)
                undo.pop_all()
                yield other, line


def _greeting(line: socket.socket) -> tuple[int | None, bytes]:
    try:
        other, word = _GREETING.unpack(receive(line, _GREETING.size))
    except OSError:  # a stranger, who has gone, or says nothing
        return None, b""
    return other, word


def _until(end: float) -> float:
    """Seconds that are left; TimeoutError if none are."""
    if (left := end - time.monotonic()) <= 0:
        raise TimeoutError("not all ranks have come")
    return left


def _own_address() -> str:
    """As gloo finds it: of the first interface that GLOO_SOCKET_IFNAME names, else of the host's name."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not name:
        return socket.gethostbyname(socket.gethostname())
    try:
        import fcntl
    except ImportError as error:  # not on every system
        raise OSError("the address of an interface is not known") from error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking.fileno(), _IFADDR, _IFREQ.pack(name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])
