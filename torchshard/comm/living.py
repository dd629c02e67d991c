"""Process groups by their names: of a group that was destroyed, torch may give the name to another one."""

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
            raise _destroyed(f"one of the ranks {ranks}, of which this is rank {ranks[found.rank()]}", group, seat)
    return found


def _destroyed(got: str, group: Group | None = None, seat: int = 0) -> ShardingError:
    was = "" if group is None else f": of the ranks {[*group.members]}, of which this was rank {group.members[seat]}"
    return ShardingError(
        "The process group of a DTensor's mesh has been destroyed.",
        expected=f"that group, or one like it{was}",
        got=got,
        fix="take x.full_tensor() before destroy_process_group(), and distribute_tensor() that on a new mesh",
    )
