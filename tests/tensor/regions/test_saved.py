"""Compiled functions that are stored (aot_compile, save_compiled_function) and called by another process."""

import os

import pytest
import torch

from tests.inductor_cache import own_cache
from tests.older import require
from tests.ranks import run_ranks
from torchshard import Replicate, Shard, _torch, distribute_module, distribute_tensor, init_device_mesh
from torchshard.state_dict import to_sharded_tensor


def _sums(x):
    return (x * 2).sum(0)


def _further(x):
    """Of what a gradient is there already."""
    return (x * 2 - x.grad).sum(0)


def _waves(s):
    return (s * 2).sin() + s


def _whole(world):
    return torch.arange(world * 6.0).view(-1, 3)


def _examples(world):
    """A DTensor on a mesh that is cut out of another, and two tensors that ask for gradients."""
    line = init_device_mesh("cpu", (world,))
    cut = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))["tp"]
    along, asks, had = (distribute_tensor(_whole(world), mesh, [Shard(0)]) for mesh in (cut, line, line))
    had.requires_grad_().grad = asks.clone()
    sharded = to_sharded_tensor(asks.clone()).requires_grad_()
    asks.requires_grad_()
    return {"cut": (_sums, along), "asks": (_sums, asks), "had": (_further, had), "sharded": (_waves, sharded)}


class _Wave(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).sin()


def _wave(mesh):
    torch.manual_seed(3)
    return distribute_module(_Wave(3, 4), mesh, _rows)


def _rows(_name, module, mesh):
    for name, p in module.named_parameters():
        setattr(module, name, torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))


def _compiled(function):
    return torch.compile(function, fullgraph=True)


def _store(rank, world, directory):
    os.environ.update(own_cache(f"{directory}/first{rank}"))
    examples = {name: (_compiled(function), x) for name, (function, x) in _examples(world).items()}
    mesh = init_device_mesh("cpu", (world,))
    module, row = _wave(mesh), distribute_tensor(torch.ones(2, 3), mesh)
    for name, (function, x) in {**examples, "module": (_compiled(module).forward, row)}.items():
        function.aot_compile(((x,), {})).save_compiled_function(f"{directory}/{name}{rank}")


def _call(rank, world, directory):
    os.environ.update(own_cache(f"{directory}/second{rank}"))

    def loaded(name):
        with open(f"{directory}/{name}{rank}", "rb") as file:
            return torch.compiler.load_compiled_function(file)

    for name, (function, x) in _examples(world).items():
        stored = loaded(name)
        assert stored(x).requires_grad == x.requires_grad
        if name == "sharded":
            torch.testing.assert_close(stored(x).local_tensor(), function(x).local_tensor())
            continue
        whole = _whole(world)
        whole.grad = None if x.grad is None else x.grad.full_tensor()
        torch.testing.assert_close(stored(x).full_tensor(), function(whole))
        with pytest.raises(RuntimeError, match="GuardManager check failed"):  # that layout is not the example's
            stored(x.redistribute(placements=[Replicate()]))

    # Parameters ask for gradients, and get them.
    mesh = init_device_mesh("cpu", (world,))
    module, row = _wave(mesh), distribute_tensor(torch.ones(2, 3), mesh)
    stored = loaded("module")
    gradients = []
    for call in (module, lambda x: stored(module, x)):
        module.zero_grad()
        call(row).square().sum().backward()
        gradients.append(module.weight.grad.full_tensor())
    torch.testing.assert_close(*gradients)


def test_a_stored_function_is_called_by_another_process(tmp_path):
    """Dynamo stores guards, and with them a mesh whose ranks, a tensor, are left out."""
    require("stored functions")
    run_ranks(2, _store, str(tmp_path), timeout=200)
    run_ranks(2, _call, str(tmp_path), timeout=200)


def test_who_asks_is_stored_by_torch_where_it_can(monkeypatch):
    from torch._dynamo.guards import GuardsStatePickler

    class Kind:
        pass

    theirs = GuardsStatePickler.reducer_override
    monkeypatch.setattr(GuardsStatePickler, "_unpickle_traceable_wrapper_subclass", lambda requires_grad: None)
    assert not _torch.store_who_asks(Kind)
    with _torch.without_fast_paths():
        assert not _torch.store_who_asks(type("Other", (), {}))
    assert GuardsStatePickler.reducer_override is theirs
