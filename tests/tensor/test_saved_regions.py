"""Compiled functions that are stored (aot_compile, save_compiled_function) and called by another process."""

import os

import pytest
import torch

from tests.inductor_cache import own_cache
from tests.older import require
from tests.ranks import run_ranks
from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh
from torchshard.state_dict import to_sharded_tensor


def _sums(x):
    return (x * 2).sum(0)


def _waves(s):
    return (s * 2).sin() + s


def _whole(world):
    return torch.arange(world * 6.0).view(-1, 3)


def _examples(world):
    """A DTensor on a mesh of its own, one on a mesh cut out of another, and a ShardedTensor."""
    line = init_device_mesh("cpu", (world,))
    cut = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))["tp"]
    split, along = (distribute_tensor(_whole(world), mesh, [Shard(0)]) for mesh in (line, cut))
    return {"line": (_sums, split), "cut": (_sums, along), "sharded": (_waves, to_sharded_tensor(split))}


def _store(rank, world, directory):
    os.environ.update(own_cache(f"{directory}/first{rank}"))
    for name, (function, x) in _examples(world).items():
        torch.compile(function, fullgraph=True).aot_compile(((x,), {})).save_compiled_function(
            f"{directory}/{name}{rank}"
        )


def _call(rank, world, directory):
    os.environ.update(own_cache(f"{directory}/second{rank}"))
    for name, (function, x) in _examples(world).items():
        with open(f"{directory}/{name}{rank}", "rb") as file:
            stored = torch.compiler.load_compiled_function(file)
        if name == "sharded":
            torch.testing.assert_close(stored(x).local_tensor(), function(x).local_tensor())
            continue
        torch.testing.assert_close(stored(x).full_tensor(), function(_whole(world)))
        with pytest.raises(RuntimeError, match="GuardManager check failed"):  # that layout is not the example's
            stored(x.redistribute(placements=[Replicate()]))


def test_a_stored_function_is_called_by_another_process(tmp_path):
    """Dynamo stores guards, and with them a mesh whose ranks, a tensor, are left out."""
    require("stored functions")
    run_ranks(2, _store, str(tmp_path), timeout=200)
    run_ranks(2, _call, str(tmp_path), timeout=200)
