"""Stages of torch's pipelining that are tensor parallel: what passes between them are torch's DTensors, or plain."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from tests.older import require
from tests.ranks import run_ranks
from torchshard import DTensor, Replicate, Shard, init_device_mesh
from torchshard.errors import UnsupportedOperatorError
from torchshard.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

WIDTH, BATCH, TIMES, MICROBATCHES = 6, 8, 5, 4


class _Between(nn.Module):
    """A stage that takes torch's DTensors and gives them."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(DTensor.from_torch(x)).to_torch()


def _loss(y, target):
    return (y - target).square().mean()


def _block():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH))


def _plan(placement):
    return {
        "0": SequenceParallel(),
        "1": ColwiseParallel(use_local_output=False),
        "3": RowwiseParallel(output_layouts=placement, use_local_output=False),
    }


def _schedules(here):
    """Of each: which stages are here, and how it is made of them."""
    return {
        "1F1B": ([here], lambda stages, **of: Schedule1F1B(stages[0], **of)),
        "interleaved": ([here, here + 2], ScheduleInterleaved1F1B),
        "zero bubble": ([here, 3 - here], ScheduleZBVZeroBubble),
    }


def _steps(rank, world, placement):
    import torch.distributed.tensor as upstream

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    for name, (numbers, make) in _schedules(mesh["pp"].get_local_rank()).items():
        torch.manual_seed(0)
        count = 2 * len(numbers)
        blocks = [_block() for _ in range(count)]
        x, target = torch.randn(2, BATCH, TIMES, WIDTH)
        mine = {n: parallelize_module(copy.deepcopy(blocks[n]), mesh["tp"], _plan(placement)) for n in numbers}
        stages = [
            PipelineStage(
                _Between(module), n, count, torch.device("cpu"), group=mesh["pp"].get_group(),
                get_mesh=lambda *_: mesh["tp"],
            )
            for n, module in mine.items()
        ]  # fmt: skip
        schedule = make(stages, n_microbatches=MICROBATCHES, loss_fn=_loss)
        first, last = 0 in numbers, count - 1 in numbers
        given, wanted = (upstream.distribute_tensor(t, mesh["tp"], [placement]) for t in (x, target))
        for _ in range(2):
            for module in mine.values():
                module.zero_grad()
            schedule.step(*[given] * first, **({"target": wanted} if last else {}))
        _loss(nn.Sequential(*blocks)(x), target).backward()
        for n, module in mine.items():
            for p, whole in zip(module.parameters(), blocks[n].parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), whole.grad, msg=lambda m, at=(name, n): f"{at}: {m}")


@pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=str)
def test_dtensors_pass_between_stages(placement):
    require("DTensors between stages")
    run_ranks(4, _steps, placement)


def _ours_between(rank, world):
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pp", "tp"))
    module = parallelize_module(nn.Linear(4, 4), mesh["tp"], RowwiseParallel(use_local_output=False))
    if rank:  # would wait for what is not sent
        return None
    with pytest.raises(UnsupportedOperatorError) as refused:
        torch.distributed.send(module(torch.ones(2, 4)), 1)
    return str(refused.value)


def test_what_is_sent_as_it_is_is_refused():
    refused = run_ranks(2, _ours_between)[0]
    assert "between stages of a pipeline x.to_torch() and DTensor.from_torch(x)" in refused
