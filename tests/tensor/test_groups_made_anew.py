"""DTensors of a process group that was destroyed, where another one has its name by now: right values, or an error."""

import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import InternalTorchDynamoError

from tests.ranks import by_messages, run_ranks


def _later(rank, world, store, ranks, sends):
    from torchshard import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
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
    acts = {
        "gathered": (x.full_tensor, full),
        "exchanged": (lambda: x.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Shard(0)]).sum(0), full.sum(0)),
        "summed": (lambda: p.redistribute(mesh, [Replicate()]), full),
        "later": (lambda: x.redistribute(mesh, [Replicate()], async_op=True).to_local() * 1, full),
    }
    dist.barrier()
    dist.destroy_process_group()

    def tried():
        found = {}
        for name, (act, wanted) in acts.items():
            try:
                got = act()
                found[name] = torch.equal(got.full_tensor() if hasattr(got, "full_tensor") else got, wanted)
            except (ShardingError, InternalTorchDynamoError) as error:
                found[name] = str(error)
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
    return [*without.values()], [*tried().values()]


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize(
    ("ranks", "got"),
    [
        (((0, 2), (1, 2)), None),
        (((1, 2), (0, 2)), r"this was rank {0}\n.*of the ranks \[0, 1\], of which this is rank {1}\n"),
        (((0, 1), (0, 1)), r"this was rank {0}\n.*of the ranks \[0\], of which this is rank 0\n"),
    ],
    ids=["alike", "other places", "fewer"],
)
def test_a_group_of_the_same_name_serves_if_it_has_the_same_ranks(ranks, got, sends, tmp_path):
    for rank, (without, later) in enumerate(run_ranks(2, _later, str(tmp_path / "store"), ranks, sends)):
        for said in without:
            assert "has been destroyed" in said
            assert "got:      none" in said
        if got is None:
            assert later == [True] * 10
            continue
        for said in later:
            assert re.search(got.format(rank, 1 - rank), said, re.S), said


def _in_parts(rank, world, store):
    from torchshard import ShardedTensor
    from torchshard.errors import ShardingError
    from torchshard.state_dict import to_full

    x = ShardedTensor.from_local(torch.full((2, 3), float(rank)))
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    acts = (
        lambda: x.gather(0, torch.empty(4, 3)),
        lambda: x.reshard(x.sharding_spec()),
        lambda: to_full(x),
        lambda: torch.equal(x, x),
        lambda: pickle.dumps(x),
        x.to_torch,
    )
    for act in acts:
        with pytest.raises(ShardingError, match="The process group of a ShardedTensor has been destroyed"):
            act()
    anew = ShardedTensor.from_local_shards(x.local_shards(), x.size())
    return to_full(anew + x).tolist()


def test_a_shardedtensor_of_a_group_that_is_no_more_says_so(tmp_path):
    assert run_ranks(2, _in_parts, str(tmp_path / "store")) == [[[0.0] * 3] * 2 + [[2.0] * 3] * 2] * 2
