"""A wrapper's forward under torch.compile with any other backend: its graphs are cut where buckets are full."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel as Theirs

from tests.ranks import run_ranks
from torchshard import DistributedDataParallel
from torchshard.compiler import split_backend
from torchshard.compiler.backend import torchshard
from torchshard.ddp import cutting

LAYERS, WIDTH = 4, 512  # of 1 MiB each: the least that torch's own optimizer cuts at


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _outside(wrapper, module, backend):
    return torch.compile(wrapper(module, bucket_cap_mb=1), backend=backend)


def _inside(wrapper, module, backend):
    return wrapper(torch.compile(module, backend=backend), bucket_cap_mb=1)


def _graphs(make, wrapper=DistributedDataParallel):
    torch._dynamo.reset()
    counting = CompileCounter()
    model = make(wrapper, Layers(), counting)
    for _ in range(3):
        model(torch.ones(2, WIDTH))
    return counting.frame_count


@pytest.mark.parametrize("make", [_outside, _inside])
def test_a_graph_has_as_many_pieces_as_under_torchs_wrapper(fake_group, make):
    assert _graphs(make, Theirs) == LAYERS
    assert _graphs(make) == LAYERS
    assert _graphs(make, Theirs) == LAYERS  # torch's optimizer, as before
    with torch._dynamo.config.patch(optimize_ddp=False):
        assert _graphs(make) == 1


def test_what_is_not_wrapped_is_whole(fake_group):
    assert _graphs(_outside) == LAYERS
    assert _graphs(_outside, lambda module, **_: module) == 1


def test_a_module_compiled_in_a_wrapper_is_compiled_anew_without(fake_group):
    counting, module = CompileCounter(), Layers()
    compiled, x = torch.compile(module, backend=counting), torch.ones(2, WIDTH)
    wrapped = DistributedDataParallel(compiled, bucket_cap_mb=1)
    for _ in range(2):
        wrapped(x)
        compiled(x)
    assert counting.frame_count == LAYERS + 1


@pytest.mark.parametrize(
    "backend",
    [
        torchshard,
        functools.partial(torchshard, options={"reduction": "split", "bucket_cap_mb": 2}),
        split_backend(2, inner="eager"),
    ],
    ids=["in the graph", "other sizes", "split_backend"],
)
def test_what_sees_to_gradients_itself_is_given_whole_graphs(fake_group, monkeypatch, backend):
    given = []
    monkeypatch.setattr(cutting, "_find_ours", lambda: given.append)
    model = _outside(DistributedDataParallel, Layers(), backend)
    model(torch.ones(2, WIDTH)).sum().backward()
    assert not given


def test_a_package_that_is_not_installed_says_so(fake_group, monkeypatch):
    def unknown(name):
        raise ValueError(name)

    cutting._find_ours.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(cutting._torch, "backend_by_name", unknown)
        with pytest.warns(UserWarning, match="not installed"):
            assert _graphs(_outside) == 1
    cutting._find_ours.cache_clear()


def _step(rank, world, backend, make):
    """Whether gradients are right, and in which order pieces ran and buckets left in a backward."""
    happened = []

    def backward(graph, inputs):
        def run(*args):
            happened.append("piece")
            return graph(*args)

        return make_boxed_func(run)

    torch.manual_seed(0)
    module = Layers()
    reference = copy.deepcopy(module)
    backend = backend or aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=backward)
    model = make(DistributedDataParallel, module, backend)
    ddp = model if make is _inside else model._orig_mod

    def hook(state, bucket):
        happened.append("bucket")
        return (
            dist.all_reduce(bucket.buffer().div_(world), async_op=True).get_future().then(lambda done: done.value()[0])
        )

    ddp.register_comm_hook(None, hook)
    data = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for _ in range(3):
        happened.clear()
        ddp.zero_grad()
        model(data[rank]).square().mean().backward()
    for x in data:
        (reference(x).square().mean() / world).backward()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7)
    return happened


def _steps(rank, world):
    found = [_step(rank, world, None, make) for make in (_outside, _inside)]
    _step(rank, world, "inductor", _outside)
    return found


def test_buckets_leave_while_pieces_run():
    for found in run_ranks(2, _steps, timeout=120):
        assert found == [["piece", "bucket"] * LAYERS] * 2
