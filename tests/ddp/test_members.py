"""Parameters that are trained though nobody averages them: said, or refused."""

import copy
import warnings

import pytest
import torch
from torch import nn

from tests.models import mlp
from tests.ranks import run_ranks


def _step(model, rank, seed=0):
    model.zero_grad()
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * seed + rank))).square().mean().backward()


def _thawed(rank, world):
    from torchshard.ddp import DistributedDataParallel

    module = mlp(8, 3)
    module[2].requires_grad_(False)
    model = DistributedDataParallel(module)
    _step(model, rank)
    module[2].requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in (1, 2):
            _step(model, rank, seed)
    del model
    assert not module[2].weight._post_accumulate_grad_hooks
    return [str(w.message) for w in caught]


def test_a_parameter_that_is_thawed_is_named_once():
    for said in run_ranks(2, _thawed):
        assert len(said) == 1
        assert "2.bias has got a gradient, but did not require one when the module was wrapped" in said[0]


def _replaced(rank, world):
    from torchshard.ddp import DistributedDataParallel

    def wrapped(**settings):
        model = DistributedDataParallel(mlp(8, 3), **settings)
        for seed in (0, 1):
            _step(model, rank, seed)
        return model

    model = wrapped()
    with pytest.raises(RuntimeError, match=r"0.weight .. 4.bias \(6\) of the wrapped module are no longer in it"):
        model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)

    model = wrapped()
    model.module.load_state_dict(copy.deepcopy(model.module.state_dict()), assign=True)
    _step(model, rank)
    with pytest.raises(RuntimeError, match="wrap the module anew"):
        _step(model, rank)

    model = wrapped(find_unused_parameters=True)
    model.module[2] = nn.Linear(8, 8)
    _step(model, rank)
    with pytest.raises(
        RuntimeError, match=r"2\.weight, 2\.bias of the wrapped module are no longer in it, and 2\.weight"
    ):
        _step(model, rank)

    model = wrapped()
    torch.__future__.set_swap_module_params_on_conversion(True)
    with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight"):
        model.double()


def test_parameters_that_are_replaced_are_noticed():
    run_ranks(2, _replaced)
