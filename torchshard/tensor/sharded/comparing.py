"""Operators that ask something of all elements of ShardedTensors: each rank asks its parts, and all get one answer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.comm.circle import circle_of, refusing
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor, group_of
from torchshard.tensor.sharded.specs import device_here

EVERY = {"equal.default", "allclose.default", "all.default"}
SOME = {"any.default"}


def answer(name: str, found: Sequence[ShardedTensor], ask: Callable[[int | None], Any]) -> Any:
    """What holds of the whole tensors; every rank of the group calls this.

    Args:
        name: of the operator, one of EVERY or SOME.
        found: the ShardedTensors among its arguments, cut alike.
        ask: the operator on part number k of this rank, or on nothing for None.

    Returns:
        A bool, or a tensor without dims where the operator gives one of plain tensors.

    Raises:
        RankMismatchError: a rank asks something else, or is lost.
    """
    x, group = found[0], group_of(found[0])
    ranks, device = tuple(sorted(dist.get_process_group_ranks(group))), device_here(x._metadata)
    with refusing(ranks, device, group):
        said = [ask(k) for k in range(len(x._local_shards))] or [ask(None)]
        mine = (all if name in EVERY else any)(map(bool, said))
    circle = circle_of(ranks, device, group)
    circle.agree(f"{name} of {', '.join(f'{y.dtype} of shape {tuple(y.shape)}' for y in found)}")
    told = torch.tensor([mine], dtype=torch.uint8, device=circle.device)
    with circle.agreement.waiting_for(name):
        dist.all_reduce(told, dist.ReduceOp.MIN if name in EVERY else dist.ReduceOp.MAX, group=circle.group)
    if not isinstance(said[0], Tensor):
        return bool(told)
    return told[0].to(said[0].device, said[0].dtype)
