"""Ranks that are about to do the same say what that is, by one small collective."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from torchshard.comm import collectives
from torchshard.comm.group import Group


def differing(
    text: str, device: torch.device, group: Group, process_group: dist.ProcessGroup
) -> list[tuple[int, str]] | None:
    """What each rank says, with its global rank, where not all say the same; None where they do. Every rank must ask.

    Digests are compared, which are as long on every rank; the texts themselves travel only where these differ.

    Args:
        text: what this rank is about to do, or what it holds.
        device: of the group's tensors.
        group: who compares.
        process_group: that of `group`.
    """
    if group.size == 1 or dist.get_backend(process_group) == "fake":
        return None
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    if all(told == [digest] for told in collectives.of_all_ranks([digest], device, group)):
        return None
    return list(zip(dist.get_process_group_ranks(process_group), said_by_all(text, device, process_group), strict=True))


def said_by_all(mine: Any, device: torch.device, process_group: dist.ProcessGroup) -> list[Any]:
    """What each rank says, an object of any kind, in the order of the group.

    It travels on the device given; torch would take the current one, which for ranks that have set none is the same.
    """
    said: list[Any] = [None] * process_group.size()
    with torch.accelerator.device_index(None if device.type == "cpu" else device.index):
        dist.all_gather_object(said, mine, group=process_group)
    return said
