"""Whose memory `.grad` is: nobody notices that a bucket lies behind it, unless bucket views were asked for."""

import sys
import time

import pytest
import torch
from torch import nn

from tests.models import mlp
from tests.ranks import run_ranks
from torchshard import _torch


def _step(model, value=1.0):
    model(torch.full((2, 64), value)).square().mean().backward()


def _model(**settings):
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 8)), **settings)
    for _ in range(2):
        model.zero_grad()
        _step(model)
    return model


def _held(rank, world, set_to_none):
    model = _model()
    for value in (2.0, 3.0, 4.0):
        held = [p.grad for p in model.parameters()]
        parts = [p.grad.view(-1)[1:] for p in model.parameters()]
        copies = [g.clone() for g in held]
        for p in model.parameters():
            p.grad = None if set_to_none else torch.zeros_like(p)
        _step(model, value)
        for g, part, copy in zip(held, parts, copies, strict=True):
            assert torch.equal(g, copy)
            assert torch.equal(part, copy.view(-1)[1:])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_is_held_does_not_change(set_to_none):
    run_ranks(2, _held, set_to_none)


def _users_own(rank, world):
    """Gradients in a flat buffer of the user's, as some optimizers have them, receive the averages."""
    model, expected = _model(), None
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    views = flat.split([p.numel() for p in model.parameters()])
    for p, view in zip(model.parameters(), views, strict=True):
        p.grad = view.view_as(p)
    for _ in range(3):
        addresses = [p.grad.data_ptr() for p in model.parameters()]
        flat.zero_()
        _step(model, 1.0 + rank)
        assert [p.grad.data_ptr() for p in model.parameters()] == addresses
        every = [torch.empty_like(flat) for _ in range(world)]
        torch.distributed.all_gather(every, flat)
        assert torch.equal(every[0], every[1])
        assert expected is None or torch.equal(flat, expected)
        expected = flat.clone()
    assert flat.abs().min() >= 0
    assert flat.abs().sum() > 0


def test_gradients_that_exist_keep_their_identity():
    run_ranks(2, _users_own)


def _between_forward_and_backward(rank, world):
    """zero_grad is called after the forward, as many do."""
    model = _model()
    for set_to_none in (True, False, True):
        loss = model(torch.ones(2, 64) * (1 + rank)).square().mean()
        held = [(p.grad, p.grad.clone()) for p in model.parameters()]
        model.zero_grad(set_to_none)
        loss.backward()
        if set_to_none:
            assert all(torch.equal(g, copy) for g, copy in held)
        else:
            assert all(p.grad.data_ptr() == g.data_ptr() for p, (g, _) in zip(model.parameters(), held, strict=True))


def test_zero_grad_after_forward():
    run_ranks(2, _between_forward_and_backward)


def _detachable(rank, world):
    model = _model()
    for p in model.parameters():
        p.grad.detach_()
        p.grad.zero_()
        assert not p.grad._is_view()


def test_gradients_are_no_views_for_autograd():
    run_ranks(2, _detachable)


def _views(rank, world):
    model = _model(gradient_as_bucket_view=True)
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    size = sum(p.numel() for p in model.parameters()) * 4
    assert {p.grad.untyped_storage().nbytes() for p in model.parameters()} == {size}
    model.zero_grad()
    _step(model)
    assert [p.grad.data_ptr() for p in model.parameters()] == addresses


def test_views_stay_where_they_are():
    run_ranks(2, _views)


def _steady(rank, world, views):
    """Steps that nobody watches use the same memory again; gloo's thread lets a tensor go shortly after its work."""
    model, storages = _model(gradient_as_bucket_view=views), set()
    for _ in range(4):
        time.sleep(0.1)  # a step of these is shorter than it may take a busy machine to run that thread again
        model.zero_grad()
        _step(model)
        storages.add(next(model.parameters()).grad.untyped_storage().data_ptr())
    return len(storages)


@pytest.mark.parametrize("views", [False, True])
def test_memory_is_used_again(views):
    assert run_ranks(2, _steady, views) == [1, 1]


def _without_private_names(rank, world):
    """The same gradients where torch's private names are missing."""
    x, results = torch.randn(4, 8), []
    assert "torchshard.ddp" not in sys.modules
    with _torch.without_fast_paths():  # before the import, at which some are looked up
        from torchshard.ddp import DistributedDataParallel

        results.append(_gradients(DistributedDataParallel, x))
    results.append(_gradients(DistributedDataParallel, x))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _gradients(wrap, x):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(mlp(8), nn.BatchNorm1d(8), nn.Linear(8, 900)))
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def test_without_private_names_of_torch():
    run_ranks(2, _without_private_names, imported=False)
