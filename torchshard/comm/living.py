"""Process groups by their names: of a group that was destroyed, torch may give the name to another one."""

from collections.abc import Sequence

import torch.distributed as dist

from torchshard._torch import group_named
from torchshard.comm.group import Group
from torchshard.errors import ShardingError


def living(group: Group) -> dist.ProcessGroup:
    """torch's process group of this name, which has the ranks that `group` was made for.

    Raises:
        ShardingError: it has been destroyed, and none like it has been made.
    """
    try:
        found = group_named(group.name)
    except RuntimeError as error:
        raise _destroyed("none") from error
    if group.made is not None and found is not group.made():
        seat = group.position if group.seats is None else group.seats[group.position]
        ranks = dist.get_process_group_ranks(found)
        if (*ranks,) != group.members or found.rank() != seat:
            raise _destroyed(_said(ranks, ranks[found.rank()], "is"), _said(group.members, group.members[seat], "was"))
    return found


def displaced(ranks: Sequence[int], was: int | None) -> ShardingError | None:
    """What is wrong where this process, which was that one of these ranks, or none, is another one by now."""
    now = dist.get_rank() if dist.is_initialized() else was
    if now == was or (was is None and now not in ranks):
        return None
    return _destroyed(_said(range(dist.get_world_size()), now, "is"), _said(ranks, was, "was"))


def _said(ranks: Sequence[int], mine: int | None, verb: str) -> str:
    return f"of the ranks {[*ranks]}, of which this {verb} {'none' if mine is None else f'rank {mine}'}"


def _destroyed(got: str, was: str = "") -> ShardingError:
    return ShardingError(
        "The process group of a DTensor's mesh has been destroyed.",
        expected=f"that group, or one like it{was and f': {was}'}",
        got=got if got == "none" else f"one {got}",
        fix="take x.full_tensor() before destroy_process_group(), and distribute_tensor() that on a new mesh",
    )
