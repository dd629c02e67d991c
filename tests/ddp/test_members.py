"""Parameters that come to be trained after the module was wrapped: averaged, or refused."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.models import mlp
from tests.older import known
from tests.ranks import run_ranks
from torchshard.errors import RankMismatchError


def _batch(rank, seed=0):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * seed + rank))


def _step(model, rank, seed=0):
    model.zero_grad()
    model(_batch(rank, seed)).square().mean().backward()


class _Quantized(torch.Tensor):
    """A weight kept as whole numbers and a scale, for linear layers."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, *bias = args
            return func(x, weight.numbers * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.detach.default, func
        return cls(args[0].numbers, args[0].scale)


def _quantized(rank, world):
    from torchshard.ddp import DistributedDataParallel

    module = mlp(8, 3)
    weight = _Quantized(torch.arange(64).view(8, 8).add(rank).to(torch.int8), torch.tensor(0.01 + rank))
    module[0].weight = nn.Parameter(weight, requires_grad=False)
    model = DistributedDataParallel(module)
    assert torch.equal(weight.numbers, torch.arange(64, dtype=torch.int8).view(8, 8))  # rank 0's
    assert weight.scale == torch.tensor(0.01)
    with model.join():
        _step(model, rank)
    grads = [p.grad for p in module.parameters()]
    assert grads.pop(0) is None
    module[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"0\.weight is a _Quantized, made of other tensors"):
        _step(model, rank)
    with pytest.raises(ValueError, match=r"freeze it by requires_grad_\(False\)"):
        DistributedDataParallel(module)
    return [g.tolist() for g in grads]


def _thawed(rank, world):
    """Frozen when wrapped, trained later, from a backward under no_sync on; `settings` None: compiled before."""
    from torchshard.ddp import DistributedDataParallel

    for settings in (
        {},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": "auto"},
        {"static_graph": True},
        {"find_unused_parameters": True},
        *([None] if known("parameters that are thawed") else []),
    ):
        module, twin = mlp(8, 3), mlp(8, 3)
        twin.load_state_dict(module.state_dict())
        module[2].requires_grad_(False)
        model = DistributedDataParallel(module, **settings or {})
        run = (
            model
            if settings is not None
            else torch.compile(model, backend="torchshard", options={"inner": "aot_eager"})
        )
        for steps in ([0], [1], [2, 3], [4], [5]):
            module[2].requires_grad_(steps != [0] and steps != [1])
            model.zero_grad()
            twin.zero_grad()
            for step in steps:
                with model.no_sync() if step == 2 else nullcontext():
                    run(_batch(rank, step)).square().mean().backward()
                for r in range(world):
                    (twin(_batch(r, step)).square().mean() / world).backward()
            for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
                assert not p.requires_grad or torch.allclose(p.grad, q.grad), (settings, steps, name)
        assert model.reducer.counters.backwards == 3
        del model, run
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())


def test_weights_made_of_other_tensors():
    first, second = run_ranks(2, _quantized)
    assert first == second


def test_a_parameter_that_is_thawed_is_averaged():
    run_ranks(2, _thawed)


class Thawing(nn.Module):
    """Its second layer is trained once its forward has seen to it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        self.b.requires_grad_(True)
        return self.b(self.a(x))


def _as_it_is(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _thawed_late(rank, world):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(Thawing())
    with pytest.raises(RuntimeError, match=r"b\.weight, b\.bias did not require a gradient when this forward began"):
        _step(model, rank)
    _step(model, rank)
    assert len(model.reducer.params) == 4

    module = mlp(8, 3)
    module[2].requires_grad_(False)
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, _as_it_is)
    _step(model, rank)
    module[2].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"2\.weight, 2\.bias did not require a gradient until now"):
        _step(model, rank)

    module = mlp(8, 3)
    module[2].requires_grad_(False)
    model = DistributedDataParallel(module)
    _step(model, rank)
    module[2].requires_grad_(rank == 0)
    with pytest.raises(RankMismatchError, match=r"is no longer frozen: 2\.weight"):
        _step(model, rank)


def test_a_parameter_that_is_thawed_in_a_forward_or_on_one_rank_is_named():
    run_ranks(2, _thawed_late)


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
    with pytest.raises(RuntimeError, match="wrap the module anew"):
        _step(model, rank)

    model = wrapped(find_unused_parameters=True)
    model.module[2] = nn.Linear(8, 8)
    with pytest.raises(
        RuntimeError, match=r"2\.weight, 2\.bias of the wrapped module are no longer in it, and 2\.weight"
    ):
        _step(model, rank)

    model = wrapped()
    model.module.append(nn.Linear(8, 8))
    with pytest.raises(RuntimeError, match=r"5\.weight, 5\.bias came to the module after it was wrapped"):
        _step(model, rank)
    model.parameters_to_ignore |= {"5.weight", "5.bias"}
    _step(model, rank)

    for another in (mlp(8, 3), nn.Sequential(model.module, nn.Linear(8, 8))):
        model.module = another
        with pytest.raises(RuntimeError, match=r"(no longer in it, and|came to the module after)"):
            _step(model, rank)
        with pytest.raises(RuntimeError, match="wrap the module anew"):
            _step(model, rank)

    model = wrapped()
    torch.__future__.set_swap_module_params_on_conversion(True)
    with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight"):
        model.double()


def test_parameters_that_are_replaced_or_come_in_addition_are_noticed():
    run_ranks(2, _replaced)


class _Shifted(nn.Module):
    """Another module in a place of its own, with the same parameters and a buffer besides."""

    def __init__(self, inner, shift):
        super().__init__()
        self.inner = inner
        self.register_buffer("shift", torch.full((8,), shift))

    def forward(self, x):
        return self.inner(x) + self.shift


def _held_otherwise(rank, world):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(_Shifted(mlp(8, 3), 1.0))
    _step(model, rank)
    model.module = _Shifted(model.module.inner, 2.0 + rank)
    _step(model, rank)
    assert model.module.shift.tolist() == [2.0] * 8
    model.module = torch.compile(model.module, backend="eager")
    _step(model, rank)
    model.module.inner.append(nn.Linear(8, 8))
    with pytest.raises(RuntimeError, match=r"inner\.5\.weight, inner\.5\.bias came to the module"):
        _step(model, rank)


def test_another_module_with_the_same_parameters_in_the_place_of_the_wrapped_one():
    run_ranks(2, _held_otherwise)


def test_tables_of_parameters_that_take_the_place_of_others(fake_group):
    """What stands in them counts, then and later."""
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(mlp(8, 3))
    first = model.module[0]
    first._parameters = dict(first._parameters)
    _step(model, 0)
    assert model.reducer.members.look() == []
    first._parameters["weight"] = nn.Parameter(torch.randn(8, 8))
    with pytest.raises(RuntimeError, match="not averaged over the ranks"):
        _step(model, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tables_that_are_no_dictionaries():
    from torchshard.ddp.members import Places

    module = torch.jit.script(mlp(8, 3))
    places = Places(module)
    assert places.are_kept()
    getattr(module, "0").weight = nn.Parameter(torch.randn(8, 8))
    assert not places.are_kept()
