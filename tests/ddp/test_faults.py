"""What goes wrong in user code, or is unusual there, leaves the wrapper usable and the gradients right."""

import pytest
import torch
from torch import nn

from tests.models import Stops, mlp, stumble
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("both_ways")


def _wrap(module, **settings):
    from torchshard.ddp import DistributedDataParallel

    return DistributedDataParallel(module, **settings)


def _check_average(model, reference, rank, world):
    """A step of the wrapper equals one of the reference on all ranks' data."""
    x = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(1))
    reference.zero_grad()
    model.zero_grad()
    reference(x.flatten(0, 1)).square().mean().backward()
    model(x[rank]).square().mean().backward()
    for p, q in zip(reference.parameters(), model.module.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


@pytest.fixture(params=[0, 1], ids=["a bucket each", "one bucket"])
def cap(request):
    return request.param


def _pair(rank, cap, **settings):
    torch.manual_seed(rank)
    model, reference = _wrap(mlp(8), bucket_cap_mb=cap, **settings), mlp(8)
    reference.load_state_dict(model.module.state_dict())
    return model, reference


def _exceptions(rank, world, cap):
    model, reference = _pair(rank, cap)
    x = torch.randn(4, 8)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model(torch.randn(4, 9))
        _check_average(model, reference, rank, world)
        hook = model.module[2].register_forward_hook(lambda m, i, out: Stops.apply(out, stumble))
        for out in (model(x), model(x)):
            with pytest.raises(ValueError, match="stumbled"):
                out.sum().backward()  # the last layers' buckets are under way
        hook.remove()
        _check_average(model, reference, rank, world)
        with model.no_sync(), pytest.raises(ValueError, match="stumbled"):
            Stops.apply(model(x), stumble).sum().backward()
        _check_average(model, reference, rank, world)


def test_exceptions_leave_it_usable(cap):
    run_ranks(2, _exceptions, cap)


def _gradients_by_autograd_grad(rank, world, cap):
    """torch.autograd.grad does not touch .grad, so nothing is reduced; a penalty on it works."""
    model, reference = _pair(rank, cap)
    x = torch.randn(4, 8, requires_grad=True)
    for m in (reference, model):
        if m is reference or rank == 0:  # on one rank only: must not communicate
            torch.autograd.grad(m(x).sum(), list(m.parameters()))
            torch.autograd.grad(m(x).sum(), x)
    _check_average(model, reference, rank, world)
    every = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(2))
    for m, data in ((reference, every.flatten(0, 1)), (model, every[rank])):
        m.zero_grad()
        data = data.clone().requires_grad_()
        out = m(data)
        (slope,) = torch.autograd.grad(out.square().sum(), data, create_graph=True)
        (out.square().mean() + slope.square().mean()).backward()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


def test_autograd_grad_and_penalties(cap):
    run_ranks(2, _gradients_by_autograd_grad, cap)


def _create_graph(rank, world, views, cap):
    """With create_graph the average goes into the gradient in place, and the gradient keeps its graph, as in torch."""
    model, reference = _pair(rank, cap, gradient_as_bucket_view=views)
    x = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        reference(x.flatten(0, 1)).square().mean().backward()
        model(x[rank]).square().mean().backward(create_graph=True)
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad.detach(), p.grad)
            assert q.grad.requires_grad == (q.grad.grad_fn is not None)
        assert model.module[0].weight.grad.requires_grad


@pytest.mark.parametrize("views", [False, True])
def test_create_graph(views, cap):
    run_ranks(2, _create_graph, views, cap)


class Hides(nn.Module):
    """Returns its output inside of an object that nobody knows, and keeps a second loss for itself."""

    class Box:
        def __init__(self, value):
            self.value = value

    def __init__(self):
        super().__init__()
        self.net, self.side = mlp(8), nn.Linear(8, 1)

    def forward(self, x):
        self.kept = self.side(x).mean()
        return Hides.Box(self.net(x))


class Remembers(Hides):
    """Returns a tensor; part of the loss is only reachable through an attribute."""

    def forward(self, x):
        return super().forward(x).value


def _hidden(rank, world):
    x = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(1))
    for make in (Hides, Remembers):
        torch.manual_seed(rank)
        model, reference = _wrap(make()), make()
        reference.load_state_dict(model.module.state_dict())
        for _ in range(3):
            model.zero_grad()
            reference.zero_grad()
            for m, data in ((reference, x.flatten(0, 1)), (model, x[rank])):
                out = m(data)
                kept = getattr(m, "module", m).kept
                (getattr(out, "value", out).square().mean() + kept).backward()
            for p, q in zip(reference.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(q.grad, p.grad)
    # Only through the attribute: in two backwards, one of which does not pass through the output.
    for order in ((1, 0), (1, 0), (0, 1), (0, 1)):
        model.zero_grad()
        losses = [model(x[rank]).square().mean(), model.module.kept]
        for k in order:
            losses[k].backward()
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)


def test_losses_that_outputs_do_not_show():
    run_ranks(2, _hidden)


def _around_the_wrapper(rank, world, cap):
    """The inner module called by itself is not reduced: on one rank alone, that would hang."""
    model, reference = _pair(rank, cap)
    for _ in range(3):
        model.zero_grad()
        if rank == 0:
            model.module(torch.ones(2, 8)).sum().backward()
        out = model(torch.ones(2, 8))
        with torch.no_grad():
            model(torch.ones(2, 8))
        del out  # a forward without a backward
        _check_average(model, reference, rank, world)


def test_the_module_inside_is_left_alone(cap):
    run_ranks(2, _around_the_wrapper, cap)


def _between(rank, world, cap):
    """A backward under no_sync, between a forward and its backward, is not taken for that."""
    model, reference = _pair(rank, cap)
    x = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(1))
    reference(x.flatten(0, 1)).square().mean().mul(2).backward()
    for step in range(3):
        model.zero_grad()
        loss = model(x[rank]).square().mean()
        with model.no_sync():
            with model.no_sync():
                pass
            model(x[rank]).square().mean().backward()
        assert model.reducer.counters.backwards == step
        loss.backward()
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)


def test_a_backward_without_reduction_between(cap):
    run_ranks(2, _between, cap)


def _part_of_the_inputs(rank, world, cap):
    """backward(inputs=...) accumulates into some parameters; the rest comes in another backward."""
    model, reference = _pair(rank, cap)
    x = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(1))
    params = list(model.parameters())
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        reference(x.flatten(0, 1)).square().mean().backward()
        loss = model(x[rank]).square().mean()
        loss.backward(inputs=params[:3], retain_graph=True)
        loss.backward(inputs=params[3:])
        for p, q in zip(reference.parameters(), params, strict=True):
            torch.testing.assert_close(q.grad, p.grad)


def test_backward_with_inputs(cap):
    run_ranks(2, _part_of_the_inputs, cap)


def _twice(rank, world):
    torch.manual_seed(0)
    module = nn.ModuleDict({"shared": nn.Linear(8, 3), "b": nn.Linear(8, 3)})
    module.forward = lambda x: (module["shared"](x), module["shared"](x) + module["b"](x))
    model = _wrap(module)
    a, b = model(torch.randn(2, 8))
    a.sum().backward()
    with pytest.raises(RuntimeError, match="mark a variable ready only once") as caught:
        b.sum().backward()
    return str(caught.value)


def test_a_gradient_that_comes_twice_is_reported():
    assert "with name shared." in run_ranks(2, _twice)[0]


def _goes_away(rank, world, cap):
    """When the wrapper is gone its hooks are gone, and the module trains by itself."""
    model, _ = _pair(rank, cap)
    module = model.module
    model(torch.ones(2, 8)).sum().backward()
    del model
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    if rank == 0:
        module(torch.ones(2, 8)).sum().backward()


def test_hooks_go_with_the_wrapper(cap):
    run_ranks(2, _goes_away, cap)
