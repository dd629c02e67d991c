"""Messages between single ranks: what each lacks goes straight to where it belongs, with as few copies as can be.

Parts that are large travel on their own, from the memory of one tensor into that of another where both are dense. All
small parts for one rank travel together.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard._torch import bytes_of
from torchshard.comm.circle import Circle

LARGE = 64 * 1024
"""Bytes from which a part travels on its own."""

_ALIGNED = 16
_TAG = 0x7453
_GLANCE = 0.5
_WHAT = "parts of tensors"

Views = Mapping[int, Sequence[Tensor]]


@dataclass(slots=True)
class Transfer:
    """Messages under way; made by `start`.

    Attributes:
        works: of the messages.
        after: brings what has landed elsewhere to where it belongs.
        staged: bytes of memory that exist for the journey only.
    """

    works: Sequence[dist.Work]
    after: Sequence[Callable[[], object]]
    staged: int


def start(
    out: Views,
    into: Views,
    device: torch.device,
    circle: Circle,
    joins: Sequence[Callable[[], object]] = (),
    landings: int = 0,
) -> Transfer:
    """Send and receive, without waiting.

    Args:
        out: rank -> the parts for it.
        into: rank -> where its parts belong, of the same shapes and dtypes and in the same order as that rank sends.
        device: where messages lie while they travel.
        circle: all ranks concerned; they have agreed.
        joins: what brings parts to where they belong for which `into` gives memory for the journey only.
        landings: bytes of that memory.

    Raises:
        RankMismatchError: a rank is lost; names it.
    """
    works: list[dist.P2POp] = []
    tag = _TAG + circle.agreement.number  # what ranks that came apart still wait for is for nobody else
    after = [*joins]
    staged = landings
    for peer, views in into.items():
        messages, finish, extra = _incoming(views, device)
        after += finish
        staged += extra
        works += [dist.P2POp(dist.irecv, m, peer, circle.group, tag) for m in messages]
    for peer, views in out.items():
        messages, extra = _outgoing(views, device)
        staged += extra
        works += [dist.P2POp(dist.isend, m, peer, circle.group, tag) for m in messages]
    with circle.agreement.waiting_for(_WHAT):  # a connection may be known to be broken
        started = dist.batch_isend_irecv(works) if works else []
    return Transfer(started, after, staged)


def finish(transfers: Sequence[Transfer], device: torch.device, circle: Circle) -> None:
    """Return when all of it is where it belongs.

    Raises:
        RankMismatchError: a rank is lost; names it.
    """
    _wait([work for transfer in transfers for work in transfer.works], device, circle)
    for transfer in transfers:
        for last in transfer.after:
            last()


def _wait(works: Sequence[dist.Work], device: torch.device, circle: Circle) -> None:
    """Wait for all; on a CPU with an eye on whether another rank has found something.

    A message of gloo cannot be waited for in slices: its first time-out breaks every connection. So another thread
    waits, without a limit of its own.
    """
    if device.type != "cpu":
        for work in works:
            work.wait()
        return
    failed: list[Exception] = []
    done = threading.Event()

    def wait() -> None:
        try:
            for work in works:
                work.wait()
        except Exception as error:
            failed.append(error)
        done.set()

    threading.Thread(target=wait, daemon=True, name="torchshard transfer").start()
    while not done.wait(_GLANCE):
        circle.agreement.check(circle.exchanges, _WHAT)
    if failed:
        circle.agreement.check(circle.exchanges, _WHAT, failed[0])
        circle.agreement.blame(_WHAT, failed[0])


def _outgoing(views: Sequence[Tensor], device: torch.device) -> tuple[list[Tensor], int]:
    """Messages, and how many of their bytes are copies."""
    small = [view for view in views if view.nbytes < LARGE]
    large = [view for view in views if view.nbytes >= LARGE]
    dense = [_dense(view, device) for view in large]
    staged = sum(d.nbytes for d, view in zip(dense, large, strict=True) if d.data_ptr() != view.data_ptr())
    messages = [bytes_of(d) for d in dense]
    if small:
        packed, places = _room(small, device)
        for view, place in zip(small, places, strict=True):
            place.copy_(view)
        messages.append(packed)
        staged += packed.nbytes
    return messages, staged


def _incoming(views: Sequence[Tensor], device: torch.device) -> tuple[list[Tensor], list[Callable[[], object]], int]:
    """Messages to receive into; what brings their contents to where they belong; how many bytes need that."""
    small = [view for view in views if view.nbytes < LARGE]
    messages: list[Tensor] = []
    landed: list[tuple[Tensor, Tensor]] = []
    for view in views:
        if view.nbytes >= LARGE:
            direct = view.is_contiguous() and view.device.type == device.type
            landing = view if direct else torch.empty(view.shape, dtype=view.dtype, device=device)
            messages.append(bytes_of(landing))
            if not direct:
                landed.append((view, landing))
    staged = sum(landing.nbytes for _, landing in landed)
    if small:
        packed, places = _room(small, device)
        messages.append(packed)
        landed += zip(small, places, strict=True)
        staged += packed.nbytes
    return messages, [partial(view.copy_, landing) for view, landing in landed], staged


def _room(views: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Memory for all of the views one after another, and the place of each in it."""
    starts, end = [], 0
    for view in views:
        starts.append(end)
        end += -(-view.nbytes // _ALIGNED) * _ALIGNED
    packed = torch.empty(end, dtype=torch.uint8, device=device)
    places = [
        packed[start : start + view.nbytes].view(view.dtype).view(view.shape)
        for start, view in zip(starts, views, strict=True)
    ]
    return packed, places


def _dense(x: Tensor, device: torch.device) -> Tensor:
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous().to(device) if x.device.type != device.type else x.contiguous()
