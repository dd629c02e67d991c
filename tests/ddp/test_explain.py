"""What a wrapper tells of itself: the buckets, the course of a step, torch's logging data."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.models import mlp
from tests.ranks import run_ranks

STATIC = [
    "backend_name",
    "bucket_cap_bytes",
    "bucket_sizes",
    "broadcast_buffers",
    "cuda_visible_devices",
    "device_ids",
    "dtypes",
    "find_unused_parameters",
    "gloo_device_transport",
    "gloo_num_threads",
    "gloo_socket_ifname",
    "gradient_as_bucket_view",
    "has_rebuilt_buckets",
    "has_sync_bn",
    "is_multi_device_module",
    "iteration",
    "master_addr",
    "master_port",
    "module_name",
    "num_buckets_reduced",
    "num_parameter_tensors",
    "output_device",
    "prev_iteration_grad_ready_order_indices",
    "rank",
    "rebuilt_bucket_sizes",
    "rebuilt_per_bucket_param_indices",
    "torch_distributed_debug",
    "total_parameter_size_bytes",
    "unused_parameter_size",
    "world_size",
]


def _compared(rank, world):
    """Our logging data beside torch's own, key by key."""
    from torchshard.ddp import DistributedDataParallel

    module = nn.Sequential(mlp(8), nn.BatchNorm1d(8))
    data = []
    for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        model = kind(module)
        at_first = model._get_ddp_logging_data()
        model._set_ddp_runtime_logging_sample_rate(3)
        iterations = []
        for _ in range(14):
            model(torch.ones(2, 8)).sum().backward()
            iterations.append(model._get_ddp_logging_data()["iteration"])
        data.append((at_first, iterations, model._get_ddp_logging_data()))
    (ours_first, ours_iterations, ours), (theirs_first, theirs_iterations, theirs) = data
    assert ours_first == theirs_first
    assert ours_iterations == theirs_iterations
    assert set(ours) == set(theirs)
    assert {key: ours[key] for key in STATIC} == {key: theirs[key] for key in STATIC}
    assert ours["backward_comm_time_start"] >= ours["backward_compute_time_start"] > ours["forward_compute_time_start"]
    assert ours["avg_backward_comm_time"] >= ours["avg_backward_compute_comm_overlap_time"] >= 0
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2).double()))
    assert model._get_ddp_logging_data()["dtypes"] == "c10::Half, double"
    with pytest.raises(ValueError, match="sample rate should be equal or greater than 1"):
        model._set_ddp_runtime_logging_sample_rate(0)
    for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        assert kind(module, static_graph=True)._get_ddp_logging_data()["static_graph"] == 1
        model = kind(module)
        model._set_static_graph()
        assert model._get_ddp_logging_data()["static_graph"] == 1


def test_logging_data_has_torchs_keys_and_values():
    run_ranks(2, _compared)


def _errors(rank, world):
    from torchshard.ddp import DistributedDataParallel

    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model = DistributedDataParallel(module)
    module.forward = lambda x: module[0](x)
    model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model._check_reducer_finalized()
    data = model._get_ddp_logging_data()
    assert data["has_error"] == 1
    assert str(caught.value) in data["error"]
    return str(caught.value)


def test_errors_are_kept_and_name_parameters():
    text = run_ranks(2, _errors)[1]
    assert "Parameters which did not receive grad for rank 1: 1.weight, 1.bias" in text
    assert "Parameter indices which did not receive grad for rank 1: 2 3" in text


def _explained(rank, world, folder):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(mlp(64, 3), bucket_cap_mb=0.02)
    nothing = str(model.explain())
    with pytest.raises(RuntimeError, match="no step has been recorded yet"):
        model.explain().chrome_trace()
    for _ in range(3):
        model(torch.ones(8, 64)).sum().backward()
    told = model.explain()
    assert told.step.number == 3
    for times in told.step.times:
        assert told.step.backward <= times.ready <= times.launched <= times.done
        assert times.launched <= told.step.end
    trace = json.loads(told.chrome_trace())["traceEvents"]
    lanes = [event["args"]["name"] for event in trace if event["ph"] == "M"]
    assert {*lanes} == {"forward", "backward", *(f"bucket {k}" for k in range(len(model.reducer.plan)))}
    assert 0 <= told.exposed <= told.timeline.seconds
    if rank == 0:
        pytest.importorskip("matplotlib")
        told.picture(os.path.join(folder, "step.png"))
        assert os.path.getsize(os.path.join(folder, "step.png")) > 1000
    for _ in range(20):
        model(torch.ones(8, 64)).sum().backward()
    assert model._recorder.last.number == 10
    assert model.reducer.step is None
    model.explain()  # asks for the next one
    model(torch.ones(8, 64)).sum().backward()
    assert model.explain().step.number == 24
    return nothing, str(told)


def test_explain(tmp_path):
    nothing, told = run_ranks(2, _explained, str(tmp_path))[0]
    assert nothing.endswith("no step has been recorded yet")
    lines = told.splitlines()
    assert lines[0].split() == ["bucket", "parameters", "bytes", "ready", "ms", "launched", "ms", "done", "ms"]
    assert any(line.startswith("step 3: forward") and line.endswith("ms were exposed") for line in lines)
    assert any(line.startswith("backward") and "#" in line for line in lines)
    assert any(line.startswith("bucket 0") and "=" in line for line in lines)


@pytest.mark.parametrize("fake_group", [0, 5], indirect=True)
def test_on_a_fake_group(fake_group):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(mlp(8))
    model(torch.ones(1, 8)).sum().backward()
    assert model.explain().step.number == 1
    assert model._get_ddp_logging_data()["world_size"] == dist.get_world_size()
    assert sum(len(bucket.gradients) for bucket in model.reducer.plan) == len(list(model.parameters()))


def test_averages_are_of_the_steps_that_are_sampled(fake_group):
    from torchshard.ddp import DistributedDataParallel

    model, name, told = DistributedDataParallel(mlp(8)), "forward_compute_time", []
    model._set_ddp_runtime_logging_sample_rate(15)
    for step in range(1, 17):
        if step > 10:
            model.explain()  # has a step recorded that is none of these
        model(torch.ones(1, 8)).sum().backward()
        told.append(model._get_ddp_logging_data())
    ten, last = told[10], told[15]
    assert (ten["iteration"], last["iteration"]) == (10, 15)
    assert abs(11 * last[f"avg_{name}"] - 10 * ten[f"avg_{name}"] - last[name]) < 22


def _chosen(rank, world):
    from torchshard.comm.probing import links_of
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(mlp(64, 3), bucket_cap_mb="auto")
    link = model.reducer.link
    assert links_of(dist.group.WORLD, torch.device("cpu"), wait=list)[0] is link  # measured once
    for _ in range(3):
        model(torch.ones(8, 64)).sum().backward()
    told = model.explain()
    assert "were chosen for a link of" in str(told)
    assert DistributedDataParallel(mlp(8), bucket_cap_mb="auto").reducer.link is link
    return link, [bucket.params for bucket in model.reducer.plan]


def test_bucket_sizes_are_chosen_by_the_link():
    first, second = run_ranks(2, _chosen)
    assert first == second
    assert 0 < first[0].latency < 1
    assert first[0].bandwidth > 1e5
