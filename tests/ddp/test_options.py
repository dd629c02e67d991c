"""What the constructor takes, and what it says to what it does not take."""

import inspect
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from expecttest import assert_expected_inline
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchshard
from tests.models import mlp
from torchshard.ddp import DistributedDataParallel


def test_signature_is_torchs():
    ours = inspect.signature(DistributedDataParallel).parameters
    theirs = inspect.signature(TorchDDP).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    later = ["batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation"]  # from 2.12, 2.13 and 2.15 on
    assert list(ours)[len(theirs) :] in [later[i:] for i in range(4)]
    renamed = set() if "forward_sync_buffers" in theirs else {"broadcast_buffers"}  # from 2.13 on
    alike = theirs.keys() - renamed
    assert {n: theirs[n].default for n in alike} == {n: ours[n].default for n in alike}


def _device_mesh(axes):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 4) if axes > 1 else (8,), mesh_dim_names=("a", "b")[:axes])


REFUSED = {
    "no gradient": (lambda: (nn.ReLU(), {}), RuntimeError, "doesn't have any parameter that requires a gradient"),
    "uninitialised": (lambda: (nn.LazyLinear(3), {}), RuntimeError, "uninitialized parameters can't be used"),
    "two device ids": (lambda: (mlp(), {"device_ids": [0, 1]}), ValueError, "can only be None or contain a single"),
    "device ids on CPU": (lambda: (mlp(), {"device_ids": [1]}), ValueError, "but got device_ids [1]"),
    "output device on CPU": (lambda: (mlp(), {"output_device": 1}), ValueError, "output_device 1, and module param"),
    "two device types": (
        lambda: (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), {}),
        ValueError,
        "must be on the same type of devices",
    ),
    "group and mesh": (
        lambda: (mlp(), {"process_group": dist.group.WORLD, "device_mesh": _device_mesh(1)}),
        RuntimeError,
        "Cannot specify both process_group and device_mesh",
    ),
    "two-dimensional mesh": (lambda: (mlp(), {"device_mesh": _device_mesh(2)}), RuntimeError, "Only 1D device mesh"),
    "one of the delay pair": (
        lambda: (mlp(), {"delay_all_reduce_named_params": []}),
        ValueError,
        "need to be set at the same time",
    ),
    "SyncBatchNorm on CPU": (
        lambda: (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), {}),
        ValueError,
        "SyncBatchNorm layers only work with GPU modules",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_gets_torchs_exception(fake_group, case):
    make, kind, text = REFUSED[case]
    module, settings = make()
    with pytest.raises(kind, match=re.escape(text)):
        DistributedDataParallel(module, **settings)
    if case != "SyncBatchNorm on CPU":  # torch's wrapper cannot be built on a fake group, but gets as far as this
        with pytest.raises(kind):
            TorchDDP(module, **settings)


def test_what_is_no_module_is_named(fake_group):
    with pytest.raises(TypeError, match=r"wraps a torch\.nn\.Module, not a list"):
        DistributedDataParallel(list(mlp().parameters()))


def test_a_module_without_values_is_named(fake_group):
    with pytest.raises(
        RuntimeError, match=r"0\.weight is on the meta device, .* call module\.to_empty\(device=\.\.\.\)"
    ):
        DistributedDataParallel(mlp().to("meta"))


def test_a_module_that_cannot_be_trained_is_refused(fake_group):
    with torch.inference_mode():
        module = mlp()
    with pytest.raises(RuntimeError, match=r"made under torch\.inference_mode\(\) .* make the module outside of it"):
        DistributedDataParallel(module)


def test_a_module_that_is_wrapped_in_inference_mode_can_be_trained(fake_group):
    module = mlp()
    with torch.inference_mode():
        model = DistributedDataParallel(module)
    model(torch.ones(2, next(model.parameters()).shape[1])).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


OURS = {
    "negative cap": ({"bucket_cap_mb": -1}, ValueError, "cannot hold less than nothing"),
    "negative cap in the list": ({"bucket_cap_mb_list": [1, -2]}, ValueError, "cap of -2 MiB"),
    "a word": ({"bucket_cap_mb": "large"}, ValueError, "bucket_cap_mb='large' is not possible"),
    "the name of a backend": (
        {"process_group": "gloo"},
        TypeError,
        "'gloo' is a str, .* None for that of init_process",
    ),
    "auto and more": ({"bucket_cap_mb": "auto", "bucket_cap_mb_list": [1]}, ValueError, "without bucket_cap_mb_list"),
}


@pytest.mark.parametrize("case", OURS)
def test_bad_input_gets_a_sentence(fake_group, case):
    settings, kind, text = OURS[case]
    with pytest.raises(kind, match=text):
        DistributedDataParallel(mlp(), **settings)


def test_modules_that_would_come_out_wrong_are_refused(fake_group):
    for distribute_module in (torch.distributed.tensor.distribute_module, torchshard.distribute_module):
        with pytest.raises(ValueError, match=r"DTensor; say over which axis of its mesh"):
            DistributedDataParallel(distribute_module(mlp(8), _device_mesh(1)))


def test_a_rank_outside_of_the_group(fake_group):
    with pytest.raises(ValueError, match="this rank is not a member of the process group"):
        DistributedDataParallel(mlp(8), process_group=dist.new_group([1, 2]))
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [1, 2])
    with pytest.raises(ValueError, match="rank 0 is not in DeviceMesh"):
        DistributedDataParallel(mlp(8), device_mesh=mesh)


def test_without_a_process_group():
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        DistributedDataParallel(mlp())


def test_a_mesh_of_its_own(fake_group):
    assert DistributedDataParallel(mlp(), device_mesh=_device_mesh(1)).process_group.size() == 8
    assert DistributedDataParallel(mlp(), device_mesh=_device_mesh(2)["a"]).process_group.size() == 2


def test_sparse_gradients_are_refused_when_they_come(fake_group):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(9, 600))

        def forward(self, x):
            return nn.functional.embedding(x, self.table, sparse=True)

    model = DistributedDataParallel(Hidden())
    with pytest.raises(NotImplementedError, match="sparse gradients are not reduced yet"):
        model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize(
    ("settings", "warns", "expected"),
    [
        ({}, None, (True, 2)),
        ({"broadcast_buffers": False}, "`broadcast_buffers` is deprecated", (False, 0)),
        ({"forward_sync_buffers": False}, None, (False, 2)),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, "both `broadcast_buffers`", (True, 2)),
        ({"check_reduction": True}, "no effect", (True, 2)),
    ],
)
def test_buffer_arguments(fake_group, monkeypatch, recwarn, settings, warns, expected):
    sent = []
    monkeypatch.setattr("torchshard.ddp.wrapper.broadcast_coalesced", lambda tensors, group, **_: sent.extend(tensors))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), **settings)
    buffers = [t for t in sent if not t.requires_grad and t.dim()]
    assert (model.broadcast_buffers, len(buffers)) == expected
    texts = [str(w.message) for w in recwarn if w.category is FutureWarning]
    assert [warns in text for text in texts] == ([True] if warns else [])


def test_sizes_that_others_read(fake_group):
    default = DistributedDataParallel(mlp(8))
    assert (default.bucket_bytes_cap, default.bucket_bytes_cap_default) == (25 << 20, True)
    small = DistributedDataParallel(mlp(8), bucket_cap_mb=0.5)
    assert (small.bucket_bytes_cap, small.bucket_bytes_cap_default) == (1 << 19, False)
    assert DistributedDataParallel(mlp(8), bucket_cap_mb_list=[1, 2]).bucket_bytes_cap_list == [1 << 20, 2 << 20]


def test_buckets_as_text(fake_group):
    model = DistributedDataParallel(mlp(64, 5), bucket_cap_mb=0.03)
    for _ in range(2):
        model(torch.randn(2, 64)).sum().backward()
    assert_expected_inline(
        str(model.reducer),
        """\
bucket    parameters              bytes     kind
--------  ----------------------  --------  -----------
0         8.bias .. 6.weight (4)  32.5 KiB  float32 cpu
1         4.bias .. 2.weight (4)  32.5 KiB  float32 cpu
2         0.bias, 0.weight        16.2 KiB  float32 cpu""",
    )
    assert_expected_inline(str(model.reducer.counters), """Counters(backwards=2, by_hook=20, in_graph=0, late=0)""")
