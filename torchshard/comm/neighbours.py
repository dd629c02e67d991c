"""Ranks on one machine read one another's memory: one copy, where a message takes one into a socket and one out of it.

Linux lets a process read the memory of another one of the same user (process_vm_readv). Whether it does is tried out by
all ranks, once: containers and Yama may forbid it, and a process id means another process elsewhere. So each rank
publishes a random word and where it lies, and is read only by those that find it there.

An exchange is then three steps: each rank tells the others where the parts lie that they lack; all read; each says that
it has. Only then may the parts change again.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.comm.circle import Circle
from torchshard.comm.lines import machine
from torchshard.comm.spans import Addresses, Block, Spans, calls, extent, spans
from torchshard.comm.transfers import Views, finish, start

SWITCH = "TORCHSHARD_READ_NEIGHBOURS"
"""Environment variable; 0 on any rank: ranks never read one another's memory."""

_CPU = torch.device("cpu")
_WHAT = "the memory of another rank"

_MOST = 1024
"""Pairs of address and length in a call: IOV_MAX of Linux."""

_LONGEST = 64 * 2**20
"""Bytes of a call that has several; the system stops at 2 GiB."""

_SHORT = 256
"""Bytes of a span below which it is faster to read what lies between spans too, and to copy from there."""

_NEAR = 1024
"""Bytes from one span to the next up to which that is so: a span costs about as much as 1 KiB."""

_FEW = 256
"""Spans that are not worth the detour."""

_STAGED = 4 * 2**20
"""Bytes that are read so at a time."""


def neighbours(circle: Circle) -> Mapping[int, int]:
    """Rank -> process id, if each rank of the circle can read the memory of all others; else nothing, on all ranks.

    Args:
        circle: ranks that have agreed to exchange something, so that all of them ask.

    Raises:
        RankMismatchError: a rank is lost; names it.
    """
    if circle.near is None:
        with circle.agreement.waiting_for(_WHAT):
            pids = process_ids(circle.group, circle.device)
        circle.near = dict(zip(circle.ranks, pids, strict=True)) if pids else {}
    return circle.near


def process_ids(group: dist.ProcessGroup, device: torch.device) -> tuple[int, ...]:
    """Of the ranks of a group, in its order, if each can read the memory of all others; else none, on all ranks.

    A collective of all ranks.

    Args:
        group: the process group.
        device: where it is that they would read.

    Raises:
        RuntimeError: a rank is lost.
    """
    if device.type != "cpu" or dist.get_backend(group) == "fake":
        return ()
    word = _word(os.getpid())
    mine = torch.tensor([machine(), os.getpid(), word.data_ptr(), *word.tolist()], dtype=torch.int64, device=_CPU)
    others = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(others, mine, group=group)
    told = [other.tolist() for other in others]
    able = torch.tensor([float(_allowed() and all(map(_readable, told)))], device=_CPU)
    dist.all_reduce(able, dist.ReduceOp.MIN, group=group)
    return tuple(pid for _, pid, *_ in told) if able else ()


def fetch(out: Views, into: Views, circle: Circle, pids: Mapping[int, int]) -> None:
    """Return when all parts are where they belong, and nobody needs this rank's parts any more.

    Args:
        out: rank -> the parts for it.
        into: rank -> where its parts belong, of the same shapes and dtypes and in the same order as that rank has them.
        circle: all ranks concerned; they have agreed.
        pids: of the others, by rank.

    Raises:
        RankMismatchError: a rank is lost; names it.
    """
    held = {peer: [_in_reach(view) for view in views] for peer, views in out.items()}
    told = {peer: [_places(views)] for peer, views in held.items()}
    lengths = {peer: sum(1 + view.ndim for view in views) for peer, views in into.items()}
    heard = {peer: [torch.empty(length, dtype=torch.int64, device=_CPU)] for peer, length in lengths.items()}
    finish([start(told, heard, _CPU, circle)], _CPU, circle)
    for peer, views in into.items():
        try:
            _read(pids[peer], views, heard[peer][0].tolist())
        except OSError as error:
            circle.agreement.blame(_WHAT, error)
    done = torch.ones(1, device=_CPU)
    finish([start({p: [done] for p in into}, {p: [done.clone()] for p in out}, _CPU, circle)], _CPU, circle)


def _in_reach(view: Tensor) -> Tensor:
    """The same values in memory that can be read from outside: the driver's pinned memory cannot."""
    view = view.detach().resolve_conj().resolve_neg().cpu()
    return view.clone() if view.is_pinned() else view


def _places(views: Sequence[Tensor]) -> Tensor:
    blocks = map(_block, views)
    numbers = [n for block in blocks for n in (block.address, *block.strides)]
    return torch.tensor(numbers, dtype=torch.int64, device=_CPU)


def _block(view: Tensor) -> Block:
    size = view.element_size()
    return Block(view.data_ptr(), tuple([step * size for step in view.stride()]))


def _read(pid: int, views: Sequence[Tensor], places: Sequence[int]) -> None:
    """Fill the views with the blocks of the process that lie at these places."""
    simple: list[Spans] = []
    at = 0
    for view in views:
        address, *strides = places[at : at + 1 + view.ndim]
        at += 1 + view.ndim
        there = Block(address, tuple(strides))
        if view.device.type != "cpu" or view.is_pinned():
            landing = torch.empty(view.shape, dtype=view.dtype, device=_CPU)
            _run(pid, _planned(pid, landing, there))
            view.copy_(landing)
        else:
            simple += _planned(pid, view, there)
    _run(pid, simple)


def _planned(pid: int, view: Tensor, there: Block) -> list[Spans]:
    """The spans to read for one view; none where it has been filled another way."""
    found = spans(view.shape, view.element_size(), _block(view), there)
    apart = extent(view.shape, view.element_size(), there) // len(found.here)
    if found.length >= _SHORT or len(found.here) <= _FEW or apart > _NEAR:
        return [found]
    _read_with_gaps(pid, view, there)
    return []


def _read_with_gaps(pid: int, view: Tensor, there: Block) -> None:
    """Read all that lies from the first element to the last, some MiB at a time, and copy out what is wanted."""
    dim = max(range(view.ndim), key=there.strides.__getitem__)
    step = max(there.strides[dim], 1)
    rows = max(1, _STAGED // step)
    for begin in range(0, view.shape[dim], rows):
        part = view.narrow(dim, begin, min(rows, view.shape[dim] - begin))
        block = Block(there.address + begin * there.strides[dim], there.strides)
        landing = torch.empty(extent(part.shape, view.element_size(), block), dtype=torch.uint8, device=_CPU)
        _run(pid, [spans(landing.shape, 1, _block(landing), Block(block.address, (1,)))])
        strides = [n // view.element_size() for n in there.strides]
        part.copy_(landing.view(view.dtype).as_strided(part.shape, strides))


def read(pid: int, here: int, there: int, nbytes: int) -> None:
    """Fill memory of this process with what lies at an address of another.

    Raises:
        OSError: the process is gone, or its memory.
    """
    _call(pid, np.array([[here, nbytes]], np.uint64), np.array([[there, nbytes]], np.uint64))


def _run(pid: int, copies: Sequence[Spans]) -> None:
    for here, there in calls(copies, _MOST, _LONGEST):
        _call(pid, here, there)


def _call(pid: int, here: Addresses, there: Addresses) -> None:
    """Read; here and there are rows of (address, bytes) with the same sum.

    Raises:
        OSError: the process is gone, or its memory.
    """
    wanted = int(here[:, 1].sum())
    while wanted:
        got = _process_vm_readv(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
        if got < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"process_vm_readv of process {pid}: {os.strerror(code)}")
        wanted -= got
        if wanted and (not got or len(here) > 1 or len(there) > 1):
            raise OSError(f"process_vm_readv of process {pid}: {wanted} bytes fewer than asked for")
        here, there = (side + np.array([[got, -got]]).astype(np.uint64) for side in (here, there))


def _allowed() -> bool:
    """Whether the user lets ranks read one another's memory."""
    return os.environ.get(SWITCH, "1") != "0"


def _readable(told: Sequence[int]) -> bool:
    where, pid, address, *word = told
    found = torch.empty(len(word), dtype=torch.int64, device=_CPU)
    if _process_vm_readv is None or where != machine():
        return False
    try:
        _run(pid, [spans(found.shape, 8, _block(found), Block(address, (8,)))])
    except OSError:
        return False
    return found.tolist() == word


@cache
def _word(pid: int) -> Tensor:
    """What this process is known by; one that was forked off has its own."""
    return torch.frombuffer(bytearray(os.urandom(32)), dtype=torch.int64)


_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
_process_vm_readv: Any = getattr(_libc, "process_vm_readv", None)
if _process_vm_readv is not None:
    _process_vm_readv.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
    ]  # fmt: skip
    _process_vm_readv.restype = ctypes.c_ssize_t
