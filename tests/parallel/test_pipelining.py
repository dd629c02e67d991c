"""Stages of torch's pipelining that are tensor parallel: what passes between them are torch's DTensors, or plain."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from tests.older import require
from tests.ranks import run_ranks
from torchshard import DTensor, Replicate, Shard, init_device_mesh
from torchshard.errors import UnsupportedOperatorError
from torchshard.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torchshard.parallel.fsdp import fully_shard

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


class _Beside(nn.Module):
    """A stage of plain tensors whose output is no view."""

    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))

    def forward(self, x):
        return x + self.module(x)


def _sharded_in_zero_bubble(rank, world):
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    here, part = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    blocks = [_Beside() for _ in range(4)]
    x, target = torch.randn(2, 2, 2 * MICROBATCHES, WIDTH)
    mine, stages = {here: None, here + 2: None}, []
    for n in mine:
        plan = {"module.0": ColwiseParallel(), "module.2": RowwiseParallel()}
        mine[n] = module = parallelize_module(copy.deepcopy(blocks[n]), mesh["tp"], plan)
        for unit in (module.module, module):
            fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=False)
        stages.append(PipelineStage(module, n, 4, torch.device("cpu"), group=mesh["pp"].get_group()))
    schedule = ScheduleInterleavedZeroBubble(stages, n_microbatches=MICROBATCHES, loss_fn=_loss)
    schedule.step(*[x[part]] * (0 in mine), **({"target": target[part]} if 3 in mine else {}))
    _loss(nn.Sequential(*blocks)(x), target).backward()
    for n, module in mine.items():
        for (key, p), whole in zip(module.named_parameters(), blocks[n].parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), whole.grad, msg=lambda m, at=(n, key): f"{at}: {m}")


def test_fully_shard_in_a_zero_bubble_schedule_has_whole_gradients():
    run_ranks(4, _sharded_in_zero_bubble)


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
