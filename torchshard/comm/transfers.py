"""Messages between single ranks: what each lacks goes straight to where it belongs, with as few copies as can be.

Parts that are large travel on their own, from the memory of one tensor into that of another where both are dense. All
small parts for one rank travel together.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.comm.circle import Circle

LARGE = 64 * 1024
"""Bytes from which a part travels on its own."""

_ALIGNED = 16
_TAG = 0x7453
_GLANCE = 0.5

Views = Mapping[int, Sequence[Tensor]]


def transfer(out: Views, into: Views, device: torch.device, circle: Circle) -> None:
    """Send and receive; return when all is here and all has gone.

    Args:
        out: rank -> the parts for it.
        into: rank -> where its parts belong, of the same shapes and dtypes and in the same order as that rank sends.
        device: where messages lie while they travel.
        circle: all ranks concerned; they have agreed.

    Raises:
        RankMismatchError: a rank is lost; names it.
    """
    works: list[dist.P2POp] = []
    after: list[Callable[[], object]] = []
    for peer, views in into.items():
        messages, finish = _incoming(views, device)
        after += finish
        works += [dist.P2POp(dist.irecv, m, peer, circle.group, _TAG) for m in messages]
    for peer, views in out.items():
        works += [dist.P2POp(dist.isend, m, peer, circle.group, _TAG) for m in _outgoing(views, device)]
    if works:
        try:
            started = dist.batch_isend_irecv(works)
        except RuntimeError as error:  # a connection that is known to be broken
            circle.agreement.blame("a part of a tensor", error)
        _wait(started, device, circle)
    for finish_one in after:
        finish_one()


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
        circle.agreement.check(circle.exchanges, "parts of tensors")
    if failed:
        circle.agreement.check(circle.exchanges, "parts of tensors")
        circle.agreement.blame("parts of tensors", failed[0])


def _outgoing(views: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    small = [view for view in views if view.nbytes < LARGE]
    messages = [_bytes(_dense(view, device)) for view in views if view.nbytes >= LARGE]
    if small:
        packed, places = _room(small, device)
        for view, place in zip(small, places, strict=True):
            place.copy_(view)
        messages.append(packed)
    return messages


def _incoming(views: Sequence[Tensor], device: torch.device) -> tuple[list[Tensor], list[Callable[[], object]]]:
    """Messages to receive into, and what brings their contents to the views that are no message themselves."""
    small = [view for view in views if view.nbytes < LARGE]
    messages: list[Tensor] = []
    finish: list[Callable[[], object]] = []
    for view in views:
        if view.nbytes >= LARGE:
            direct = view.is_contiguous() and view.device.type == device.type
            landing = view if direct else torch.empty(view.shape, dtype=view.dtype, device=device)
            messages.append(_bytes(landing))
            if not direct:
                finish.append(lambda view=view, landing=landing: view.copy_(landing))  # type: ignore[misc]
    if small:
        packed, places = _room(small, device)
        messages.append(packed)
        finish += [lambda v=v, place=place: v.copy_(place) for v, place in zip(small, places, strict=True)]  # type: ignore[misc]
    return messages, finish


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


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
