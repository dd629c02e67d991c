"""Process groups by their names: of a group that was destroyed, torch may give the name to another one."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from torchshard._torch import group_named, guard_attribute
from torchshard.comm.group import Group
from torchshard.errors import ShardingError

_OF_NAME = "of_"
_MESH = "a DTensor's mesh"
_REMAKE = "take x.full_tensor() before destroy_process_group(), and distribute_tensor() that on a new mesh"


def living(group: Group, whose: str = _MESH, fix: str = _REMAKE) -> dist.ProcessGroup:
    """torch's process group of this name, which has the ranks that `group` was made for.

    Args:
        group: as it was made.
        whose: it is, in an error.
        fix: what to do about that.

    Raises:
        ShardingError: it has been destroyed, and none like it has been made.
    """
    try:
        found = group_named(group.name)
    except RuntimeError as error:
        raise destroyed("none", whose=whose, fix=fix) from error
    if group.made is not None and found is not group.made():
        seat = group.position if group.seats is None else group.seats[group.position]
        ranks = dist.get_process_group_ranks(found)
        if (*ranks,) != group.members or found.rank() != seat:
            got, was = _said(ranks, ranks[found.rank()], "is"), _said(group.members, group.members[seat], "was")
            raise destroyed(got, was, whose, fix)
    return found


class _Seats:
    """Who sits where in the group that has a name now, by an attribute for each name, as guards of graphs ask."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, Any]] = {}

    def __getattr__(self, attribute: str) -> tuple[Any, ...] | None:
        if not attribute.startswith(_OF_NAME):
            raise AttributeError(attribute)
        world = dist.group.WORLD
        if world is None:
            return None
        made, found = self._known.get(attribute, (None, None))
        if made is None or made() is not world:
            found = _seated(bytes.fromhex(attribute.removeprefix(_OF_NAME)).decode())
            self._known[attribute] = weakref.ref(world), found
        return found  # type: ignore[no-any-return]

    def __reduce__(self) -> str:
        return "seats"


seats = _Seats()


def _seated(name: str) -> tuple[Any, ...] | None:
    try:
        group = group_named(name)
    except RuntimeError:
        return None
    return *dist.get_process_group_ranks(group), group.rank()


def living_in_graphs(group: Group) -> None:
    """The same of a group that a graph being made is to send to: it has the name alone, and is for these ranks only.

    Raises:
        ShardingError: as `living`.
    """
    living(group)
    guard_attribute(__name__, f"seats.{_OF_NAME}{group.name.encode().hex()}")


def displaced(ranks: Sequence[int], was: int | None) -> ShardingError | None:
    """What is wrong where this process, which was that one of these ranks, or none, is another one by now."""
    now = dist.get_rank() if dist.is_initialized() else was
    if now == was or (was is None and now not in ranks):
        return None
    return destroyed(_said(range(dist.get_world_size()), now, "is"), _said(ranks, was, "was"))


def _said(ranks: Sequence[int], mine: int | None, verb: str) -> str:
    return f"of the ranks {[*ranks]}, of which this {verb} {'none' if mine is None else f'rank {mine}'}"


def destroyed(got: str, was: str = "", whose: str = _MESH, fix: str = _REMAKE) -> ShardingError:
    """What is wrong where a process group is no more: what has its name by now, what it was, whose, what to do."""
    return ShardingError(
        f"The process group of {whose} has been destroyed.",
        expected=f"that group, or one like it{was and f': {was}'}",
        got=got if got == "none" else f"one {got}",
        fix=fix,
    )
