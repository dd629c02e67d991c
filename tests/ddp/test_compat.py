"""What others expect of a wrapper: that it is torch's, saves and copies as torch's, and says what it cannot do."""

import copy
import inspect
import io
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchshard
from tests.models import mlp
from tests.ranks import run_ranks
from torchshard import _torch
from torchshard.ddp import DistributedDataParallel


def test_is_torchs_class(fake_group):
    model = DistributedDataParallel(mlp(8))
    assert isinstance(model, TorchDDP)
    assert torchshard.DistributedDataParallel is DistributedDataParallel
    assert list(model.state_dict()) == [f"module.{key}" for key in mlp(8).state_dict()]
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    assert list(get_model_state_dict(model)) == list(mlp(8).state_dict())
    assert not TorchDDP._get_active_ddp_module()  # no forward is running


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


def _other_groups(rank, world):
    torch.manual_seed(0)
    reference = mlp(8)
    model = DistributedDataParallel(copy.deepcopy(reference), bucket_cap_mb=0)
    ranks = [(0, 1, 2), (0, 1), (1, 2), (0, 1, 2)]
    groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([1, 2]), dist.group.WORLD]
    for members, group in zip(ranks, groups, strict=True):
        model._update_process_group(group)
        if rank in members:
            for _ in range(2):
                grads = _step(model, rank)
            reference.zero_grad()
            for r in members:
                (reference(torch.full((2, 8), 1.0 + r)).square().mean() / len(members)).backward()
            for p, g in zip(reference.parameters(), grads, strict=True):
                torch.testing.assert_close(g, p.grad)
    assert len(model.reducer.hooks._handles) == len(model.reducer.params)


def test_the_process_group_can_be_changed():
    run_ranks(3, _other_groups)


def _hundredfold(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * 100)


def _settings_on_another_group(rank, world):
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model.register_comm_hook(None, _hundredfold)
    model.require_manual_backward_finalization = True
    model._update_process_group(dist.new_group([0, 1]))
    model(torch.ones(1, 2)).sum().backward()
    model.finalize_backward()
    assert model.module.weight.grad.tolist() == [[200.0, 200.0]]
    assert model._get_ddp_logging_data()["comm_hook"] == "_hundredfold"

    alone = [dist.new_group([i]) for i in range(world)][rank]
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    x = torch.full((1, 2), rank + 1.0)
    model = DistributedDataParallel(
        torch.nn.Sequential(first, second),
        delay_all_reduce_named_params=[("1.weight", second.weight)],
        param_to_hook_all_reduce=first.bias,
    )
    model._update_process_group(alone)
    model(x).sum().backward()
    torch.testing.assert_close(second.weight.grad, first(x))

    module = torch.nn.Linear(2, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})
    model = DistributedDataParallel(module)
    for group in (None, dist.new_group([0, 1]), alone):
        if group is not None:
            model._update_process_group(group)
        before = module.weight.detach().clone()
        model(x).sum().backward()
        step = 1.5 if group is not alone else rank + 1.0
        torch.testing.assert_close(before - module.weight.detach(), torch.full((1, 2), step))


def test_settings_stay_when_the_process_group_changes():
    run_ranks(2, _settings_on_another_group)


def _distributed_autograd(rank, world, folder):
    from torch.distributed import autograd, rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    model = DistributedDataParallel(mlp(8))
    with autograd.context():
        for fast in (nullcontext(), _torch.without_fast_paths()):
            with fast, pytest.raises(NotImplementedError, match=r"torch\.distributed\.autograd collects gradients"):
                model(torch.ones(1, 8))
        with torch.no_grad():
            model(torch.ones(1, 8))
    for count, fast in enumerate((nullcontext(), _torch.without_fast_paths())):
        with fast:
            model(torch.ones(1, 8)).sum().backward()
        assert model.reducer.counters.backwards == count + 1
    rpc.shutdown()


def test_distributed_autograd_is_refused(tmp_path):
    run_ranks(1, _distributed_autograd, str(tmp_path))


def test_what_torchs_tools_ask(fake_group):
    model = DistributedDataParallel(mlp(8))
    params = [p for p in model.parameters() if p.requires_grad]
    names = model._build_debug_param_to_name_mapping(params)
    assert names == dict(enumerate(n for n, _ in model.module.named_parameters()))
    assert list(model._get_data_parallel_params(model.module)) == params
    args, kwargs = model.to_kwargs((torch.ones(2), [torch.ones(3)]), {"x": torch.ones(1)}, 0)
    assert [args[0][0].shape, args[0][1][0].shape, kwargs[0]["x"].shape] == [(2,), (3,), (1,)]
    model._set_ddp_sink_clone(False)
    out = model(torch.ones(1, 8))
    assert model.train() is model
    seen = []
    model.register_forward_hook(lambda m, args, result: seen.append(result.shape))
    model.register_full_backward_hook(lambda m, gave, got: seen.append("backward"))
    model(torch.ones(1, 8, requires_grad=True)).sum().backward()
    assert seen == [out.shape, "backward"]
