"""Uneven inputs: ranks that have run out of them play along, and everything comes out as if nobody had noticed."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join

from tests.models import mlp
from tests.ranks import run_ranks
from torchshard.errors import RankMismatchError

pytestmark = pytest.mark.usefixtures("both_ways")


class Experts(nn.Module):
    """Uses one of two layers, as the input says."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        return self.layers[int(x[0, 0] > 0)](x)


def _batches(world, counts):
    """counts[rank] batches for each rank, known to all."""
    torch.manual_seed(5)
    return [[torch.randn(4, 8) for _ in range(counts[rank])] for rank in range(world)]


def _reference(module, batches, initial, every):
    """The training of one process that averages what ranks would give; every: steps between two reductions."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(max(map(len, batches))):
        active = [b for b in batches if len(b) > step]
        if step % every == 0:
            optimizer.zero_grad()
        divisor = len(batches) if initial else len(active)
        (sum(module(b[step]).square().mean() for b in active) / divisor).backward()
        if step % every == every - 1:
            optimizer.step()
    return module


def _trained(rank, world, module, counts, initial=True, every=1, hook=None, **settings):
    """The same on ranks; all end with the model of the last."""
    from torchshard.ddp import DistributedDataParallel

    batches = _batches(world, counts)
    model = DistributedDataParallel(copy.deepcopy(module), **settings)
    if hook:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=initial):
        for step, x in enumerate(batches[rank]):
            if step % every == 0:
                optimizer.zero_grad()
            reduces = step % every == every - 1
            with contextlib.nullcontext() if reduces else model.no_sync():
                model(x).square().mean().backward()
            if reduces:
                optimizer.step()
    reference = _reference(module, batches, initial, every)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p)
    return model


def _all_kinds(rank, world):
    torch.manual_seed(0)
    plain, experts = mlp(8), Experts()
    for counts in ((5, 2, 3), (0, 6, 1), (3, 0, 0)):  # rank 0 is the one whose order of gradients counts
        for views in (False, True):
            model = _trained(rank, world, plain, counts, views, bucket_cap_mb=0, gradient_as_bucket_view=views)
            assert len(model.reducer.plan) == len([*model.parameters()])
        _trained(rank, world, experts, counts, find_unused_parameters=True, bucket_cap_mb=0)
        _trained(rank, world, plain, counts, hook=allreduce_hook, bucket_cap_mb=0)
        _trained(rank, world, experts, counts, hook=allreduce_hook, find_unused_parameters=True, bucket_cap_mb=0)
    for counts in ((6, 2, 2), (0, 4, 4)):
        _trained(rank, world, plain, counts, every=2, bucket_cap_mb=0)


def test_as_one_process_would():
    run_ranks(3, _all_kinds)


def _buffers(rank, world):
    from torchshard.ddp import DistributedDataParallel

    module = nn.Sequential(mlp(8), nn.BatchNorm1d(8))
    model = DistributedDataParallel(module)
    batches = _batches(world, (1, 4, 2))
    with model.join():
        for x in batches[rank]:
            model(x).sum().backward()
            with torch.no_grad():
                model(x)  # evaluation in between: no gradients will come
    return model._authoritative_rank, int(module[1].num_batches_tracked), module[1].running_mean.tolist()


def test_buffers_come_from_a_rank_that_has_inputs():
    found = run_ranks(3, _buffers)
    assert found[0] == found[1] == found[2]
    assert found[0][:2] == (1, 8)


def _afterwards(rank, world):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(8, 1, bias=False))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            model(torch.ones(1, 8)).sum().backward()
    model.zero_grad()
    with model.join(enable=False):
        model(torch.full((1, 8), 1.0 + rank)).sum().backward()
    return model.module.weight.grad.unique().tolist()


def test_all_ranks_count_again_afterwards():
    assert run_ranks(2, _afterwards) == [[1.5], [1.5]]


def _buffer_hooks(rank, world):
    from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

    from torchshard.ddp import DistributedDataParallel

    for location in Location:
        module = nn.Sequential(mlp(8), nn.BatchNorm1d(8))
        model = DistributedDataParallel(module)
        calls = []

        def hook(state, buffers, calls=calls):
            calls.append(sorted(buffers))
            return [dist.all_reduce(buffers["1.running_mean"], async_op=True).get_future()]

        model._register_buffer_comm_hook(None, hook, location)
        with model.join():
            for x in _batches(world, (1, 4, 2))[rank]:
                model(x).sum().backward()
        assert calls == [["1.num_batches_tracked", "1.running_mean", "1.running_var"]] * 4


def test_buffer_hooks_are_called_on_all_ranks():
    run_ranks(3, _buffer_hooks)


def _joins_at_once(rank, world):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    for epoch in range(2):
        with model.join():
            for _ in range(2 * rank if epoch == 0 else 2):
                model.zero_grad()
                model(torch.full((1, 2), rank + 1.0)).sum().backward()
                if epoch:
                    assert model.module.weight.grad.tolist() == [[1.5, 1.5]]


def test_a_static_graph_that_one_rank_has_not_seen():
    run_ranks(2, _joins_at_once)


def _own_gradients(rank, world):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(mlp(8))
    with model.join():
        for x in _batches(world, (3, 1))[rank]:
            model.zero_grad()
            model(x).sum().backward()
            kept = [p.grad for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
    for p, grad, value in zip(model.parameters(), *kept, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, value)


def test_a_rank_has_its_gradients_back_at_the_end():
    run_ranks(2, _own_gradients)


def _early(rank, world):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(mlp(8))
    steps = 0
    text = "Rank 1 exhausted all inputs" if rank == 1 else "Detected at least one rank that exhausted inputs"

    def train():
        nonlocal steps
        with model.join(throw_on_early_termination=True):
            for x in _batches(world, (5, 2, 3))[rank]:
                model(x).sum().backward()
                steps += 1

    with pytest.raises(RuntimeError, match=text):
        train()
    with model.join(enable=False):
        model(torch.ones(4, 8)).sum().backward()
    return steps


def test_all_stop_when_the_first_does():
    assert run_ranks(3, _early) == [2, 2, 2]


def _with_zero(rank, world):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module = mlp(8)
    batches = _batches(world, (2, 4, 1))
    reference = _reference(module, batches, True, 1)
    model = DistributedDataParallel(module, bucket_cap_mb=0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for x in batches[rank]:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p)


def test_together_with_a_sharded_optimizer():
    run_ranks(3, _with_zero)


def _raises(rank, world):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(mlp(8))

    def train():
        with model.join():
            model(torch.ones(4, 8)).sum().backward()
            raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        train()

    def disagree():
        with model.join(), model.no_sync() if rank == 0 else contextlib.nullcontext():
            if rank < world - 1:  # the last one has no inputs
                model(torch.ones(4, 8)).sum().backward()

    with pytest.raises(RankMismatchError, match=r"rank 0: no gradients, no .*\n +rank 1: gradients, no buffers\n"):
        disagree()
    model.zero_grad()
    model(torch.ones(4, 8)).sum().backward()  # all have heard of it: they may go on
    assert model.join_device == torch.device("cpu")
    assert model.join_process_group is dist.group.WORLD


def test_exceptions_pass_through():
    run_ranks(3, _raises)
