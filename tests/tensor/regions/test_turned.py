"""Parts that lie in memory otherwise than from_local was told, in compiled regions and exported programs."""

import pytest
import torch
import torch.nn.functional as F

from tests.older import require
from tests.ranks import fake_ranks
from torchshard import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

SHAPE, STRIDE = (8, 4, 3, 3), (36, 9, 3, 1)  # split by rows among 4 ranks
BY_CHANNELS = (36, 1, 12, 4)


@pytest.fixture(scope="module", autouse=True)
def line():
    global MESH, WEIGHT
    with fake_ranks(4):
        MESH = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        WEIGHT = torch.randn(4)
        yield


def told(part, stride=STRIDE):
    return DTensor.from_local(part, MESH, [Shard(0)], shape=SHAPE, stride=stride)


def normed(x):
    weight = distribute_tensor(WEIGHT, MESH, [Replicate()]) if isinstance(x, DTensor) else WEIGHT
    return F.group_norm(x, 2, weight)


def mixed(x):
    """What asks how the whole lies: an operator whose gradient's kernel does, views, one that is written to, a product."""
    y, rows = x * 1, x.shape[0]
    y.view(rows, -1).mul_(2)
    return normed(x) + x.view(rows, 4, 9).sin().view(x.shape) + y + torch.matmul(x, x.transpose(2, 3))


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


PLACES = {
    "made inside": lambda f, **o: compiled(lambda part: f(told(part, **o))),
    "given": lambda f, **o: lambda part: compiled(f)(told(part, **o)),
    "returned": lambda f, **o: lambda part: f(compiled(lambda part: told(part, **o))(part)),
    "handed through": lambda f, **o: lambda part: f(compiled(lambda x: x.view(x.shape))(told(part, **o))),
}


def with_gradient(function, part, weights):
    part = part.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(part)
    y = y.to_local() if isinstance(y, DTensor) else y
    (y * weights).sum().backward()
    return y.detach(), part.grad


@pytest.mark.parametrize("place", PLACES)
def test_values_and_gradients_are_those_of_the_whole(place):
    if place != "handed through":  # the others have a mesh in their graphs
        require("meshes in graphs")
    torch._dynamo.reset()
    dense, weights = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    by_channels = dense.contiguous(memory_format=torch.channels_last)
    for function, part, stride in ((mixed, by_channels, STRIDE), (normed, dense, BY_CHANNELS)):
        got = with_gradient(PLACES[place](function, stride=stride), part, weights)
        torch.testing.assert_close(got, with_gradient(function, dense, weights))


def test_a_result_that_is_turned_has_a_gradient_that_is_not():
    require("meshes in graphs")
    part = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last).requires_grad_()
    torch.compile(lambda x: told(x * 2), backend="aot_eager", fullgraph=True)(part).sum().to_local().backward()
    torch.testing.assert_close(part.grad, torch.full_like(part, 2.0))


class Attention(torch.nn.Module):
    """Heads that are split; torch's decomposition of attention leaves its result in another order than the kernel."""

    def __init__(self):
        super().__init__()
        part = torch.randn(8, 4)  # of a fake group, distribute_tensor gives memory that nobody has filled
        weight = DTensor.from_local(part, MESH, [Shard(1)], shape=(8, 16), stride=(16, 1))
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(distribute_tensor(torch.randn(8), MESH, [Replicate()]))

    def forward(self, q):
        y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        y = DTensor.from_local(y, MESH, [Shard(2)], shape=(*y.shape[:2], 16), stride=(y.shape[1] * 16, 16, 1))
        return F.linear(y, self.weight, self.bias).to_local()


def test_attention_in_an_exported_program_is_decomposed():
    module, q = Attention(), torch.randn(3, 2, 4, 2)
    program = torch.export.export(module, (q,)).run_decompositions()
    torch.testing.assert_close(program.module()(q), module(q))
