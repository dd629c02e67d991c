"""Ranks that are about to do the same say what that is, by a word, or by one small collective."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from torchshard.comm import collectives
from torchshard.comm.group import Group
from torchshard.comm.words import words_of


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
    said = text.encode()
    alike = known_alike(said, device, process_group)
    if alike is None:
        mine = _digest(said)
        alike = all(told == [mine] for told in collectives.of_all_ranks([mine], device, group))
    if alike:
        return None
    return list(zip(dist.get_process_group_ranks(process_group), said_by_all(text, device, process_group), strict=True))


def known_alike(mine: bytes, device: torch.device, process_group: dist.ProcessGroup) -> bool | None:
    """Whether all ranks hold the same bytes, if that can be told without a collective; else None, on all ranks.

    Args:
        mine: what this rank holds.
        device: of the group's tensors.
        process_group: who compares; every rank must ask.
    """
    words = words_of(process_group, device)
    return None if words is None else words.same(_digest(mine))


def _digest(said: bytes) -> int:
    return int.from_bytes(hashlib.sha256(said).digest()[:7])


def said_by_all(mine: Any, device: torch.device, process_group: dist.ProcessGroup) -> list[Any]:
    """What each rank says, an object of any kind, in the order of the group.

    It travels on the device given; torch would take the current one, which for ranks that have set none is the same.
    """
    said: list[Any] = [None] * process_group.size()
    with torch.accelerator.device_index(None if device.type == "cpu" else device.index):
        dist.all_gather_object(said, mine, group=process_group)
    return said
