"""Mixed precision: low data is there for forward and backward alone, whatever becomes of them."""

import copy
import dataclasses
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _MixedPrecision

from tests.ranks import run_ranks
from torchshard.ddp import DistributedDataParallel

LOW = _MixedPrecision(torch.bfloat16, torch.float32)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _wrapped(low=LOW):
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(8, 8), mixed_precision=low)


def _fail(model):
    handle = model.module.weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _step(model)
    handle.remove()
    model.zero_grad()


def _step(model):
    model(torch.ones(4, 8)).float().square().sum().backward()


def _dtypes(module):
    return {t.dtype for p in module.parameters() for t in (p, p.grad) if t is not None}


def test_a_backward_that_fails(alone):
    model = _wrapped()
    saved = {k: torch.full_like(v, 0.3) for k, v in model.state_dict().items()}
    _fail(model)
    assert _dtypes(model) == {torch.float32}
    model.module.load_state_dict({k.removeprefix("module."): v for k, v in saved.items()})
    _step(model)
    assert torch.equal(model.module.weight, torch.full((8, 8), 0.3))
    assert _dtypes(model) == {torch.float32}


def test_a_forward_whose_backward_never_comes(alone):
    model = _wrapped()
    before = copy.deepcopy(model.module.state_dict())
    model(torch.ones(4, 8))
    assert _dtypes(model) == {torch.float32}
    first = model(torch.ones(4, 8))
    second = model(torch.ones(4, 8))
    del first
    assert _dtypes(model) == {torch.bfloat16}
    second = second.sum()
    del second
    assert _dtypes(model) == {torch.float32}
    assert all(map(torch.equal, model.module.state_dict().values(), before.values()))


@pytest.mark.parametrize("use", ["state_dict", "load_state_dict", "deepcopy"])
def test_whoever_saves_loads_or_copies_finds_full_precision(alone, use):
    model = _wrapped()
    full = {k: v.clone() for k, v in model.state_dict().items()}
    loss = model(torch.ones(4, 8)).float().square().sum()
    if use == "state_dict":
        assert all(map(torch.equal, model.state_dict().values(), full.values()))
    elif use == "load_state_dict":
        model.load_state_dict({k: v + 0.1 for k, v in full.items()})
        _step(model)
        assert all(torch.equal(v, full[k] + 0.1) for k, v in model.state_dict().items())
        return
    else:
        copied = copy.deepcopy(model)
        assert _dtypes(copied) == {torch.float32}
        _step(copied)
        assert _dtypes(copied) == {torch.float32}
    loss.backward()
    expected = _wrapped()
    _step(expected)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), expected.parameters(), strict=True))


def test_what_is_written_between_forward_and_backward_is_kept(alone):
    model = _wrapped()
    loss = model(torch.ones(4, 8)).sum()
    with torch.no_grad():
        model.module.bias.fill_(0.3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss.backward()
    assert ["what was written is kept, rounded" in str(w.message) for w in caught] == [True]
    assert torch.equal(model.module.bias, torch.full((8,), 0.3).bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_module_that_is_converted_stays_so(alone, dtype):
    model = _wrapped()
    model.to(dtype)
    assert {v.dtype for v in model.state_dict().values()} == {dtype}
    _step(model)
    model.float()
    _step(model)
    model.to(dtype)
    assert {v.dtype for v in model.state_dict().values()} == {dtype}
    model.zero_grad()
    _step(model)
    assert _dtypes(model) == {dtype}


def test_wrapped_anew_and_dropped(alone):
    model = _wrapped()
    loss = model(torch.ones(4, 8)).sum()
    again = DistributedDataParallel(model.module, mixed_precision=LOW)
    assert _dtypes(again) == {torch.float32}
    _step(again)
    del loss, model
    module = again.module
    loss = again(torch.ones(4, 8)).sum()
    del again
    gc.collect()
    loss.backward()
    del loss
    assert _dtypes(module) == {torch.float32}


def test_a_wrapper_that_has_stepped_is_freed_at_once(alone):
    model = _wrapped()
    _step(model)
    freed = []
    weakref.finalize(model.reducer, freed.append, True)
    gc.disable()
    try:
        del model
        assert freed
    finally:
        gc.enable()


@pytest.mark.parametrize("low", [torch.float32, None])
def test_optimizers_that_step_in_backward_are_refused(alone, low):
    module = nn.Linear(8, 8)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module, mixed_precision=_MixedPrecision(torch.bfloat16, low))
    with pytest.raises(NotImplementedError, match="mixed_precision does not go with optimizers that step in backward"):
        model(torch.ones(4, 8))


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    more: object
    count: int = dataclasses.field(default=3, init=False)


class OfBatch(nn.Linear):
    def forward(self, batch):
        assert batch.count == 3
        assert batch.more[0]["n"].dtype is torch.int64
        return super().forward(batch.x) + super().forward(batch.more[0]["y"].x)


def test_inputs_in_dataclasses(alone):
    model = DistributedDataParallel(OfBatch(8, 8), mixed_precision=LOW)
    batch = Batch(torch.ones(4, 8), [{"n": torch.ones(2).long(), "y": Batch(torch.ones(4, 8), None)}])
    assert model(batch).dtype is torch.bfloat16
    assert batch.x.dtype is torch.float32


def _uneven(rank, world, low):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = DistributedDataParallel(module, mixed_precision=low)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(2 + rank):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).float().square().mean().backward()
            optimizer.step()
    return [p.tolist() for p in module.parameters()], {str(p.dtype) for p in module.parameters()}


@pytest.mark.parametrize(
    "low",
    [_MixedPrecision(torch.bfloat16), _MixedPrecision(reduce_dtype=torch.bfloat16), LOW],
    ids=["parameters", "reduction", "parameters alone"],
)
def test_uneven_inputs(low):
    (first, dtypes), (second, _) = run_ranks(2, _uneven, low, timeout=60)
    assert first == second
    assert dtypes == {"torch.float32"}
