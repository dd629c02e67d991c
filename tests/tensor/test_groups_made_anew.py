"""Tensors of a process group that was destroyed, where another one has its name by now: right values, or an error."""

import functools
import os
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import TorchDynamoException

from tests.inductor_cache import own_cache
from tests.older import require
from tests.ranks import by_messages, run_ranks

RANKS = pytest.mark.parametrize(
    ("ranks", "got"),
    [
        (((0, 2), (1, 2)), None),
        (((1, 2), (0, 2)), r"this was rank {0}\n.*of the ranks \[0, 1\], of which this is rank {1}\n"),
        (((0, 1), (0, 1)), r"this was rank {0}\n.*of the ranks \[0\], of which this is rank 0\n"),
    ],
    ids=["alike", "other places", "fewer"],
)


def _later(rank, world, store, ranks, sends):
    from torchshard import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.errors import ShardingError
    from torchshard.state_dict import to_dtensor, to_full, to_torch

    if sends:
        by_messages()
    full = torch.arange(24.0).view(6, 4)
    mesh = init_device_mesh("cpu", (world,))
    x, p = (distribute_tensor(full, mesh, [placement]) for placement in (Shard(0), Partial()))
    other, given = init_device_mesh("cpu", (world,), mesh_dim_names=("other",)), full.clone()
    x.redistribute(other, [Shard(1)])
    compiled = torch.compile(lambda x: x.redistribute(placements=[Replicate()]).to_local() + 0, backend="aot_eager")
    assert torch.equal(compiled(x), full)
    part, made = x.to_local().clone(), {}
    made["distributed within"] = lambda t: distribute_tensor(t, mesh, [Shard(0)]).full_tensor() + 0, full
    made["put together within"] = lambda _: DTensor.from_local(part, mesh, [Shard(0)]).full_tensor() + 0, full
    made = {name: (torch.compile(region, backend="aot_eager"), wanted) for name, (region, wanted) in made.items()}
    assert all(torch.equal(region(full), wanted) for region, wanted in made.values())
    acts = {
        "gathered": (x.full_tensor, full),
        "exchanged": (lambda: x.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Shard(0)]).sum(0), full.sum(0)),
        "summed": (lambda: p.redistribute(mesh, [Replicate()]), full),
        "later": (lambda: x.redistribute(mesh, [Replicate()], async_op=True).to_local() * 1, full),
        "distributed": (lambda: distribute_tensor(full, mesh, [Shard(0)]), full),
        "compared": (lambda: DTensor.from_local(part, mesh, [Shard(0)], run_check=True), full),
        "taken for granted": (lambda: DTensor.from_local(part, mesh, [Shard(0)]), full),
    }
    dist.barrier()
    dist.destroy_process_group()

    def tried():
        found = {}
        for name, (act, wanted) in acts.items():
            try:
                got = act()
                found[name] = torch.equal(got.full_tensor() if hasattr(got, "full_tensor") else got, wanted)
            except (ShardingError, TorchDynamoException) as error:
                found[name] = str(error).replace("\\n", "\n")  # Dynamo may show it as it is written
        return found

    without = tried()
    place, size = ranks[rank]
    alone = "" if size > 1 else str(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}{alone}", rank=place, world_size=size)
    if size == world:
        new = init_device_mesh("cpu", (world,))
        acts["crossed"] = lambda: x.redistribute(other, [Shard(1)]), full
        acts["crossed anew"] = lambda: x.redistribute(new, [Shard(0)]), full
        acts["converted"] = lambda: to_full(x), full
        acts["given to torch"] = lambda: to_torch(x).full_tensor(), full
        acts["converted back"] = lambda: to_dtensor(given, mesh, [Shard(0)]), full
    acts["compiled before"] = lambda: compiled(x), full
    for name, (region, wanted) in made.items():
        acts[name] = functools.partial(region, full), wanted
    return [*without.values()], [*tried().values()]


def _sharded(rank, world, store, ranks):
    from torchshard.errors import ShardingError
    from torchshard.state_dict import to_full, to_sharded_tensor

    full = torch.arange(24.0).view(6, 4)
    x, leaf = to_sharded_tensor(full), to_sharded_tensor(full).requires_grad_()
    doubled = torch.compile(lambda x: x * 2, backend="aot_eager")
    assert torch.equal(to_full(doubled(x)), full * 2)
    doubled(leaf).backward(x)
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(ShardingError, match="of a ShardedTensor has been destroyed"):
        x.gather(0)
    pickle.dumps(x)
    place, size = ranks[rank]
    alone = "" if size > 1 else str(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}{alone}", rank=place, world_size=size)
    acts = {
        "gathered": (lambda: x, full),
        "by element": (lambda: x + 1, full + 1),
        "compiled": (lambda: doubled(x), full * 2),
        "a gradient": (lambda: leaf.grad, full * 2),
        "compared": (lambda: x if torch.equal(x, x.clone()) else x * 0, full),
        "cut anew": (lambda: x.reshard(x.sharding_spec()), full),
        "to torch": (lambda: x.from_torch(x.to_torch()), full),
    }
    if size == world:
        new, sums = to_sharded_tensor(full), torch.compile(torch.add, backend="aot_eager")
        assert torch.equal(to_full(doubled(new)), full * 2)
        acts["beside a new one"] = lambda: x + new, full * 2
        acts["beside one in a graph"] = lambda: sums(x, new), full * 2
    found = []
    for act, wanted in acts.values():
        try:
            found.append(torch.equal(to_full(act().detach()), wanted))
        except (ShardingError, TorchDynamoException) as error:
            found.append(str(error).replace("\\n", "\n"))
    return found


@pytest.mark.parametrize("sends", [False, True])
@RANKS
def test_a_group_of_the_same_name_serves_if_it_has_the_same_ranks(ranks, got, sends, tmp_path):
    for rank, (without, later) in enumerate(run_ranks(2, _later, str(tmp_path / "store"), ranks, sends)):
        for said in without:
            assert "has been destroyed" in said
            assert "got:      none" in said
        if got is None:
            assert later == [True] * 15
            continue
        for said in later:
            assert re.search(got.format(rank, 1 - rank), said, re.S), said


def _only_then(rank, world, store, places):
    """Groups of several axes, and of two meshes, that nothing has asked for before; their order is that of places."""
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.errors import ShardingError

    full = torch.arange(24.0).view(8, 3)
    mesh, other = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (world,))
    rows = [Shard(0), Shard(0)]
    x = distribute_tensor(full, mesh, rows, src_data_rank=None)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=places[rank], world_size=world)
    found = []
    for act in (
        x.full_tensor,
        lambda: x.redistribute(other, [Replicate()]).to_local(),
        lambda: x.redistribute(placements=[Shard(0), Replicate()]).full_tensor(),  # by a group that torch has made
    ):
        try:
            found.append(torch.equal(act(), full))
        except ShardingError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("places", [(0, 1, 2, 3), (3, 2, 1, 0)], ids=["alike", "other places"])
def test_groups_that_are_made_later_are_of_the_same_ranks(places, tmp_path):
    for rank, (whole, crossed, along) in enumerate(run_ranks(4, _only_then, str(tmp_path / "store"), places)):
        if places[rank] == rank:
            assert whole is crossed is True
            assert "has been destroyed" in along
            continue
        for said in (whole, crossed, along):
            assert f"of which this was rank {rank}\n" in said
            assert f"of which this is rank {places[rank]}\n" in said


def _kept(rank, world, store, cache):
    """A region that communicates in its backward alone, whose graphs come from a cache."""
    from torchshard import DTensor, Replicate, Shard, init_device_mesh
    from torchshard.compiler import support_caches

    for name, value in own_cache(f"{cache}{rank}").items():
        os.environ[name] = value
    support_caches()
    mesh = init_device_mesh("cpu", (world,))

    def region(x, w):
        return (DTensor.from_local(x, mesh, [Shard(0)]) @ DTensor.from_local(w, mesh, [Replicate()])).to_local()

    x, w = torch.full((2, 3), rank + 1.0), torch.ones(3, 4, requires_grad=True)
    for _ in range(2):
        torch.compiler.reset()
        compiled, w.grad = torch.compile(region), None
        compiled(x, w).sum().backward()
        assert torch.equal(w.grad, torch.full_like(w, 6.0))
    assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == 1
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}{rank}", rank=0, world_size=1)
    with pytest.raises(TorchDynamoException) as caught:
        compiled(x, w)
    return str(caught.value).replace("\\n", "\n")


def test_graphs_from_a_cache_are_for_their_groups_too(tmp_path):
    require("meshes in graphs")
    for rank, said in enumerate(run_ranks(2, _kept, str(tmp_path / "store"), str(tmp_path / "cache"))):
        assert re.search(rf"this was rank {rank}\n.*of the ranks \[0\], of which this is rank 0\n", said, re.S), said


@RANKS
def test_sharded_tensors_speak_to_a_group_of_the_same_ranks_alone(ranks, got, tmp_path):
    for rank, later in enumerate(run_ranks(2, _sharded, str(tmp_path / "store"), ranks)):
        if got is None:
            assert later == [True] * 9
            continue
        for said in later:
            assert re.search(got.format(rank, 1 - rank), said, re.S), said
