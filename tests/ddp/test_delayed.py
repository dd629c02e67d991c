"""delay_all_reduce_named_params: whatever stands for a gradient at the end of backward is averaged, on all ranks alike."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks

WAYS = ("usual", "zero_grad between", "kept", "create_graph", "double()", "channels_last")


def _pair(way):
    torch.manual_seed(0)
    if way == "channels_last":
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3))
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def _input(way, step, rank):
    shape = (2, 3, 6, 6) if way == "channels_last" else (4, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + rank))


def _delayed(module, delayed, **settings):
    from torchshard.ddp import DistributedDataParallel

    named = [(n, p) for n, p in module.named_parameters() if n.startswith(delayed)]
    first = next(p for n, p in module.named_parameters() if not n.startswith(delayed))
    return DistributedDataParallel(
        module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=first, **settings
    )


def _each_way(rank, world, way):
    module = _pair(way)
    reference = copy.deepcopy(module)
    model = _delayed(module, str(len(module) - 1))
    for step in range(4):
        if step == 1:
            if way == "double()":
                model.double(), reference.double()
            if way == "channels_last":
                model.to(memory_format=torch.channels_last)
        dtype = module[0].weight.dtype
        if way == "zero_grad between":
            loss = model(_input(way, step, rank).to(dtype)).square().sum()
            model.zero_grad()
        else:
            if way != "kept" or not step:
                model.zero_grad()
            loss = model(_input(way, step, rank).to(dtype)).square().sum()
        loss.backward(create_graph=way == "create_graph")
        if way != "kept" or not step:
            reference.zero_grad()
        for other in range(world):
            (reference(_input(way, step, other).to(dtype)).square().sum() / world).backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("way", WAYS)
def test_whatever_stands_for_a_gradient_is_averaged(way):
    run_ranks(2, _each_way, way, timeout=60)


@pytest.mark.parametrize("way", ["replaced", "assigned"])
def test_a_delayed_parameter_that_is_replaced_is_named(way):
    with pytest.raises(
        AssertionError, match=r"RuntimeError: .*2\.weight of the wrapped module are no longer in it"
    ) as e:
        run_ranks(2, _without_reference, way, timeout=60)
    assert str(e.value).count("no longer in it") == 2


def _without_reference(rank, world, way):
    module = _pair(way)
    model = _delayed(module, "2")
    for step in range(4):
        new = module[2].weight.detach().clone()
        if step == 1 and way == "replaced":
            module[2].weight = nn.Parameter(new)
        if step == 1 and way == "assigned":
            model.load_state_dict({"module.2.weight": new}, strict=False, assign=True)
        model.zero_grad()
        model(_input(way, step, rank)).square().sum().backward()


class Layers(nn.Module):
    """Three layers, the last of which may be left out."""

    def __init__(self, reentrant=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x, all_of_it=True):
        for layer in (self.a, self.b, self.c)[: 3 if all_of_it else 2]:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x))
        return x


def _unused(rank, world, find_unused):
    """On one rank they get no gradient in a step, on no rank in another; what others need not say, they need not."""
    module = Layers()
    reference = copy.deepcopy(module)
    model = _delayed(module, "c", find_unused_parameters=find_unused)
    for step, users in enumerate(((0, 1), (1,), (), (0, 1))):
        model.zero_grad()
        model(_input("", step, rank), rank in users).square().sum().backward()
        reference.zero_grad()
        for other in range(world):
            (reference(_input("", step, other), other in users).square().sum() / world).backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, torch.zeros_like(q) if q.grad is None else q.grad)


@pytest.mark.parametrize("find_unused", [False, True])
def test_unused_on_some_ranks(find_unused):
    run_ranks(2, _unused, find_unused, timeout=60)


def _reentrant(rank, world, delayed):
    """Backwards inside of a backward bring gradients before and after the one that would start the reduction."""
    module, reference = Layers(reentrant=True), Layers()
    model = _delayed(module, delayed)
    for step in range(3):
        model.zero_grad()
        model(_input("", step, rank).requires_grad_()).square().sum().backward()
        reference.zero_grad()
        for other in range(world):
            (reference(_input("", step, other)).square().sum() / world).backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("delayed", [("a", "b"), ("b", "c"), ("b",)], ids="".join)
def test_re_entrant_checkpoints(delayed):
    run_ranks(2, _reentrant, delayed, timeout=60)


def _alone_in_a_backward(rank, world):
    """A backward that reaches none of the others; a term of the loss with a backward of its own."""
    module = Layers()
    model = _delayed(module, "c")
    x = _input("", 0, rank)
    for frozen in (False, True):
        module.a.requires_grad_(not frozen), module.b.requires_grad_(not frozen)
        model.zero_grad()
        y = model(x)
        (module.c.weight * (rank + 1)).sum().backward()
        y.sum().backward()
        grads = [torch.empty_like(module.c.weight) for _ in range(world)]
        dist.all_gather(grads, module.c.weight.grad)
        assert torch.equal(grads[0], grads[1]), frozen
        torch.testing.assert_close(module.c.weight.grad.sum() - 1.5 * 64, _own(module, x, world), atol=1e-4, rtol=1e-4)


def _own(module, x, world):
    """The sum of the weight's gradients, averaged."""
    with torch.enable_grad():
        (own,) = torch.autograd.grad(module(x).sum(), module.c.weight)
    total = own.sum()
    dist.all_reduce(total)
    return total / world


def test_a_backward_of_their_own():
    run_ranks(2, _alone_in_a_backward, timeout=60)


def _stepping(rank, world):
    module = Layers()
    _apply_optimizer_in_backward(torch.optim.SGD, module.c.parameters(), {"lr": 0.1})
    model = _delayed(module, "c")
    with pytest.raises(
        NotImplementedError, match="delay_all_reduce_named_params does not go with optimizers that step"
    ):
        model(_input("", 0, rank))


def test_optimizers_that_step_in_backward_are_refused():
    run_ranks(2, _stepping, timeout=60)


def _untriggered(rank, world):
    """Whether the parameter that would start the reduction gets a gradient makes no difference."""
    from torchshard.ddp import DistributedDataParallel

    module = Layers()
    named = [(f"c.{n}", p) for n, p in module.c.named_parameters()]
    extra = nn.Parameter(torch.ones(1))
    model = DistributedDataParallel(module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=extra)
    model(_input("", 0, rank)).sum().backward()
    return [p.grad.tolist() for p in module.parameters()]


def test_whether_the_trigger_comes_makes_no_difference():
    one, other = run_ranks(2, _untriggered, timeout=60)
    assert one == other
