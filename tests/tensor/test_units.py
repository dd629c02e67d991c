"""UnitShard: a placement like torch's own, in memory, in files, and in regions."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as upstream
import torch.nn.functional as F

import torchshard
from tests.older import require
from tests.ranks import run_ranks
from torchshard import DTensor, Replicate, Shard, UnitShard, distribute_tensor, init_device_mesh, layout_of
from torchshard import state_dict as converting
from torchshard.errors import RankMismatchError, ShardingError

SEVENS = UnitShard(0, 7)
FULL = torch.arange(84.0).reshape(21, 4)  # three units


def test_it_is_a_value():
    assert UnitShard(0, 7) == SEVENS
    assert len({UnitShard(0, 7), SEVENS, UnitShard(0, 9), UnitShard(0, 7, 2), UnitShard(1, 7)}) == 4
    assert Shard(0) != SEVENS
    assert Shard(0) != SEVENS
    assert copy.deepcopy(SEVENS) == pickle.loads(pickle.dumps(SEVENS)) == SEVENS
    assert (SEVENS.is_shard(), SEVENS.is_shard(0), SEVENS.is_shard(1)) == (True, True, False)
    assert not SEVENS.is_replicate()
    assert not SEVENS.is_partial()
    assert repr(SEVENS) == "UnitShard(dim=0, unit=7)"
    assert repr(UnitShard(-1, 2, 3)) == "UnitShard(dim=-1, unit=2, runs=3)"
    with pytest.raises(ShardingError, match="at least one item"):
        UnitShard(0, 0)


def made_and_moved(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    x = distribute_tensor(FULL, mesh, [UnitShard(-2, 7)])
    assert x.placements == (SEVENS,)
    assert layout_of(x).box.size == (14 if rank == 0 else 7, 4)
    assert torch.equal(x.to_local(), FULL[:14] if rank == 0 else FULL[14:])
    for other in ([Shard(0)], [Shard(1)], [Replicate()], [UnitShard(0, 3)]):
        y = x.redistribute(placements=other)
        assert torch.equal(y.to_local(), distribute_tensor(FULL, mesh, other).to_local())
        assert torch.equal(y.redistribute(placements=[SEVENS]).to_local(), x.to_local())
    elsewhere = init_device_mesh("cpu", (world, 1))
    moved = x.redistribute(elsewhere, [Shard(1), Replicate()])
    assert torch.equal(moved.full_tensor(), FULL)
    assert torch.equal(moved.redistribute(mesh, [SEVENS]).to_local(), x.to_local())
    # Where ranks get as much, it is a plain split.
    assert distribute_tensor(torch.zeros(28, 4), mesh, [SEVENS]).placements == (Shard(0),)
    given = {"shape": FULL.shape, "stride": FULL.stride()}
    for told in (given, {"run_check": True}, {**given, "run_check": True}):
        assert DTensor.from_local(x.to_local(), mesh, [SEVENS], **told)._spec is x._spec
    bare = DTensor.from_local(x.to_local(), mesh, [SEVENS])
    with pytest.raises(RankMismatchError, match="pieces of different sizes"):
        bare.full_tensor()
    with pytest.raises(ShardingError, match="whole units"):
        distribute_tensor(FULL, mesh, [UnitShard(0, 4)])
    turned = init_device_mesh("cpu", (1, world))
    for other in (Shard(0), UnitShard(0, 3)):
        with pytest.raises(ShardingError, match="in the same number of runs, and in the same units"):
            distribute_tensor(FULL[:14], turned, [other, SEVENS])
    within = distribute_tensor(FULL[:14], turned, [UnitShard(0, 1, runs=2), SEVENS])  # of two units, each whole
    assert torch.equal(within.to_local(), FULL[7 * rank :][:7])
    with pytest.raises(ShardingError, match="cannot be told of a dim that is split in units"):
        x.to_torch()
    with pytest.raises(RuntimeError, match="unsupported placements"):
        upstream.distribute_tensor(FULL, mesh, [SEVENS])


def test_made_and_moved():
    run_ranks(2, made_and_moved)


def draws(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    batches = {dim: torch.ones(7, 9, 4) if dim == 0 else torch.ones(9, 7, 4) for dim in (0, 1)}
    for dim, ones in batches.items():  # flattened, in units and in runs
        x = distribute_tensor(ones, mesh, [Shard(dim)])
        torch.manual_seed(3)
        got = F.dropout(x.flatten(0, 1), 0.5).full_tensor()
        torch.manual_seed(3)
        assert torch.equal(got, F.dropout(ones.flatten(0, 1), 0.5))
    for placement in (SEVENS, UnitShard(0, 2, runs=2), UnitShard(0, 1, runs=4)):
        torch.manual_seed(1)
        got = torchshard.randn(28, 3, device_mesh=mesh, placements=[placement]).full_tensor()
        torch.manual_seed(1)
        assert torch.equal(got, torch.randn(28, 3))


@pytest.mark.parametrize("world", [2, 3])
def test_random_numbers_are_those_of_one_device(world):
    run_ranks(world, draws)


def in_files(rank, world, path):
    mesh = init_device_mesh("cpu", (world,))
    x = distribute_tensor(FULL, mesh, [SEVENS])
    whole = converting.to_full({"w": x})
    assert rank != 0 or torch.equal(whole["w"], FULL)
    sharded = converting.to_sharded_tensor({"w": x})
    assert [s.shard_sizes for s in sharded["w"].metadata().shards_metadata] == [[14, 4], [7, 4]]
    assert converting.to_dtensor(sharded, mesh, {"w": [SEVENS]})["w"]._spec is x._spec
    dcp.save({"w": x}, checkpoint_id=path)
    for placement in (SEVENS, Shard(0), Shard(1)):
        y = distribute_tensor(torch.zeros(21, 4), mesh, [placement])
        dcp.load({"w": y}, checkpoint_id=path)
        assert torch.equal(y.full_tensor(), FULL)
    file = io.BytesIO()
    torch.save({"w": x}, file)
    file.seek(0)
    loaded = torch.load(file)["w"]
    assert loaded.placements == (SEVENS,)
    assert torch.equal(loaded.to_local(), x.to_local())


def test_in_files(tmp_path):
    run_ranks(2, in_files, str(tmp_path))


def in_regions(rank, world, backend):
    mesh = init_device_mesh("cpu", (world,))
    x = distribute_tensor(FULL, mesh, [SEVENS]).requires_grad_()

    def sums(x):
        return (x * x).view(3, 7, 4).sum(1)

    def moved(x):
        return x.redistribute(placements=[UnitShard(0, 7)]) + 1

    def asked(x):
        placement = x.placements[0]
        return x * placement.unit if placement.is_shard(0) and x.placements == (SEVENS,) else x

    rows = distribute_tensor(FULL, mesh, [Shard(0)])
    for fn, given in ((sums, x), (moved, rows), (asked, x)):
        got, wanted = torch.compile(fn, fullgraph=True, backend=backend)(given), fn(given)
        assert got._spec is wanted._spec
        torch.testing.assert_close(got.full_tensor(), wanted.full_tensor())
    torch.compile(sums, fullgraph=True, backend=backend)(x).sum().backward()
    assert x.grad.placements == (SEVENS,)
    torch.testing.assert_close(x.grad.full_tensor(), 2 * FULL)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_in_regions(backend):
    require("calls with placements")
    run_ranks(2, in_regions, backend, timeout=120)
