"""Nested state dicts: what is kept, what stays one, which keys are reported; memory; Partial; torch's strided splits."""

import re
from collections import OrderedDict, namedtuple

import pytest

from tests.ranks import by_messages, run_ranks

Pair = namedtuple("Pair", "a b")


def _kept(rank, world, mesh):
    """Containers, other leaves, ties, dtypes and what asks for gradients."""
    import torch
    from torch import nn
    from torch.distributed.tensor import Replicate, Shard

    from torchshard import DTensor, state_dict

    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    model[1].weight = model[0].weight
    for parameter in model.parameters():
        nn.init.normal_(parameter)
        torch.distributed.broadcast(parameter.data, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    sd = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "pair": Pair([torch.ones(4, dtype=torch.int16)], ("text", None)),
    }
    made = state_dict.to_dtensor(sd, mesh, [Shard(0), Replicate()])
    assert type(made["model"]) is OrderedDict
    assert made["model"]._metadata == sd["model"]._metadata
    assert isinstance(made["model"]["0.weight"], DTensor)
    assert made["model"]["0.weight"] is made["model"]["1.weight"]
    assert made["epoch"] == 3
    assert made["pair"].b == ("text", None)
    assert made["pair"].a[0].dtype == torch.int16
    assert type(made["model"]["2.num_batches_tracked"]) is torch.Tensor  # no dims: left as it is
    assert made["optimizer"]["state"][0]["step"] is not None
    assert made["optimizer"]["param_groups"] == sd["optimizer"]["param_groups"]
    back = state_dict.to_full(state_dict.from_torch(state_dict.to_torch(made)))
    assert back["model"]["0.weight"] is back["model"]["1.weight"]
    for name, value in sd["model"].items():
        assert torch.equal(back["model"][name], value)
    for k, state in sd["optimizer"]["state"].items():
        assert all(torch.equal(back["optimizer"]["state"][k][name], value) for name, value in state.items())
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    # What asks for gradients still does; what was given in is as it was.
    parameter = nn.Parameter(torch.ones(4, 2))
    converted = state_dict.to_dtensor({"w": parameter}, mesh, [Shard(0), Shard(1)])["w"]
    assert converted.requires_grad
    assert converted.is_leaf
    local = converted._local_tensor
    assert not local.requires_grad
    full = state_dict.to_full(converted)
    assert full.requires_grad
    # Nothing moves, nothing is copied.
    for x in (made["model"]["0.weight"], state_dict.to_sharded_tensor(made["model"]["0.weight"])):
        theirs = state_dict.to_torch(x)
        ours = state_dict.from_torch(theirs)
        pointers = {_local(y).data_ptr() for y in (x, theirs, ours)}
        assert len(pointers) == 1
    # Gradients go through, both ways.
    leaf = state_dict.to_dtensor(torch.arange(8.0), mesh, [Shard(0), Replicate()]).requires_grad_()
    (DTensor.from_torch((leaf * 2).to_torch() * 3) * leaf.detach()).sum().backward()
    assert leaf.grad.full_tensor().tolist() == [6.0 * k for k in range(8)]
    # from_local without a shape is checked, also where nothing moves.
    unequal = DTensor.from_local(torch.ones(1 + (rank > 1)), mesh, [Shard(0), Replicate()])
    with pytest.raises(RuntimeError, match="pieces of different sizes"):
        state_dict.to_sharded_tensor(unequal)
    # A replica group of its own for each ShardedTensor along the replicated axis.
    st = state_dict.to_sharded_tensor(made["model"]["0.weight"])
    assert [s.placement.rank() for s in st.metadata().shards_metadata] == [rank % 2, rank % 2 + 2]
    assert _local(st).data_ptr() == made["model"]["0.weight"]._local_tensor.data_ptr()
    return True


def _local(x):
    return x.local_shards()[0].tensor if hasattr(x, "local_shards") else x.to_local()


def _where(rank, world, mesh):
    """Placements by pattern and by function; whole tensors on one rank; a source rank."""
    import torch
    from torch.distributed.tensor import Replicate, Shard

    from torchshard import state_dict

    sd = {"a": {"w": torch.arange(12.0).view(4, 3), "b": torch.arange(3)}, "step": torch.tensor(2)}
    by_pattern = {"a.w": [Shard(0), Shard(1)], "a.*": [Replicate(), Shard(0)], "step": None}
    made = state_dict.to_dtensor(sd, mesh, by_pattern)
    assert [str(p) for p in made["a"]["w"].placements] == ["S(0)", "S(1)"]
    assert [str(p) for p in made["a"]["b"].placements] == ["R", "S(0)"]
    assert made["step"] is sd["step"]
    by_function = state_dict.to_dtensor(sd, mesh, lambda key, x: [Shard(0), Replicate()] if x.ndim == 2 else None)
    assert by_function["a"]["b"] is sd["a"]["b"]
    with pytest.raises(ValueError, match=re.compile(r"no pattern: a\.b, step; no tensor: c\.\*", re.S)):
        state_dict.to_dtensor(sd, mesh, {"a.w": [Replicate()] * 2, "c.*": None})
    assert state_dict.to_dtensor(sd, mesh, {"c.*": None}, strict=False) is not sd
    first = state_dict.to_full(made, rank0_only=True, cpu_offload=True)
    if rank == 0:
        assert torch.equal(first["a"]["w"], sd["a"]["w"])
        assert torch.equal(first["a"]["b"], sd["a"]["b"])
        assert first["step"] == 2
    else:
        assert first == {}
    alone = state_dict.to_full(made["a"]["w"], rank0_only=True)
    assert (alone is None) == (rank > 0)
    # One rank has the values, the others only the shapes.
    here = {"w": torch.arange(10.0).view(5, 2)} if rank == 3 else {"w": torch.empty(5, 2, device="meta")}
    got = state_dict.to_full(state_dict.to_dtensor(here, mesh, [Shard(0), Shard(0)], src_rank=3))
    assert got["w"].tolist() == torch.arange(10.0).view(5, 2).tolist()
    # A tensor on a part of the ranks only.
    half = mesh["tp"]
    on_half = state_dict.to_dtensor({"w": torch.arange(6.0)}, half, [Shard(0)])
    assert state_dict.to_full(on_half)["w"].tolist() == [0, 1, 2, 3, 4, 5]
    first = state_dict.to_full(on_half, rank0_only=True)
    assert (first == {}) == (rank % 2 == 1)
    # From some ranks to others: a ShardedTensor of two of them, and a mesh of all.
    pair = torch.distributed.new_group([0, 2])
    if rank in (0, 2):
        x = state_dict.to_sharded_tensor(torch.arange(5.0), process_group=pair)
        assert state_dict.to_full(x).tolist() == [0, 1, 2, 3, 4]
        assert x.local_tensor().numel() == (3, 2)[rank // 2]
    # Memory order is kept.
    turned = state_dict.to_dtensor(torch.arange(12.0).view(3, 4).t(), mesh, [Shard(0), Shard(1)])
    assert turned.stride() == (1, 4)
    assert state_dict.to_full(turned).stride() == (1, 4)
    assert state_dict.to_full(turned)[1].tolist() == [1, 5, 9]
    return True


def _partial(rank, world, mesh):
    import torch
    import torch.distributed.tensor as upstream
    from torch.distributed.tensor import Partial, Replicate, Shard

    from torchshard import DTensor, state_dict

    for kind in (DTensor, upstream.DTensor):
        x = kind.from_local(torch.full((2, 3), float(rank)), mesh, [Partial(), Shard(0)])
        with pytest.raises(ValueError, match=re.compile("w: A Partial tensor.*reduce_partial=True", re.S)):
            state_dict.to_full({"w": x})
        full = state_dict.to_full({"w": x}, reduce_partial=True)["w"]
        assert full[:, 0].tolist() == [2.0, 2.0, 4.0, 4.0]
        moved = state_dict.to_dtensor(x, mesh, [Replicate(), Shard(1)], reduce_partial=True)
        assert moved.full_tensor()[:, 0].tolist() == [2.0, 2.0, 4.0, 4.0]
        assert isinstance(state_dict.to_torch(x), upstream.DTensor)
        assert state_dict.from_torch(state_dict.to_torch(x)).placements[0] == Partial()
    with pytest.raises(ValueError, match="cannot be converted to terms"):
        state_dict.to_dtensor(torch.ones(4), mesh, [Partial(), Replicate()])
    # torch's strided splits, nested evenly or in pieces that are no intervals.
    from torchshard._torch import strided_shard
    from torchshard.layout.strided import strided_intervals

    for n in (8, 7, 13):
        placements = [strided_shard()(0, split_factor=2), Shard(0)]
        whole = torch.arange(float(n))
        held = strided_intervals(n, {0: 2, 1: 1}, (2, 2), mesh.get_coordinate())
        local = torch.cat([whole[start : start + length] for start, length in held] or [whole[:0]])
        theirs = upstream.DTensor.from_local(local, mesh, placements, run_check=False, shape=(n,), stride=(1,))
        assert torch.equal(state_dict.to_full(theirs), whole)
        ours = state_dict.to_dtensor(theirs, mesh, [Shard(0), Replicate()])
        assert torch.equal(ours.full_tensor(), whole)
        cut = state_dict.to_sharded_tensor(theirs, dim=0)
        assert torch.equal(state_dict.to_full(cut), whole)
    return True


def _renamed(rank, world, mesh):
    """Key rules on DTensors: cut and joined where they are, for ours and for torch's."""
    import torch
    from torch.distributed.tensor import Shard

    from torchshard import state_dict
    from torchshard.keys import fuse, rename, transpose

    rules = state_dict.KeyRules(
        [rename("old", "new"), fuse(["new.q", "new.k", "new.v"], "new.qkv", dim=0, sizes=(4, 1, 1)), transpose("new.t")]
    )
    shapes = {"old.q": (8, 6), "old.k": (2, 6), "old.v": (2, 6), "old.t": (5, 7), "other": (3,)}
    plain = {name: torch.arange(float(torch.Size(s).numel())).view(s) + 50 for name, s in shapes.items()}
    expected = rules(plain)
    assert expected["new.qkv"].shape == (12, 6)
    made = {
        "other": plain["other"],
        **state_dict.to_dtensor({k: v for k, v in plain.items() if v.ndim > 1}, mesh, [Shard(0), Shard(1)]),
    }
    from torchshard.state_dict import rewriting

    exchanges = []
    carry = rewriting.carry
    rewriting.carry = lambda jobs: (exchanges.append(len(jobs)), carry(jobs))
    new = rules({**made, **{f"two.{name}": value for name, value in made.items()}})
    rewriting.carry = carry
    assert exchanges[0] == 2  # both joined tensors in one exchange
    assert torch.equal(state_dict.to_full(new)["two.new.qkv"], expected["new.qkv"])
    both = state_dict.KeyRules([*rules.rules, transpose("new.qkv")])(made)  # made of what is yet to be fetched
    assert torch.equal(state_dict.to_full(both)["new.qkv"], expected["new.qkv"].t())
    for sd in (made, state_dict.to_torch(made)):
        new = rules(sd)
        assert type(new["new.qkv"]) is type(sd["old.q"])
        assert [str(p) for p in new["new.qkv"].placements] == ["S(0)", "S(1)"]
        for name, value in state_dict.to_full(new).items():
            assert torch.equal(value, expected[name]), name
        back = state_dict.to_full(rules.inverse()(new))
        for name, value in plain.items():
            assert torch.equal(back[name], value), name
    return True


def _large(rank, world, mesh):
    """Messages of large parts that lie side by side in rows land apart and are joined; others go where they belong."""
    import torch
    from torch.distributed.tensor import Replicate, Shard

    from torchshard import state_dict
    from torchshard.comm import neighbours
    from torchshard.tensor.moving import carrying

    found = []
    side_by_side = carrying._side_by_side
    carrying._side_by_side = lambda *given: found.append(side_by_side(*given)) or found[-1]
    cases = [
        ((300, 303), torch.float32, [Shard(1), Shard(1)], 1),
        ((600, 450), torch.bool, [Shard(1), Shard(1)], 1),
        ((3, 101, 300), torch.complex64, [Replicate(), Shard(1)], 1),
        ((2, 3, 70001), torch.bfloat16, [Shard(2), Replicate()], 2),
        ((1, 200000), torch.int64, [Shard(1), Shard(1)], None),  # one row: dense
        ((400, 400), torch.float32, [Shard(0), Shard(1)], None),  # a grid
        ((400, 400), torch.float32, [Shard(0), Shard(0)], None),
        ((30, 30), torch.float32, [Shard(1), Shard(1)], None),  # small
    ]
    for shape, dtype, placements, dim in cases:
        whole = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        made = state_dict.to_dtensor(whole.requires_grad_(whole.is_floating_point()), mesh, placements)
        full = state_dict.to_full(made)
        assert torch.equal(full, whole)
        assert full.requires_grad == whole.requires_grad
        assert not found or found[-1] == dim, (shape, dim)
    carrying._side_by_side = side_by_side
    return len(found) == (0 if neighbours._process_vm_readv else len(cases))


def _everything(rank, world, messages):
    from torch.distributed.device_mesh import init_device_mesh

    if messages:
        by_messages()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return [check(rank, world, mesh) for check in (_kept, _where, _partial, _renamed, _large)]


@pytest.mark.parametrize("messages", [False, True])
def test_state_dicts(messages):
    assert run_ranks(4, _everything, messages, timeout=120) == [[True] * 5] * 4


def _peak(work):
    import torch

    from tests.tensor.moving.test_costs import peak_of

    return peak_of(lambda: (work(), torch.zeros(1)))  # a rank that only sends allocates nothing


def _peaks(rank, world):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from torchshard import state_dict

    mesh = init_device_mesh("cpu", (world,))
    one = 2048 * 2048 * 4
    found = {}
    for dim in (0, 1):
        sd = {f"w{k}": state_dict.to_dtensor(torch.ones(2048, 2048), mesh, [Shard(dim)]) for k in range(6)}
        found[dim] = _peak(lambda sd=sd: state_dict.to_full(sd, rank0_only=True, cpu_offload=True)) / one
        other = [Shard(1 - dim)]
        found["sharded", dim] = _peak(lambda sd=sd, p=other: state_dict.to_dtensor(sd, mesh, p)) / one
    return found


def test_whole_tensors_on_one_rank_take_one_tensor_more_than_the_result():
    found = run_ranks(2, _peaks, timeout=100)
    for dim in (0, 1):
        assert 6 <= found[0][dim] <= 7.05
        assert found[1][dim] <= 1.05
        for rank in (0, 1):  # half of six tensors, and the parts that are under way
            assert 3 <= found[rank]["sharded", dim] <= 4.3
