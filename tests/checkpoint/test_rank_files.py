"""One torch.save file of each rank: distributed tensors of every class, put together by what they say of themselves."""

import collections
import shutil
import warnings

import pytest
import torch
from torch.utils._pytree import tree_structure

from tests.checkpoint.sources import bytes_of, same_bits
from tests.ranks import run_ranks
from torchshard import checkpoint
from torchshard.errors import CheckpointError
from torchshard.layout import Box


def full(rows=5, columns=3):
    return torch.arange(float(rows * columns)).reshape(rows, columns)


class Odd:
    """More than plain data."""


def write(rank, world, folder):
    """What two ranks save with torch.save, and with torch.distributed.checkpoint each for itself."""
    import torch.distributed.checkpoint as dcp
    import torch.distributed.tensor as upstream
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    import torchshard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for name, api in (("torch", upstream), ("ours", torchshard)):
        cut = api.distribute_tensor
        state = {
            "rows": cut(full(), mesh, [upstream.Shard(0)]),
            "columns": torch.nn.Parameter(cut(full(), mesh, [upstream.Shard(1)])),
            "replicated": cut(full(), mesh, [upstream.Replicate()]),
            "two axes": cut(full(), both, [upstream.Replicate(), upstream.Shard(0)]),
            "few": cut(full(1, 2), mesh, [upstream.Shard(0)]).requires_grad_(),
            "plain": torch.ones(2),
            "lr": 0.5,
        }
        torch.save(state, f"{folder}/{name}_rank{rank}.pt")
        own = {"seed": rank, "odd": [Odd(), torch.zeros(rank + 1)], f"stage{rank}": torch.ones(1)}
        dcp.save({"m": state, **own}, checkpoint_id=f"{folder}/{name}_alone", use_collectives=False)
    torch.save(
        {"p": upstream.DTensor.from_local(full(), mesh, [upstream.Partial()])}, f"{folder}/partial_rank{rank}.pt"
    )

    local = torch.full(([3, 1][rank], 2), float(rank))
    shard = LocalShard.from_tensor_and_offsets(local, [3 * rank, 0], rank)
    torch.save({"st": init_from_local_shards([shard], 4, 2)}, f"{folder}/sharded_rank{rank}.pt")
    ours = {
        "rows": torchshard.ShardedTensor.from_local(full().tensor_split([3])[rank]),
        "columns": torchshard.ShardedTensor.from_local(full().tensor_split([1], 1)[rank].contiguous(), dim=1),
    }
    torch.save(ours, f"{folder}/our_sharded_rank{rank}.pt")
    dcp.save(ours, checkpoint_id=f"{folder}/our_sharded")
    torch.save({"seed": rank, "state": torch.full((2,), rank), "epoch": 3}, f"{folder}/different_rank{rank}.pt")

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    whole = {key: value.clone() for key, value in model.state_dict().items()}
    model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    torch.save(state, f"{folder}/fsdp_rank{rank}.pt")
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save(model.state_dict(), f"{folder}/local_rank{rank}.pt")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        torch.save(model.state_dict(), f"{folder}/full_rank{rank}.pt")
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")


def write_strided(rank, world, folder):
    """What FSDP2 makes of a tensor that is split already: a strided split, even and uneven."""
    import torch.distributed.tensor as upstream
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(4, 8, bias=False)
    weight = torch.arange(32.0).reshape(8, 4)
    model.weight = torch.nn.Parameter(upstream.distribute_tensor(weight, mesh["tp"], [upstream.Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    torch.save(model.state_dict(), f"{folder}/strided_rank{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    run_ranks(2, write, str(path))
    return path


@pytest.mark.parametrize("whose", ["torch", "ours"])
def test_dtensors(folder, whose):
    with checkpoint.open(folder / f"{whose}_rank*.pt") as ck:
        for key in ("rows", "columns", "replicated", "two axes"):
            assert ck[key].numpy().tobytes() == bytes_of(full()), key
        assert ck["few"].numpy().tolist() == [[0, 1]]
        assert ck["plain"].numpy().tolist() == [1, 1]
        assert ck["lr"].value() == 0.5
        assert ck["columns"].boxes == (Box((0, 0), (5, 2)), Box((0, 2), (5, 1)))
        stored = ck.layout("two axes")
        assert repr(stored.sharding) == "(dp=1:R, tp=2:S(0))"
        assert stored.files == (f"{whose}_rank0.pt", f"{whose}_rank1.pt")


@pytest.mark.parametrize("whose", ["torch", "ours"])
def test_dcp_folders_of_ranks_that_saved_each_for_itself(folder, tmp_path, whose):
    path = folder / f"{whose}_alone"
    with pytest.warns(UserWarning, match=r"kept once a rank: seed, odd.0, odd.1$"):
        ck = checkpoint.open(path)
    assert {key for key in ck if not key.startswith("m.")} == {
        "seed.rank0", "seed.rank1", "odd.0.rank0", "odd.0.rank1", "odd.1.rank0", "odd.1.rank1", "stage0", "stage1",
    }  # fmt: skip
    with checkpoint.open(folder / f"{whose}_rank*.pt") as alike:
        for key, entry in alike.items():
            if key != "lr":
                assert ck[f"m.{key}"].numpy().tobytes() == entry.numpy().tobytes(), key
                assert ck[f"m.{key}"].boxes == entry.boxes
    assert ck["odd.1.rank1"].shape == (2,)
    with pytest.raises(CheckpointError, match="Odd"):
        ck["odd.0.rank0"].value()
    with pytest.warns(UserWarning, match="kept once a rank"):
        checkpoint.convert(path, tmp_path / "out", to="torch", exclude=["odd.0.*"])
    loaded = torch.load(tmp_path / "out", weights_only=True)
    assert torch.equal(loaded["m"]["two axes"], full())
    assert (loaded["m"]["lr"], loaded["seed.rank1"]) == (0.5, 1)
    assert loaded["odd.1.rank1"].tolist() == [0, 0]
    for name, error in (("__1.metadata", "Boxes are missing"), ("__0.metadata", "file of a rank is missing")):
        shutil.copytree(path, tmp_path / name)
        (tmp_path / name / name).unlink()
        with pytest.raises(CheckpointError, match=error):
            checkpoint.open(tmp_path / name)


def test_shardedtensors(folder):
    assert checkpoint.open(folder / "sharded_rank*.pt")["st"].numpy().tolist() == [[0, 0]] * 3 + [[1, 1]]
    for name in ("our_sharded_rank*.pt", "our_sharded"):  # torchshard's own, with torch.save and in a dcp folder
        with checkpoint.open(folder / name) as ck:
            assert ck["rows"].numpy().tobytes() == ck["columns"].numpy().tobytes() == bytes_of(full()), name
            assert ck["rows"].boxes == (Box((0, 0), (3, 3)), Box((3, 0), (2, 3)))
            assert ck["columns"].boxes == (Box((0, 0), (5, 1)), Box((0, 1), (5, 2)))
    with pytest.raises(CheckpointError, match="Boxes are missing"):
        checkpoint.open(folder / "our_sharded_rank0.pt")


@pytest.mark.parametrize("whose", ["torch", "ours"])
def test_dtensors_that_ask_for_gradients(folder, tmp_path, whose):
    checkpoint.convert(folder / f"{whose}_rank*.pt", tmp_path / "out.pt", to="torch")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {key for key, value in loaded.items() if key != "lr" and value.requires_grad} == {"columns", "few"}
    assert [key for key, value in loaded.items() if isinstance(value, torch.nn.Parameter)] == ["columns"]


def test_fsdp1_dicts(folder, tmp_path):
    whole = torch.load(folder / "whole.pt")
    for name, prefix in (("fsdp", "model."), ("full", "")):
        ck = checkpoint.open(folder / f"{name}_rank*.pt")
        for key, value in whole.items():
            assert ck[prefix + key].numpy().tobytes() == bytes_of(value), (name, key)
    checkpoint.convert(folder / "fsdp_rank*.pt", tmp_path / "out.pt", to="torch", verify=True)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(same_bits(loaded["model"][key], value) for key, value in whole.items())
    assert loaded["optim"]["state"]["0.weight"]["exp_avg"].shape == (5, 3)
    assert loaded["optim"]["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_fsdp1_local_dicts_hold_flat_parameters(folder):
    with pytest.warns(UserWarning, match=r"different on each rank, and kept once a rank: 0\.weight"):
        ck = checkpoint.open(folder / "local_rank*.pt")
    whole = torch.load(folder / "whole.pt")
    assert ck["_flat_param"].numpy()[:15].tobytes() == bytes_of(whole["0.weight"])  # then come gaps for alignment


def test_what_differs_is_kept_once_a_rank(folder, tmp_path):
    with pytest.warns(UserWarning, match=r"kept once a rank: seed, state$"):
        checkpoint.convert(folder / "different_rank*.pt", tmp_path / "out.pt", to="torch")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {key: value for key, value in loaded.items() if not key.startswith("state")} == {
        "epoch": 3, "seed.rank0": 0, "seed.rank1": 1,
    }  # fmt: skip
    assert loaded["state.rank1"].tolist() == [1, 1]


def test_what_only_some_ranks_hold_has_their_numbers_where_it_differs(tmp_path):
    for rank in range(12):
        state = {"common": torch.ones(2)}
        state |= {"last": torch.full((2,), float(rank))} if rank in (2, 3, 11) else {}
        state |= {"own": {"seed": 7}} if rank == 1 else {}
        torch.save(state, tmp_path / f"m_rank{rank}.pt")
    with pytest.warns(UserWarning, match=r"kept once a rank: last$"):
        ck = checkpoint.open(tmp_path)
    assert set(ck) == {"common", "last.rank2", "last.rank3", "last.rank11", "own.seed"}
    for rank in (2, 3, 11):
        assert ck[f"last.rank{rank}"].numpy().tolist() == [rank, rank]


def test_what_differs_takes_no_name_that_another_key_has(tmp_path):
    """The name of one rank's value may be that of another key: neither may be lost."""
    for rank in range(2):
        torch.save({"seed": rank, "seed.rank1": "another", "x": torch.ones(1)}, tmp_path / f"m_rank{rank}.pt")
    with pytest.raises(CheckpointError, match=r"(?s)Two entries have the same name.*seed\.rank1"):
        checkpoint.open(tmp_path)


def test_stages_of_a_pipeline_become_one(tmp_path):
    """Each rank has layers, and states of an optimizer, of its own; their nesting is that of one process."""
    whole = {"model": collections.OrderedDict(), "optim": {"state": {}, "lr": 0.1}, "epoch": 3}
    for rank in range(3):
        names = [f"layers.{2 * rank + i}.weight" for i in range(2)]
        model = collections.OrderedDict((name, torch.randn(2, 3)) for name in names)
        states = {name: {"exp_avg": value * 2, "step": torch.tensor(7.0)} for name, value in model.items()}
        model._metadata = collections.OrderedDict((name.removesuffix(".weight"), {"version": 1}) for name in names)
        extra = {"head": {"bias": torch.ones(1)}} if rank == 2 else {}
        torch.save(
            {"model": model, "optim": {"state": states, "lr": 0.1}, "epoch": 3, **extra}, tmp_path / f"m_rank{rank}.pt"
        )
        whole["model"].update(model)
        whole["optim"]["state"].update(states)
        whole.update(extra)
    torch.save(whole, tmp_path / "whole")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.convert(tmp_path / "m_rank*.pt", tmp_path / "out", to="torch")
    assert not checkpoint.diff(tmp_path / "out", tmp_path / "whole")
    loaded = torch.load(tmp_path / "out", weights_only=True)
    assert tree_structure(loaded) == tree_structure(whole)
    assert list(loaded["model"]._metadata) == [f"layers.{i}" for i in range(6)]


def test_strided_splits(tmp_path):
    run_ranks(4, write_strided, str(tmp_path))
    entry = checkpoint.open(tmp_path)["weight"]
    assert entry.numpy().tolist() == torch.arange(32.0).reshape(8, 4).tolist()


def write_ordered(rank, world, folder):
    """One of torch's DTensors of which the second axis splits a dim before the first."""
    import torch.distributed.tensor as upstream
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    mesh, state = init_device_mesh("cpu", (2, 2)), {}
    first, second = mesh.get_coordinate()
    for n in (8, 7):
        whole = torch.arange(float(n))
        local = whole.chunk(2)[second].chunk(2)[first].clone()
        meta, order = TensorMeta(whole.shape, whole.stride(), whole.dtype), (ShardOrderEntry(0, (1, 0)),)
        spec = DTensorSpec(mesh, (upstream.Shard(0), upstream.Shard(0)), meta, shard_order=order)
        state[str(n)] = upstream.DTensor(local, spec, requires_grad=False)
        assert torch.equal(state[str(n)].full_tensor(), whole)
    torch.save(state, f"{folder}/ordered_rank{rank}.pt")


def test_orders_of_axes(tmp_path):
    run_ranks(4, write_ordered, str(tmp_path))
    ck = checkpoint.open(tmp_path)
    for n in (8, 7):
        assert ck[str(n)].numpy().tolist() == list(range(n))
    assert ck.layout("8").sharding.order == ((0, (1, 0)),)


def write_cut(rank, world, folder):
    """Our own splits in runs and in units, even and uneven."""
    import torchshard
    from torchshard import Shard, UnitShard, distribute_tensor

    mesh = torchshard.init_device_mesh("cpu", (2, 2))
    rows = distribute_tensor(full(6, 5), mesh, [UnitShard(0, 2), Shard(1)])  # units 2 and 1, columns 3 and 2
    torch.save(
        {"units": rows, "runs": distribute_tensor(full(6, 7), mesh, [Shard(1), UnitShard(0, 1, runs=2)])},
        f"{folder}/cut_rank{rank}.pt",
    )
    assert rows.to_local().shape == ((4, 3), (4, 2), (2, 3), (2, 2))[rank]


def test_splits_in_runs_and_units(tmp_path):
    run_ranks(4, write_cut, str(tmp_path))
    ck = checkpoint.open(tmp_path)
    assert ck["units"].numpy().tolist() == full(6, 5).tolist()
    assert ck["runs"].numpy().tolist() == full(6, 7).tolist()
    assert repr(ck.layout("units").sharding) == "(0=2:S(0*2), 1=2:S(1))"


def test_a_folder_of_rank_files(folder, tmp_path):
    for rank in (0, 1):
        shutil.copy(folder / f"ours_rank{rank}.pt", tmp_path)
    assert len(checkpoint.open(tmp_path)) == 7
    shutil.copy(folder / "torch_rank0.pt", tmp_path)
    with pytest.raises(CheckpointError, match="several sets of files"):
        checkpoint.open(tmp_path)


def test_what_is_missing_or_cannot_be(folder, tmp_path):
    with pytest.raises(CheckpointError, match="Boxes are missing") as caught:
        checkpoint.open(folder / "torch_rank0.pt")
    assert "rank*.pt" in caught.value.fix
    with pytest.raises(CheckpointError, match="A Partial tensor was saved"):
        checkpoint.open(folder / "partial_rank*.pt")
    shutil.copy(folder / "torch_rank1.pt", tmp_path)
    with pytest.raises(CheckpointError, match="file of a rank is missing"):
        checkpoint.open(tmp_path)
    shutil.copy(folder / "sharded_rank0.pt", tmp_path / "x_rank0.pt")
    shutil.copy(folder / "sharded_rank0.pt", tmp_path / "x_rank1.pt")
    with pytest.raises(CheckpointError, match="Boxes are missing"):
        checkpoint.open(tmp_path / "x_rank*.pt")


def test_the_legacy_format(tmp_path):
    state = {
        "w": torch.arange(12.0).reshape(3, 4).t(), "tied": torch.ones(3), "half": torch.ones(2).bfloat16(), "lr": 0.5,
        "list": [torch.zeros(2, dtype=torch.int64)],
    }  # fmt: skip
    state["again"] = state["tied"]
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    ck = checkpoint.open(tmp_path / "a.pt")
    for key in ("w", "tied", "again", "half"):
        assert ck[key].numpy().tobytes() == bytes_of(state[key])
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", verify=True)
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded["tied"].data_ptr() == loaded["again"].data_ptr()
    assert torch.equal(loaded["w"], state["w"])
    body = (tmp_path / "a.pt").read_bytes()
    for cut in (10, 100, 400, len(body) - 1):
        (tmp_path / "cut.pt").write_bytes(body[:cut])
        with warnings.catch_warnings(), pytest.raises(CheckpointError):
            checkpoint.open(tmp_path / "cut.pt")
