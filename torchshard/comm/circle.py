"""Ranks that exchange parts of tensors: who they are, how they reach one another, and what they have agreed to."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from torchshard._torch import device_carried, group_of_members
from torchshard.comm.agreement import Agreement
from torchshard.errors import RankMismatchError


@dataclass(slots=True)
class Circle:
    """Some ranks; made by `circle_of`.

    Attributes:
        ranks: global ranks, ascending.
        rank: this one.
        group: the process group of all of them.
        device: where messages lie while they travel.
        agreement: on what is exchanged.
        exchanges: how many there have been; the same on every rank that follows the others.
        near: process ids by rank if all can read one another's memory, else empty; None until somebody asks.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup
    device: torch.device
    agreement: Agreement
    exchanges: int = 0
    near: Mapping[int, int] | None = None

    def agree(self, text: str) -> None:
        """Return when all ranks are about to do what `text` says; asked each time, as ranks that have exchanged the
        same things before may still take them in another order.

        Raises:
            RankMismatchError: one of them is about to do something else, or does not come.
        """
        try:
            self.agreement.compare(text, self.exchanges)
        except RankMismatchError:
            forget(self)
            raise
        except BaseException as error:  # an interrupt: the others may have seen this rank come, or not
            self.refuse(error)
            raise
        self.exchanges += 1

    def refuse(self, error: BaseException, under_way: bool = False) -> None:
        """This rank takes no part in the next exchange, or not any more in the one under way: the others raise.

        Args:
            error: why; to be raised here.
            under_way: all ranks have agreed to the exchange already.
        """
        forget(self)
        self.agreement.refuse(error, self.exchanges - under_way)


@dataclass(slots=True)
class _Known:
    """Circles for as long as the default process group lives."""

    world: dist.ProcessGroup | None = None
    circles: dict[tuple[tuple[int, ...], str], Circle] = field(default_factory=dict)


_known = _Known()


def circle_of(ranks: tuple[int, ...], device: torch.device, group: dist.ProcessGroup | None = None) -> Circle:
    """The circle of these ranks, ascending, of which this is one; all of them ask for it at the same point.

    Args:
        ranks: global ranks.
        device: what is sent lies on devices of this type; it travels on another one if the group's transport takes
            nothing from there, as NCCL nothing from a CPU.
        group: a process group to use if it is of exactly these ranks; else one is made when first needed.
    """
    if _known.world is not dist.group.WORLD:
        _known.world = dist.group.WORLD
        _known.circles.clear()
    found = _known.circles.get((ranks, device.type))
    if found is None:
        if group is None or sorted(dist.get_process_group_ranks(group)) != list(ranks):
            group = _group_of(ranks, device)
        wire = device_carried(group, device)
        made = Circle(ranks, dist.get_rank(), group, wire, Agreement(group, wire, "state dicts"))
        found = _known.circles[ranks, device.type] = made
    return found


@contextlib.contextmanager
def refusing(ranks: Sequence[int], device: torch.device, group: dist.ProcessGroup) -> Iterator[None]:
    """What this rank prepares for an exchange: where it fails, the others, which wait for this rank, are told why.

    Args:
        ranks: global ones, in any order.
        device: see `circle_of`.
        group: of exactly these ranks.
    """
    try:
        yield
    except BaseException as error:
        circle_of(tuple(sorted(ranks)), device, group).refuse(error)
        raise


def forget(circle: Circle) -> None:
    """Let go of a circle whose ranks have come apart, on all of them: those that still live may form it anew."""
    _known.circles = {key: one for key, one in _known.circles.items() if one is not circle}


def _group_of(ranks: tuple[int, ...], device: torch.device) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is not None and list(ranks) == dist.get_process_group_ranks(world):
        return world
    return group_of_those(ranks, device)


def group_of_those(ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """A process group made by its members alone; see `group_of_members`.

    Raises:
        RankMismatchError: some of them do not come.
    """
    try:
        return group_of_members(ranks, device)
    except TimeoutError as error:
        late = error.args
        raise RankMismatchError(
            f"rank {dist.get_rank()} waits in vain for other ranks to make a group with it",
            expected=f"the ranks {list(ranks)}",
            got=f"not rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}",
            fix="make the same calls on all ranks of a mesh, and on the one that src_rank= names",
        ) from error


def this_rank() -> int:
    """Global; 0 in a process without process groups."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of all ranks; 1 in a process without process groups."""
    return dist.get_world_size() if dist.is_initialized() else 1
