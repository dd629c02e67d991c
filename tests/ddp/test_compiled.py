"""torch.compile with any backend: the module's code is compiled, gradients are reduced all the same."""

import copy
import sys

import pytest
import torch
from torch import nn

from tests.models import mlp
from tests.ranks import run_ranks


class Breaks(nn.Module):
    """A graph break between two layers, and batch norm's buffers."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.norm(self.a(x))
        torch._dynamo.graph_break()
        return self.b(x.relu())


def _steps(rank, world, backend, outside, portable):
    from torch._dynamo.testing import CompileCounterWithBackend

    from torchshard import _torch

    if portable:
        assert "torchshard.ddp" not in sys.modules
        with _torch.without_fast_paths():
            from torchshard.ddp import DistributedDataParallel
    else:
        from torchshard.ddp import DistributedDataParallel
    for make in (lambda: mlp(8, 3), Breaks):
        torch.manual_seed(rank)
        model, counting = make(), CompileCounterWithBackend(backend)
        if outside:
            wrapper = DistributedDataParallel(model)
            compiled = torch.compile(wrapper, backend=counting)
        else:
            compiled = wrapper = DistributedDataParallel(torch.compile(model, backend=counting))
        assert isinstance(wrapper, nn.parallel.DistributedDataParallel)
        reference = DistributedDataParallel(copy.deepcopy(model), init_sync=False)
        for step in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            for m in (compiled, reference):
                m.zero_grad()
                m(x).square().mean().backward()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
        assert wrapper.reducer.counters.by_hook == 4 * len(list(model.parameters()))
        assert counting.frame_count >= 1
    return True


full = pytest.mark.full


@pytest.mark.parametrize(
    ("backend", "outside"),
    [
        pytest.param("eager", True, id="eager, compile(wrap)"),
        pytest.param("eager", False, id="eager, wrap(compile)", marks=full),
        pytest.param("aot_eager", True, id="aot_eager, compile(wrap)", marks=full),
        pytest.param("aot_eager", False, id="aot_eager, wrap(compile)"),
        pytest.param("inductor", True, id="inductor, compile(wrap)", marks=full),
        pytest.param("inductor", False, id="inductor, wrap(compile)", marks=full),
    ],
)
def test_gradients_are_reduced(backend, outside):
    assert all(run_ranks(2, _steps, backend, outside, False, timeout=280))


@full
def test_without_private_ways_to_skip_frames():
    assert all(run_ranks(2, _steps, "eager", True, True, imported=False))


def _hooked(rank, world):
    """A communication hook reduces the buckets that a graph fills, too."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(mlp(16))
    reference, x = copy.deepcopy(model.module), torch.randn(world, 3, 16)
    reference(x.flatten(0, 1)).square().mean().backward()
    model.register_comm_hook(None, fp16_compress_hook)
    compiled = torch.compile(model, backend="torchshard")
    for _ in range(3):
        model.zero_grad()
        compiled(x[rank]).square().mean().backward()
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4)
    return model.reducer.counters.in_graph


def test_communication_hooks_in_graphs():
    assert run_ranks(2, _hooked) == [16, 16]


def _stepping(rank, world):
    """A hook that steps the optimizer writes to weights that the backward graph would still need."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    wrapped = nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(5)])
    reference, x = copy.deepcopy(wrapped), torch.randn(world, 3, 96)
    model = DistributedDataParallel(wrapped, bucket_cap_mb=0.01)
    model._register_fused_optim(torch.optim.SGD, lr=30.0)
    compiled = torch.compile(model, backend="torchshard")
    optimizer = torch.optim.SGD(reference.parameters(), lr=30.0)
    for _ in range(4):
        compiled(x[rank]).square().mean().backward()
        optimizer.zero_grad()
        reference(x.flatten(0, 1)).square().mean().backward()
        optimizer.step()
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q, p)
        model.zero_grad()


def test_hooks_that_step_come_after_the_graph():
    run_ranks(2, _stepping)


def _delayed(rank, world, backend):
    """All gradients come at once from a compiled graph, those that are reduced with delay after their trigger's."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module = mlp(8, 3)
    reference = copy.deepcopy(module)
    late = [(n, p) for n, p in module.named_parameters() if not n.startswith("0")]
    ddp = DistributedDataParallel(module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=module[0].weight)
    model = torch.compile(ddp, backend=backend)
    for step in range(3):
        x = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(step))
        for m, batch in ((model, x[rank]), (reference, x.flatten(0, 1))):
            m.zero_grad()
            m(batch).square().mean().backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("backend", ["aot_eager", "torchshard"])
def test_delayed_gradients_of_a_compiled_module(backend):
    run_ranks(2, _delayed, backend, timeout=120)
