"""Ranks that would train different models, or come to different buckets, say so, all of them and soon."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from tests.models import mlp
from tests.ranks import run_ranks
from torchshard.errors import RankMismatchError


def _message(act):
    start = time.monotonic()
    try:
        act()
    except RankMismatchError as error:
        assert time.monotonic() - start < 15
        return str(error)
    return None


class Renamed(nn.Module):
    def __init__(self, name):
        super().__init__()
        setattr(self, name, nn.Linear(8, 8))


def _differ(rank, world):
    from torchshard.ddp import DistributedDataParallel

    odd = rank == world - 1
    wider = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9 if odd else 8))
    cases = {
        "shape": lambda: DistributedDataParallel(wider),
        "dtype": lambda: DistributedDataParallel(mlp(8).double() if odd else mlp(8)),
        "name": lambda: DistributedDataParallel(Renamed("b" if odd else "a")),
        "number": lambda: DistributedDataParallel(mlp(8, 3 if odd else 4)),
        "argument": lambda: DistributedDataParallel(mlp(8), bucket_cap_mb=3 if odd else 4),
        "frozen": lambda: DistributedDataParallel(_frozen(mlp(8)) if odd else mlp(8)),
        "buffer": lambda: DistributedDataParallel(nn.Sequential(mlp(8), _buffer(5 if odd else 4))),
        "none": lambda: DistributedDataParallel(mlp(8)),
    }
    return {name: _message(act) for name, act in cases.items()}


def _frozen(module):
    module[0].bias.requires_grad_(False)
    return module


def _buffer(size):
    module = nn.Module()
    module.register_buffer("mask", torch.zeros(size))
    return module


def test_at_construction():
    answers = run_ranks(3, _differ)
    assert answers[0] == answers[1] == answers[2]
    messages = answers[0]
    assert messages["none"] is None
    assert "rank 0: parameter 1.weight: float32 of shape [8, 8]" in messages["shape"]
    assert "rank 2: parameter 1.weight: float32 of shape [9, 8]" in messages["shape"]
    assert "rank 2: parameter 0.weight: float64" in messages["dtype"]
    assert "rank 2: parameter b.weight" in messages["name"]
    assert "rank 0: parameter 6.weight" in messages["number"]
    assert "rank 2: requires a gradient: 0.weight" in messages["number"]
    assert "cap=3145728" in messages["argument"]
    assert "rank 0: requires a gradient: 0.bias" in messages["frozen"]
    assert "rank 2: buffer 1.mask: float32 of shape [5]" in messages["buffer"]


def _unchecked(rank, world, what):
    """Without init_sync nothing is compared at first; the first bucket is the last moment to do so."""
    from torchshard.ddp import DistributedDataParallel

    group = dist.new_group(timeout=timedelta(seconds=20))
    odd = rank == world - 1
    if what == "shape":
        module, settings = nn.Linear(8, 9 if odd else 8), {}
    else:
        module, settings = mlp(8), {"bucket_cap_mb": 0 if odd else 1}
    model = DistributedDataParallel(module, process_group=group, init_sync=False, **settings)

    def train():
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()

    return _message(train) or str(model.reducer)


def test_in_the_first_backward_if_never_compared():
    for message in run_ranks(3, _unchecked, "shape"):
        assert "have different buckets" in message
        assert "bias [8]" in message
        assert "bias [9]" in message


def test_buckets_are_those_of_rank_0_if_sizes_were_never_compared():
    plans = run_ranks(3, _unchecked, "caps")
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].count("float32") == 1
