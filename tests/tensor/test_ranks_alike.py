"""Graphs of ranks that hold two rows, one or none send alike, forward and backward: one that sends less is waited for."""

import pytest
import torch
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

from tests.every_rank import sent_by_ranks
from tests.older import require
from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

WORLD, F = 3, torch.nn.functional


def again(function):
    return lambda x: checkpoint(lambda x: function(x).sin() * x, x, use_reentrant=False)


def written(x, rows):
    x = x * 1
    x[rows] = 0
    return x * 2


ALONG = {  # of x alone, along its split dim
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "cat": lambda x: torch.cat([x, x.sin()]),
    "cumprod": lambda x: x.cumprod(0),
    "cumsum": lambda x: x.cumsum(0),
    "in a checkpoint, batch_norm": again(lambda x: F.batch_norm(x, None, None, training=True)),
    "in a checkpoint, cumprod": again(lambda x: x.cumprod(0)),
    "in a checkpoint, cumsum": again(lambda x: x.cumsum(0)),
    "in a checkpoint, softmax": again(lambda x: x.softmax(0)),
    "diff": lambda x: x.diff(dim=0),
    "flip": lambda x: x.flip(0),
    "layer_norm": lambda x: F.layer_norm(x.mT, x.shape[:1]),
    "log_softmax twice": lambda x: x.log_softmax(0).exp() * x.softmax(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "max": lambda x: x.max(0).values,
    "median": lambda x: x.median(0).values,
    "mm": lambda x: x @ x.mT,
    "norm": lambda x: x.norm(dim=0),
    "one row": lambda x: x[1].exp(),
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)),
    "redistribute": lambda x: x.redistribute(placements=[Shard(1)]).exp(),
    "replicate": lambda x: x.redistribute(placements=[Replicate()]).exp(),
    "roll": lambda x: x.roll(1, 0),
    "rows": lambda x: x[1:].exp() * x[:-1],
    "sort": lambda x: x.sort(0).values,
    "split": lambda x: torch.stack([part.exp().sum(0) for part in x.split(1)]),
    "std": lambda x: x.std(0) + x.var(0),
    "tril": lambda x: x.tril(),
    "two softmaxes": lambda x: x.sin().softmax(0).exp() * x.cos().softmax(0),
    "unfold": lambda x: x.unfold(0, 2, 1).exp(),
    "write": lambda x: written(x, slice(0, 1)),
}


@pytest.mark.parametrize(("rows", "partition"), [(2, min_cut_rematerialization_partition), (5, default_partition)])
def test_along_a_split_dim(rows, partition):
    require("meshes in graphs")
    differing = {}
    for name, function in ALONG.items():

        def program(rank, function=function):
            mesh = init_device_mesh("cpu", (WORLD,))
            x = distribute_tensor(torch.randn(rows, 4), mesh, [Shard(0)], src_data_rank=None)
            return function, (x.requires_grad_(),)

        first, *others = sent_by_ranks(WORLD, program, partition)
        if len(first) != 2 or others != [first] * (WORLD - 1):
            differing[name] = first, *others
    assert not differing
