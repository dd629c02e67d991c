"""What others expect of a wrapper: that it is torch's, saves and copies as torch's, and says what it cannot do."""

import copy
import inspect
import io
import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchshard
from tests.models import mlp
from tests.ranks import run_ranks
from torchshard.ddp import DistributedDataParallel


def test_is_torchs_class(fake_group):
    model = DistributedDataParallel(mlp(8))
    assert isinstance(model, TorchDDP)
    assert torchshard.DistributedDataParallel is DistributedDataParallel
    assert list(model.state_dict()) == [f"module.{key}" for key in mlp(8).state_dict()]
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    assert list(get_model_state_dict(model)) == list(mlp(8).state_dict())
    assert TorchDDP._get_active_ddp_module() is None


def test_nothing_of_torchs_reaches_for_its_reducer():
    """Each method of torch's class that uses its reducer or logger is overridden, or only called by such."""
    inside = {
        "_ddp_init_helper", "_fire_reducer_autograd_hook", "_lazy_init", "_match_all_reduce_for_bwd_pass",
        "_match_unused_params_allreduce", "_post_forward", "_pre_forward", "_sync_module_buffers", "_log_and_throw",
    }  # fmt: skip
    users = {
        name
        for name, method in inspect.getmembers(TorchDDP, inspect.isfunction)
        if re.search(r"self\.(reducer|logger)\b", inspect.getsource(method))
    }
    left = {name for name in users if getattr(DistributedDataParallel, name) is getattr(TorchDDP, name)}
    assert left <= inside


CALLS = {
    "join": (),
    "join_hook": (),
    "_register_buffer_comm_hook": (None, None),
    "_set_sparse_metadata": (None,),
    "_update_process_group": (None,),
    "_get_ddp_logging_data": (),
    "_set_ddp_runtime_logging_sample_rate": (1,),
}


@pytest.mark.parametrize("name", CALLS)
def test_methods_are_refused_by_name(fake_group, name):
    with pytest.raises(NotImplementedError, match=rf"{name}\(\).* is not supported by torchshard yet"):
        getattr(DistributedDataParallel(mlp(8)), name)(*CALLS[name])


def _step(model, rank):
    model.zero_grad()
    model(torch.full((2, 8), 1.0 + rank)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def _copies(rank, world):
    torch.manual_seed(rank)
    model = DistributedDataParallel(mlp(8), bucket_cap_mb=0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = [model, copy.deepcopy(model), torch.load(file, weights_only=False)]
    for _ in range(3):
        first, *others = (_step(twin, rank) for twin in twins)
        assert all(torch.equal(g, h) for other in others for g, h in zip(first, other, strict=True))
    assert [twin.reducer.counters.backwards for twin in twins] == [3, 3, 3]
    lonely = DistributedDataParallel(mlp(8), process_group=dist.new_group())
    with pytest.raises(RuntimeError, match="only supported when using DDP with the default process group"):
        copy.deepcopy(lonely)


def test_copies_reduce_as_well():
    run_ranks(2, _copies)


def _ignored(rank, world):
    torch.manual_seed(rank)
    module = mlp(8)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
    model = DistributedDataParallel(module)
    grads = _step(model, rank)
    every = [[torch.empty_like(g) for _ in range(world)] for g in grads]
    for g, out in zip(grads, every, strict=True):
        dist.all_gather(out, g)
    names = [n for n, _ in module.named_parameters()]
    return [n for n, (a, b) in zip(names, every, strict=True) if not torch.equal(a, b)]


def test_ignored_parameters_are_left_alone():
    assert run_ranks(2, _ignored) == [["2.weight"]] * 2
