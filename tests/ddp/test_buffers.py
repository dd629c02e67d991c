"""Buffers: from rank 0 before each forward, by a hook before or after it, or left alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

from tests.ranks import run_ranks


class Counts(nn.Module):
    """Has buffers of several kinds; `seen` is replaced in each forward, and `used` saved for backward."""

    def __init__(self, rank):
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.register_buffer("seen", torch.full((2,), float(rank)))
        self.register_buffer("mine", torch.full((2,), 10.0 + rank))
        self.register_buffer("used", torch.full((2,), 20.0 + rank))

    def forward(self, x):
        self.seen = self.seen + 1
        return (self.net(x) * self.used).sum()


def _wrap(module, **settings):
    from torchshard.ddp import DistributedDataParallel

    return DistributedDataParallel(module, **settings)


def _step(model, rank):
    before = model.module.used._version
    loss = model(torch.full((1, 2), 1.0 + rank))
    changed = model.module.used._version - before
    loss.backward()
    return changed


def _values(model):
    return [model.module.get_buffer(name)[0].item() for name in ("seen", "mine", "used")]


def _broadcast(rank, world):
    module = Counts(rank)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["mine"])
    model = _wrap(module)
    found = [_values(model)]
    module.used.fill_(30.0 + rank)
    versions = [_step(model, rank) for _ in range(3)]
    found.append(_values(model))
    with model.no_sync():
        _step(model, rank)
        module.seen.fill_(40.0 + rank)
        _step(model, rank)  # buffers are left alone after a forward without reduction
    found.append(_values(model))
    return found, versions


def test_rank_0_decides_and_version_counters_stay():
    first, second = run_ranks(2, _broadcast)
    assert first == ([[0.0, 10.0, 20.0], [3.0, 10.0, 30.0], [41.0, 10.0, 30.0]], [0, 0, 0])
    assert second == ([[0.0, 11.0, 20.0], [3.0, 11.0, 30.0], [42.0, 11.0, 30.0]], [0, 0, 0])


def _single(rank, world):
    module = nn.Linear(2, 1)
    column = torch.full((3, 2), float(rank), dtype=torch.float64)[:, 1]
    module.register_buffer("one", column[1:2])  # alone in its dtype, with a stride of 2
    model = _wrap(module)
    assert module.one.stride() == (2,)
    model(torch.ones(1, 2)).sum().backward()
    return column.tolist()


def test_a_single_element_of_many():
    assert run_ranks(2, _single) == [[0, 0, 0], [1, 0, 1]]


def _left_alone(rank, world):
    found = []
    for settings in ({"forward_sync_buffers": False}, {"broadcast_buffers": False}, {"init_sync": False}):
        model = _wrap(Counts(rank), **settings)
        assert model.broadcast_buffers == model.forward_sync_buffers == ("init_sync" in settings)
        start = _values(model)
        _step(model, rank)
        found.append((start, _values(model)))
    return found


@pytest.mark.filterwarnings("ignore:DistributedDataParallel. `broadcast_buffers`")
def test_settings():
    _, second = run_ranks(2, _left_alone)
    assert second == [
        ([0.0, 10.0, 20.0], [1.0, 10.0, 20.0]),
        ([1.0, 11.0, 21.0], [2.0, 11.0, 21.0]),
        ([1.0, 11.0, 21.0], [1.0, 10.0, 20.0]),
    ]


def _hooks(rank, world):
    found = []
    for location in Location:
        for returns in (False, True):
            model = _wrap(Counts(rank))
            model._register_buffer_comm_hook(_State(model, returns), _State.sum, comm_hook_location=location)
            _step(model, rank)
            found.append(model.module.seen[0].item())
            with torch.no_grad():
                model(torch.ones(1, 2))
    model._register_buffer_comm_hook(
        model, lambda wrapper, buffers: wrapper._default_broadcast_coalesced([buffers["used"]], authoritative_rank=1)
    )
    model.module.used.fill_(50.0 + rank)
    model.require_forward_param_sync = True
    _step(model, rank)
    with pytest.raises(AssertionError, match="hook must be callable"):
        model._register_buffer_comm_hook(None, 3)
    return found, model.module.used[0].item()


class _State:
    def __init__(self, model, returns):
        self.model, self.returns = model, returns

    def sum(self, buffers):
        work = dist.all_reduce(buffers["seen"], async_op=True)
        if self.returns:
            return [work.get_future()]
        work.wait()
        return None


def test_hooks_run_before_or_after_forward():
    for found, used in run_ranks(2, _hooks):
        assert found == [1.0, 1.0, 2.0, 2.0]  # summed before adding 1, and after
        assert used == 51.0


STRANGE = (
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.complex128,
    torch.bool,
)


def _odd(rank, world):
    """Half-precision buffers under autocast to the other kind; dtypes that gloo lacks; layouts that are not sent."""
    module = nn.Linear(2, 2)
    for name in ("a", "b"):
        module.register_buffer(name, torch.full((2,), rank + 1.0, dtype=torch.float16))
    with torch.autocast("cpu", torch.bfloat16):
        _wrap(module)(torch.ones(1, 2))
    for buffer, kind in (
        (torch.eye(2).to_sparse(), "has the layout torch.sparse_coo"),
        (torch.eye(2).to_sparse_csr(), "has the layout torch.sparse_csr"),
        (torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8), "is quantized"),
    ):
        module.register_buffer("c", buffer)
        with pytest.raises(RuntimeError, match=rf"shape \[2, 2\] {kind}, which is not broadcast; leave it out"):
            _wrap(module)
    del module.c
    for i, dtype in enumerate(STRANGE):  # those of one dtype travel together, a single one alone
        module.register_buffer(f"d{i}", torch.full((2, 3), rank + 1.0).to(dtype))
        module.register_buffer(f"e{i}", torch.full((3, 2), rank + 1.0).to(dtype).t())
    module.register_buffer("alone", torch.tensor(rank + 1, dtype=torch.uint64))
    module.register_buffer("conjugated", torch.full((3,), rank + 1, dtype=torch.complex64).conj())
    _wrap(module)(torch.ones(1, 2))
    assert all((b.to(torch.complex64) == 1).all() for b in module.buffers())
    return module.a.tolist() + module.b.tolist()


def test_unusual_kinds():
    assert run_ranks(2, _odd) == [[1.0] * 4] * 2
