"""DTensors in a graph that is cut: they cross, and parameters that are lent as such count where they are used."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as upstream
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.older import require
from torchshard import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from torchshard.compiler import split_backend
from torchshard.parallel import local_parameters


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Layers(nn.Module):
    """Layers a, b, c."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class Activations(Layers):
    """Views, a turned one, several results, a buffer that all pieces write to, and an input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        y = self.a(x * 2)
        x.add_(1)
        self.seen.add_(y.detach().mean(0))
        z = checkpoint(lambda t: self.b(t).sin(), y, use_reentrant=False) + self.seen
        self.seen.mul_(2)
        return self.c(z)[:, ::2] + y[:, 1::2], z.t(), y.to_local().view(-1)


class Weights(Layers):
    """Views of weights cross, some of them to two pieces."""

    def forward(self, x):
        w = self.a.weight * 1
        return x @ w.t() @ self.b.weight @ self.c.weight.t() + self.c(x @ w)


def _run(model, module, mesh, rows):
    x = torch.arange(rows * 8.0).view(rows, 8).sin()
    x = distribute_tensor(x, mesh, [Shard(0)])
    outputs = torch.utils._pytree.tree_leaves(model(x))
    sum(y.sum() for y in outputs).backward()
    found = [*outputs, *(p.grad for p in module.parameters()), x, *module.buffers()]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in found]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("make", [Activations, Weights])
def test_the_pieces_make_the_whole(mesh, make, inner):
    module = distribute_module(make(), mesh)
    reference, backend = copy.deepcopy(module), split_backend(0, 0, inner=inner)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for rows in (4, 7):
        module.zero_grad()
        reference.zero_grad()
        torch.testing.assert_close(_run(compiled, module, mesh, rows), _run(reference, reference, mesh, rows))
    assert len(backend.last_plan.pieces) > 2


def test_those_of_torchs_class_cross_as_well(mesh):
    """Its DTensor names its mesh among the parts that it is made of."""
    module = upstream.distribute_module(Layers(), mesh)
    reference, backend = copy.deepcopy(module), split_backend(0, 0, inner="aot_eager")
    compiled, x = torch.compile(module, backend=backend, fullgraph=True), torch.ones(2, 8)
    for model in (compiled, reference):
        model(upstream.distribute_tensor(x, mesh, [upstream.Shard(0)])).sum().backward()
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor())
    assert len(backend.last_plan.pieces) == 3


def test_lent_parameters_count_where_they_are_used(mesh):
    """A module lends all at its beginning."""
    require("attributes that go in a region")
    module, backend = local_parameters(distribute_module(Layers(), mesh)), split_backend(0, 0, inner="eager")
    x = distribute_tensor(torch.ones(2, 8), mesh, [Replicate()])
    torch.compile(lambda x: module(x), backend=backend, fullgraph=True)(x)
    assert [(len(piece.params), len(piece.nodes)) for piece in backend.last_plan.pieces] == [(2, 3)] * 3
