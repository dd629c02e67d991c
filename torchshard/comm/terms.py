"""What ranks bring to a collective that they make themselves, and whether it fits together."""

import zlib
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchshard.errors import RankMismatchError


class Term(NamedTuple):
    """What one rank brings, as numbers that mean the same on all ranks.

    Attributes:
        numel: elements.
        kind: of their dtype, and of what is made of them.
        owner: for which of the users of the group.
    """

    numel: int
    kind: int
    owner: int

    @classmethod
    def of(cls, x: Tensor, what: str, owner: int = 0) -> "Term":
        """Of this tensor, from which `what` is made."""
        return cls(x.numel(), _kind(what, x.dtype), owner)


@cache
def _kind(what: str, dtype: torch.dtype) -> int:
    return zlib.crc32(f"{what} {dtype}".encode())


def require_same(x: Tensor, mine: Term, its: Term, ranks: tuple[int, int], where: str) -> None:
    """Raise RankMismatchError unless another rank brings as many elements of the same kind, for the same owner.

    Args:
        x, mine: of this rank.
        its: of the other one.
        ranks: this one and the other one, in the group.
        where: this is; begins with what is made.
    """
    if mine == its:
        return
    rank, other = ranks
    what, *_ = where.split()
    same, fix = mine[:2] == its[:2], "run the same model, with the same settings"
    if same:
        fix = "run the backwards of several wrappers in the same order, or give each wrapper a process group of its own"
    dtype = "the same dtype" if its.kind == mine.kind else "another dtype, or for something else"
    raise RankMismatchError(
        f"rank {rank} and rank {other} {what} different tensors",
        expected=f"{mine.numel} elements of {x.dtype}, as on rank {rank}",
        got="as many for another wrapper" if same else f"{its.numel} elements of {dtype}",
        where=where,
        fix=f"{fix}, on every rank",
    )


def segments(numel: int, ranks: int) -> list[tuple[int, int]]:
    """Where the segment of each rank begins and ends, in elements; the last ones may be shorter, or empty."""
    step = -(-numel // ranks)
    return [(min(rank * step, numel), min((rank + 1) * step, numel)) for rank in range(ranks)]
