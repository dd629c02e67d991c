"""A rank that dies or gets stuck is named by the others, with what they waited for, within the group's time limit."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.models import mlp
from tests.ranks import run_ranks
from torchshard.errors import RankMismatchError


class Stops(torch.autograd.Function):
    """Passes through; in backward, `how` happens."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.how()
        return grad, None


def _die():
    os._exit(0)


def _stick():
    time.sleep(11)  # beyond the group's 5 s, and the 3 s in which it is asked
    _die()


def _train(rank, world, how, where):
    from torchshard.ddp import DistributedDataParallel

    group = dist.new_group(timeout=timedelta(seconds=5))
    module = nn.Sequential(mlp(8), nn.BatchNorm1d(8))
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0)
    x = torch.ones(4, 8)
    for _ in range(2):
        model(x).sum().backward()
    start = time.monotonic()
    if rank == world - 1 and where == "forward":
        how()
    elif rank == world - 1:
        module[0][2].register_forward_hook(lambda m, i, o: Stops.apply(o, how))
    with pytest.raises(RankMismatchError) as caught:
        model(x).sum().backward()
    assert time.monotonic() - start < 15
    with pytest.raises(RankMismatchError):  # and does not hang later
        model(x).sum().backward()
    dist.destroy_process_group()
    return str(caught.value)


CASES = {
    "dies in forward": (_die, "forward", "the buffers of rank 0"),
    "dies in backward": (_die, "backward", "bucket "),
    "is stuck in backward": (_stick, "backward", "bucket "),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank(case):
    how, where, waited_for = CASES[case]
    for message in run_ranks(3, _train, how, where, expect_dead=(2,), timeout=60)[:2]:
        assert "waited in vain for" in message
        assert waited_for in message
        assert "no answer within 3 s from rank 2" in message
