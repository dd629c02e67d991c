"""Collectives of tensors on the CPU between the ranks of one machine, by words and in one another's memory.

gloo takes about a millisecond for a small tensor, in which a rank of one machine could say it to another one thirty
times. All of it happens in the call; there is nothing to wait for.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchshard import _torch
from torchshard.comm.group import Group
from torchshard.comm.living import living
from torchshard.comm.lost import raise_lost
from torchshard.comm.neighbours import process_ids
from torchshard.comm.reach import Reach
from torchshard.comm.transport import Sender, Transport
from torchshard.comm.words import Words, words_of

_CPU = torch.device("cpu")
_WHAT = "a collective of DTensors"

_PLAIN = Tensor, nn.Parameter
"""Classes of tensors with memory; a rank may hold a piece as the one, and another as the other."""

_known: "weakref.WeakKeyDictionary[dist.ProcessGroup, Nearby | None]" = weakref.WeakKeyDictionary()
"""A fact about each group, asked for by all its ranks in the same order."""

_apart = threading.local()


def nearby(group: Group, x: Tensor) -> Sender | None:
    """What sends such a tensor, if the ranks of its group are near one another; else None, on all ranks.

    The first call for a group is a collective, that no mode sees.

    Args:
        group: who takes part.
        x: on the CPU, and not traced; else None.

    Raises:
        RankMismatchError: a rank is lost; names it.
    """
    if group.size == 1 or not x.is_cpu or x.__class__ not in _PLAIN or getattr(_apart, "on", False):
        return None
    if _torch.is_traced(x):
        return None
    process_group = living(group)
    try:
        near = _known[process_group]
    except KeyError:
        near = _known[process_group] = _found(process_group)
    return Watched(group, near) if near and _torch.has_modes() else near


@contextmanager
def by_transport() -> Iterator[None]:
    """Send by the transport all the same: what is begun in this context need not be over when it has begun."""
    before, _apart.on = getattr(_apart, "on", False), True
    try:
        yield
    finally:
        _apart.on = before


def _found(group: dist.ProcessGroup) -> "Nearby | None":
    if not _torch.is_gloo(group) or (words := words_of(group, _CPU)) is None:
        return None
    try:
        with _torch.outside_of_traces():
            pids = process_ids(group, _CPU)
    except RuntimeError as error:
        raise_lost(group, _WHAT, error)
    return Nearby(Reach(group.rank(), pids, words), words) if pids else None


class Nearby:
    """A Sender between ranks that are in reach of one another.

    Args:
        reach: of the ranks.
        words: that they say.
    """

    keeps_nans: ClassVar[bool] = True

    def __init__(self, reach: Reach, words: Words) -> None:
        self._reach, self._words = reach, words

    def all_gather(self, x: Tensor) -> Tensor:
        """See Sender."""
        with self._making("all_gather") as (reach, what):
            result = x.new_empty((reach.ranks * x.shape[0], *x.shape[1:]))
            slots = result.view(reach.ranks, x.numel()).unbind()
            slots[reach.rank].copy_(x.view(-1))
            reach.give(what, dict.fromkeys(reach.others, x), {other: slots[other] for other in reach.others})
        return result

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """See Sender."""
        with self._making(f"all_reduce {op}") as (reach, what):
            result = x.clone()
            reach.reduce(result, op, what)
        return result

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        """See Sender."""
        with self._making(f"reduce_scatter {op}") as (reach, what):
            parts = x.view(reach.ranks, x.shape[0] // reach.ranks, *x.shape[1:]).unbind()
            return reach.reduce_given({other: parts[other] for other in reach.others}, parts[reach.rank], op, what)

    def all_to_all(self, x: Tensor, taken: Sequence[int], given: Sequence[int]) -> Tensor:
        """See Sender."""
        with self._making("all_to_all") as (reach, what):
            result = x.new_empty(sum(taken))
            out, into = x.split_with_sizes(list(given)), result.split_with_sizes(list(taken))
            into[reach.rank].copy_(out[reach.rank])
            given_to, taken_of = ({other: s[other] for other in reach.others if len(s[other])} for s in (out, into))
            reach.give(what, given_to, taken_of)
        return result

    def broadcast(self, x: Tensor, seat: int) -> Tensor:
        """See Sender."""
        with self._making("broadcast") as (reach, what):
            result = x.clone()
            if seat == reach.rank:
                reach.give(what, dict.fromkeys(reach.others, x), {})
            else:
                reach.give(what, {}, {seat: result})
        return result

    @contextmanager
    def _making(self, what: str) -> Iterator[tuple[Reach, str]]:
        """Gradients of DTensors cross ranks by formulas of their own, so there is no history."""
        seen = _torch.spanned(f"gloo:{what.split()[0]}")
        with self._words.failing(_WHAT), seen, torch.no_grad():
            yield self._reach, what


class Watched(Transport):
    """What modes see: torch's functional collective, at the end of which the ranks that are near do the same.

    Args:
        group: who takes part.
        near: does it.
    """

    __slots__ = ("_near",)
    keeps_nans: ClassVar[bool] = True

    def __init__(self, group: Group, near: Nearby) -> None:
        super().__init__(group)
        self._near = near

    def _call(self, collective: Any, x: Tensor, *args: Any) -> Tensor:
        answers = {name: partial(answer, self._near) for name, answer in _ANSWERS.items()}
        with _torch.beneath_modes(answers):
            return super()._call(collective, x, *args)


_ANSWERS: Mapping[str, Callable[..., Tensor]] = {
    "_c10d_functional.all_gather_into_tensor.default": lambda near, x, size, name: near.all_gather(x),
    "_c10d_functional.all_reduce.default": lambda near, x, op, name: near.all_reduce(x, op),
    "_c10d_functional.reduce_scatter_tensor.default": lambda near, x, op, size, name: near.reduce_scatter(x, op),
    "_c10d_functional.all_to_all_single.default": lambda near, x, taken, given, name: near.all_to_all(x, taken, given),
    "_c10d_functional.broadcast.default": lambda near, x, seat, name: near.broadcast(x, seat),
}
