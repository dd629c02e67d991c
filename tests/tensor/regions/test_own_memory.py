"""What a graph gives out has memory of its own, as in eager mode: to write to one changes no other."""

import pytest
import torch

from tests.ranks import fake_ranks
from torchshard import Replicate, Shard, _torch, distribute_tensor, init_device_mesh


@pytest.fixture(scope="module", autouse=True)
def line():
    global MESH
    with fake_ranks(2):
        MESH = init_device_mesh("cpu", (2,))
        yield


def rows():
    torch.manual_seed(0)
    return distribute_tensor(torch.randn(4, 3), MESH, [Shard(0)], src_data_rank=None)


class Kept(torch.autograd.Function):
    """Its gradient is an operand."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors


def whole(x):
    return x.redistribute(placements=[Replicate()])


def moved(x, y):
    return whole(x) + whole(y)


SHARING = {
    "a sum": lambda x, y: x + y,
    "a sum that is used": lambda x, y: (x + y).square(),
    "a view": lambda x, y: (x + y.view(2, 2, 3).view(4, 3)).square(),
    "moved": moved,
    "one gradient": lambda x, y: x + y.detach(),
    "operands": Kept.apply,
}


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
@pytest.mark.parametrize("name", SHARING)
def test_gradients_are_added_to(name, backend):
    """Twice: x.grad and y.grad shared memory, or x.grad and what came, and what was added to one reached the other."""
    torch._dynamo.reset()
    assert _torch.part_gradients()
    found = []
    for function in (SHARING[name], torch.compile(SHARING[name], backend=backend, fullgraph=True)):
        x, y = (rows().requires_grad_() for _ in range(2))
        given = []
        for _ in range(2):
            result = function(x, y)
            torch.manual_seed(2)
            given.append(distribute_tensor(torch.randn(4, 3), MESH, result.placements, src_data_rank=None))
            result.backward(given[-1])
            x.grad.mul_(2)
        found.append([None if t is None else t.to_local() for t in (x, y, x.grad, y.grad, *given)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (whole(x), whole(x)),
        lambda x: (whole(x), whole(x).view(3, -1), whole(x)),
        lambda x: (whole(x), x[1:2]),
        lambda x: (x @ x.new_ones(3, 600), whole(x)),
    ],
)
def test_results_of_redistribution(function, gradients):
    torch._dynamo.reset()
    x = rows().requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        results = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)(x)
    places = [result.to_local().untyped_storage().data_ptr() for result in (x, *results)]
    assert len({*places}) == len(places)
