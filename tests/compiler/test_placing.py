"""Ranks' graphs of one program communicate alike, whatever a rank reads of what comes, or knows of what it sends."""

import pytest
import torch
import torch.distributed as dist
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.distributed import _functional_collectives as functional
from torch.utils.checkpoint import checkpoint

from tests.every_rank import sent_by_ranks
from tests.ranks import run_ranks
from torchshard import _torch

WORLD = 3


class Alone(torch.autograd.Function):
    """What `forward` makes of a tensor and the rank, and `backward` of its gradient."""

    @staticmethod
    def forward(ctx, x, rank, forward, backward):
        ctx.rank, ctx.backward = rank, backward
        return forward(x, rank)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.backward(gradient, ctx.rank), None, None, None


def kept(x, rank):
    return x * 1


def sum_of(x, rank):
    return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))


def sum_of_known(x, rank):
    """A rank that holds nothing sends zeros, which its graph knows."""
    return sum_of(x if rank else torch.zeros(3, 2), rank)


def sum_of_earlier(x, rank):
    """The first rank reads nothing of what comes."""
    rows = functional.wait_tensor(functional.all_gather_tensor(x, 0, dist.group.WORLD))
    return x + rows[:rank].sum() if rank else x * 2


def unread(x, rank):
    return Alone.apply(x, rank, sum_of_earlier, kept).sin()


def unread_in_backward(x, rank):
    return Alone.apply(x, rank, kept, sum_of_earlier).sin()


def known(x, rank):
    return Alone.apply(x, rank, sum_of_known, kept).exp() * x


def known_in_backward(x, rank):
    return Alone.apply(x, rank, kept, lambda gradient, rank: sum_of_known(gradient, rank).exp() * gradient).sin()


def known_alike(x, rank):
    """What the first rank sends is twice the same, where others send this and that."""
    return Alone.apply(x.sin(), rank, sum_of_known, kept).exp() * Alone.apply(x.cos(), rank, sum_of_known, kept)


def chain(x, rank):
    """What the first rank sends second does not depend on what came first."""
    came = sum_of(x, rank)
    return sum_of((x - came).square() if rank else x.square(), rank)


def chained(x, rank):
    return Alone.apply(x, rank, chain, kept).sin()


def checkpointed(x, rank):
    return checkpoint(lambda x: known(x, rank).exp(), x, use_reentrant=False).cos()


def checkpointed_part(x, rank):
    """Without rows, what backward reads costs nothing to save."""
    return checkpoint(lambda x: (x[:rank] + sum_of(x, rank).sum()).sin().square(), x, use_reentrant=False)


PROGRAMS = [unread, unread_in_backward, known, known_in_backward, known_alike, chained, checkpointed, checkpointed_part]
PARTITIONS = {"default": default_partition, "min-cut": min_cut_rematerialization_partition}


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_rank_sends_alike(program, partition):
    _torch.run_collectives_once()
    first, *others = sent_by_ranks(
        WORLD, lambda rank: (program, (torch.ones(3, 2, requires_grad=True), rank)), partition
    )
    assert (len(first), any(first)) == (2, True)
    assert others == [first] * len(others)


def compare(rank, world):
    _torch.run_collectives_once()
    for program in (unread, unread_in_backward, known_in_backward, known_alike):
        found = []
        for run in (program, torch.compile(program, fullgraph=True)):
            x = (torch.arange(6.0).view(3, 2) / 10 + rank).requires_grad_()
            y = run(x, rank)
            y.sum().backward()
            found += [(y.detach(), x.grad)]
        torch.testing.assert_close(*found)


def test_inductor_sends_what_eager_sends():
    run_ranks(WORLD, compare, timeout=200)
