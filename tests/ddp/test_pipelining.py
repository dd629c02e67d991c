"""Stages of a pipeline wrapped by ours: pipelining times x data parallel, beside torch's wrapper and the whole model."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from tests.ranks import run_ranks

MICROBATCHES = 4


def _loss(y, target):
    return (y - target).square().mean()


def _stages(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 8)) for _ in range(count)]


def _run(make_schedule, wrapped, numbers, mesh, x, target):
    """Two steps of a schedule; the gradients of this rank's stages after each."""
    group, found = mesh["pipeline"].get_group(), []
    stages = [
        PipelineStage(module, number, 2 * len(numbers), torch.device("cpu"), group=group)
        for number, module in zip(numbers, wrapped, strict=True)
    ]
    schedule = make_schedule(stages)
    for _ in range(2):
        for module in wrapped:
            module.zero_grad()
        first, last = 0 in numbers, 2 * len(numbers) - 1 in numbers
        schedule.step(*([x] if first else []), **({"target": target} if last else {}))
        found.append([p.grad.clone() for module in wrapped for p in module.parameters()])
    return found


def _compared(rank, world):
    from torchshard.ddp import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    here, group = mesh["pipeline"].get_local_rank(), mesh["data"].get_group()
    torch.manual_seed(100 + mesh["data"].get_local_rank())  # batches differ between replicas
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    schedules = {
        "GPipe": (1, lambda s: ScheduleGPipe(s[0], MICROBATCHES, loss_fn=_loss)),
        "1F1B": (1, lambda s: Schedule1F1B(s[0], MICROBATCHES, loss_fn=_loss)),
        "interleaved 1F1B": (2, lambda s: ScheduleInterleaved1F1B(s, MICROBATCHES, loss_fn=_loss)),
    }
    for name, (each, make_schedule) in schedules.items():
        whole = _stages(2 * each)
        numbers = [here + 2 * k for k in range(each)]
        results = [
            _run(make_schedule, [wrap(copy.deepcopy(whole[n])) for n in numbers], numbers, mesh, x, target)
            for wrap in (
                lambda m: DistributedDataParallel(m, process_group=group, bucket_cap_mb=0.01),
                # torch's own loses count of its buckets in the second step of a schedule, unless it never lays out anew.
                lambda m: nn.parallel.DistributedDataParallel(m, process_group=group, find_unused_parameters=True),
            )
        ]
        for ours, theirs in zip(*results, strict=True):
            for p, q in zip(ours, theirs, strict=True):
                torch.testing.assert_close(p, q, msg=lambda m, n=name: f"{n}: {m}")
        _loss(nn.Sequential(*whole)(x), target).backward()
        for grad, p in zip(results[0][-1], [p for n in numbers for p in whole[n].parameters()], strict=True):
            dist.all_reduce(p.grad, group=group)
            torch.testing.assert_close(grad, p.grad / 2, msg=lambda m, n=name: f"{n}, the whole: {m}")


def test_schedules_over_wrapped_stages():
    run_ranks(4, _compared)


def _weights_apart(rank, world):
    """What a zero bubble schedule does with the last microbatch of a stage."""
    from torch.distributed.pipelining._backward import stage_backward_input

    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(*_stages(1))
    x = torch.randn(2, 8, requires_grad=True)
    with model.no_sync():
        y = model(x)
        stage_backward_input([y], [torch.ones_like(y)], [x], model.parameters())
    with pytest.raises(RuntimeError, match="zero bubble") as refused:
        model.reducer.prepare_for_backward([y])
    model.zero_grad()
    model(x).sum().backward()  # it goes on with whole backwards
    return str(refused.value), all(p.grad is not None for p in model.parameters())


def test_gradients_of_weights_that_no_backward_brings_are_refused():
    for refused, reduced in run_ranks(2, _weights_apart):
        assert "ScheduleInterleaved1F1B" in refused
        assert reduced
