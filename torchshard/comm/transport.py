"""The few collectives that everything is made of, of one tensor each, by the transport of the group.

They are torch's functional ones, `torch.ops._c10d_functional`, so that compiled graphs contain them.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn, Protocol

import torch.distributed as dist
from torch import Tensor

from torchshard._torch import (
    below_autograd,
    functional_collectives,
    group_named,
    is_gloo,
    is_traced,
    read_after_waits,
    run_collectives_once,
)
from torchshard.comm.group import Group
from torchshard.comm.lost import NO_LOSS, raise_lost

_c10d = functional_collectives()


class Sender(Protocol):
    """Sends a tensor without gaps; the result, in memory of its own, is there when it has been waited for.

    Attributes:
        keeps_nans: whether max and min have a NaN that any rank has.
    """

    keeps_nans: ClassVar[bool]

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, joined along the first dim."""

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """The reduction of all ranks' tensors; `op` is a name that torch's functional collectives know."""

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        """This rank's part, along the first dim, of their reduction; the parts are of one length."""

    def all_to_all(self, x: Tensor, taken: Sequence[int], given: Sequence[int]) -> Tensor:
        """What each rank gives to this one, one after another; so many elements of `x` are given to each."""

    def broadcast(self, x: Tensor, seat: int) -> Tensor:
        """The tensor of one rank of the process group."""


class Transport:
    """By the transport of a group; traceable.

    Args:
        group: who takes part.

    Raises:
        RankMismatchError: a rank is lost; names it.
    """

    __slots__ = ("_group",)
    keeps_nans: ClassVar[bool] = False

    def __init__(self, group: Group) -> None:
        self._group = group

    def all_gather(self, x: Tensor) -> Tensor:
        """See Sender.

        Of GPUs' tensors gloo's goes by the host: this form of it ends the process (seen with 2.11).
        """
        if x.is_cpu or is_traced(x) or not is_gloo(group_named(self._group.name), x.device):
            return self._call(_c10d.all_gather_into_tensor, x, self._group.size)
        return waited(self.all_gather(x.cpu()), self._group).to(x.device)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """See Sender."""
        return self._call(_c10d.all_reduce, x, op)

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        """See Sender."""
        return self._call(_c10d.reduce_scatter_tensor, x, op, self._group.size)

    def all_to_all(self, x: Tensor, taken: Sequence[int], given: Sequence[int]) -> Tensor:
        """See Sender."""
        return self._call(_exchanged, x, taken, given)

    def broadcast(self, x: Tensor, seat: int) -> Tensor:
        """See Sender."""
        return self._call(_c10d.broadcast, x, seat)

    def _call(self, collective: Any, x: Tensor, *args: Any) -> Tensor:
        if self._group.size == 1:  # what comes is what was given
            return x.clone()
        try:
            with computing(x):
                sent: Tensor = collective(x, *args, self._group.name)
        except RuntimeError as error:  # a connection that is known to be broken
            _blame(self._group, error, x)
        return sent


def waited(x: Tensor, group: Group) -> Tensor:
    """The tensor, once the transport has filled it.

    Raises:
        RankMismatchError: a rank is lost; names it.
    """
    if group.size == 1:
        return x
    if x.__class__ is not Tensor:
        run_collectives_once()
        read_after_waits()
    try:
        with computing(x):
            here: Tensor = _c10d.wait_tensor(x)
    except RuntimeError as error:
        _blame(group, error, x)
    return here


def computing(x: Tensor) -> AbstractContextManager[object]:
    """Where a collective is called; gradients of DTensors cross ranks by formulas of their own."""
    return below_autograd() if x.__class__ is Tensor else nullcontext()


def read(x: Tensor) -> Tensor:
    """In a trace: a tensor, and whatever made it, that no pass over the graph takes for unused, as it is waited for."""
    run_collectives_once()
    read_after_waits()
    return _c10d.wait_tensor(x)  # type: ignore[no-any-return]


def _exchanged(x: Tensor, taken: Sequence[int], given: Sequence[int], name: str) -> Tensor:
    try:
        sent: Tensor = _c10d.all_to_all_single(x, taken, given, name)
    except RuntimeError:
        if any(given) or dist.get_backend(group_named(name)) != "fake":
            raise
        return x.new_zeros(sum(taken))  # before torch 2.15 a fake group wants something to copy to what is taken
    return sent


def _blame(group: Group, error: RuntimeError, x: Tensor) -> NoReturn:
    if x.__class__ is not Tensor or isinstance(error, NO_LOSS):  # of a trace; of this rank alone
        raise error
    raise_lost(group_named(group.name), "a collective of DTensors", error)
