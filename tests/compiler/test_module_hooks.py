"""Backward hooks of modules in compiled regions: under compiled autograd as in eager mode, else a break with a reason."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ranks import fake_ranks, run_ranks
from torchshard import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torchshard.compiler import explain
from torchshard.compiler.advice import WAYS_AROUND
from torchshard.errors import ShardingError
from torchshard.state_dict import to_sharded_tensor


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x, factor):
        return self.rest(self.first(x) * factor)


def hooked():
    """A module with hooks of all kinds, and what they saw."""
    torch.manual_seed(0)
    model, seen = Scaled(), []

    def before(name):
        def hook(module, grads):
            seen.append(("before", name, [None if g is None else g.detach().clone() for g in grads]))

        return hook

    def after(name):
        def hook(module, inputs, grads):
            seen.append(("after", name, [None if g is None else g.detach().clone() for g in (*inputs, *grads)]))

        return hook

    model.register_full_backward_hook(after("model"))
    model.first.register_full_backward_pre_hook(before("first"))
    model.first.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))
    model.first.register_full_backward_hook(after("first"))
    model.first.register_full_backward_hook(lambda module, inputs, grads: tuple(g * 3 for g in inputs))
    model.rest.register_full_backward_hook(after("rest"))
    model.rest[0].register_full_backward_pre_hook(before("inner"))
    return model, seen


def test_hooks_run_as_in_eager_mode():
    x = torch.arange(8.0).reshape(2, 4)
    (plain, wanted), (model, seen) = hooked(), hooked()
    xs = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(xs[0], 3).sum().backward()
    with torch._dynamo.config.patch(compiled_autograd=True):

        @torch.compile(backend="aot_eager")
        def backward(loss):
            loss.backward()

        loss = torch.compile(model, backend="aot_eager", fullgraph=True)(xs[1], 3).sum()
        backward(loss)
    assert [(kind, name, len(grads)) for kind, name, grads in seen] == [
        (kind, name, len(grads)) for kind, name, grads in wanted
    ]
    for (_, name, got), (_, _, expected) in zip(seen, wanted, strict=True):
        for a, b in zip(got, expected, strict=True):
            assert (a is None) == (b is None), name
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(xs[1].grad, xs[0].grad)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def trained(mesh, layouts, rows):
    """Which hooks ran, and what they saw and the gradients: of DTensors, compiled; of plain tensors in eager mode."""
    model, seen = hooked()
    kept = lambda grad: seen.append(("kept", "y", [grad.detach().clone()]))  # noqa: E731
    changed = lambda grad: grad.redistribute(placements=[Replicate()]) * 2 if mesh else grad * 2  # noqa: E731

    def program(x):
        y = model(x, 3)
        y.register_hook(changed)
        y.register_hook(kept)
        return y.square().sum()

    def backward(loss):
        loss.backward()

    if mesh:
        weights, inputs = layouts
        for module in (model.first, model.rest[0]):
            for name, p in [*module.named_parameters()]:
                module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [weights])))
        program = torch.compile(program, backend="aot_eager", fullgraph=True)
        backward = torch.compile(backward, backend="aot_eager")
    grads = []
    for n in rows:
        x = torch.arange(n * 4.0).reshape(n, 4) / n
        x = distribute_tensor(x, mesh, [inputs]).requires_grad_() if mesh else x.requires_grad_()
        backward(program(x))
        grads += [whole(p.grad).clone() for p in (x, *model.parameters())]
    return [(kind, name) for kind, name, _ in seen], [[*map(whole, values)] for _, _, values in seen] + grads


def compare(rank, world, rows):
    mesh, (order, wanted) = init_device_mesh("cpu", (world,)), trained(None, None, rows)
    for layouts in ((Shard(0), Replicate()), (Replicate(), Shard(0))):
        torch._dynamo.reset()
        with torch._dynamo.config.patch(compiled_autograd=True):
            ran, found = trained(mesh, layouts, rows)
        assert ran == order
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_gradients_that_are_dtensors():
    run_ranks(2, compare, (2, 2))


@pytest.mark.full
def test_lengths_that_no_graph_knows():
    run_ranks(2, compare, (4, 6, 8, 5), timeout=250)


@pytest.fixture
def fake_mesh():
    with fake_ranks(2):
        yield init_device_mesh("cpu", (2,))


def run_hook(x, hook):
    def program(x):
        y = x * 2
        y.register_hook(hook)
        return y.sin()

    with torch._dynamo.config.patch(compiled_autograd=True):
        y = torch.compile(program, backend="aot_eager", fullgraph=True)(x)
        torch.compile(lambda g: y.backward(g), backend="aot_eager")(y.detach())


def test_a_hook_that_gives_no_dtensor(fake_mesh):
    x = distribute_tensor(torch.ones(4, 3), fake_mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(ShardingError, match="gave no DTensor in the place of one"):
        run_hook(x, lambda grad: torch.zeros(tuple(grad.shape)))


@pytest.mark.parametrize(
    ("hook", "got"),
    [
        (lambda grad: grad[:1], r"\[1, 3\] of torch.float32"),
        (lambda grad: grad.sum(), r"\[\] of torch.float32"),
        (lambda grad: grad.double(), r"\[4, 3\] of torch.float64"),
    ],
)
def test_a_hook_that_gives_another_shape_or_dtype(fake_mesh, hook, got):
    x = distribute_tensor(torch.ones(4, 3), fake_mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(ShardingError, match="another shape or dtype") as caught:
        run_hook(x, hook)
    assert caught.match(got)


def test_gradients_that_are_sharded_tensors(fake_mesh):
    x = to_sharded_tensor(distribute_tensor(torch.ones(4, 3), fake_mesh, [Shard(0)])).detach().requires_grad_()
    refused = pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="takes no gradient that is a ShardedTensor")
    with refused, pytest.warns(UserWarning, match="Error detected"):
        run_hook(x, lambda grad: grad * 2)


def test_without_compiled_autograd_the_break_is_named():
    model, _ = hooked()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Module-level backwards hooks require compiled autograd"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 4), 3)
    plan = explain(model, torch.ones(2, 4), 3)
    assert any("Module-level backwards hooks" in found.kind for found in plan.breaks)
    assert "compiled_autograd = True" in str(plan)


def test_the_guide_lists_every_known_break():
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "regions.md").read_text()
    assert not [advice for advice in WAYS_AROUND.values() if advice not in guide]
