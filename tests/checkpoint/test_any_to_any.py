"""From any format to any other, cut, cast, chosen, renamed and merged on the way."""

import json
import os
import shutil
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.checkpoint import sources
from tests.checkpoint.sources import assert_same_tree, bytes_of, same_bits, torch_loads
from torchshard import checkpoint, state_dict
from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.moving.casting import FLOATING, TARGETS, cast
from torchshard.errors import CheckpointError
from torchshard.keys import KeyRules, fuse, rename, split, strip_prefix, transpose
from torchshard.layout import Box

KINDS = ("torch", "safetensors", "dcp", "dcp cut", "torch parts", "safetensors parts")
OPTIONS = {
    "dcp cut": {"mesh": (2, 2), "placements": {"*.rows": "S(0),R", "*.both": "S(0),S(1)", "*columns": "R,S(1)"}},
    "torch parts": {"shard_size": 300},
    "safetensors parts": {"shard_size": 300},
}


def convert(src, dst, kind, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = OPTIONS.get(kind, {}) | kwargs
        return checkpoint.convert(src, dst, to=kind.split()[0], verify=True, fsync=False, **options)


def values(path):
    with checkpoint.open(path) as ck:
        return {k: e.numpy().tobytes() for k, e in ck.items() if isinstance(e, checkpoint.TensorEntry)}


@pytest.fixture(scope="module")
def every_kind(dcp_mesh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    for kind in KINDS:
        convert(dcp_mesh, folder / kind, kind)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_to_every_other(every_kind, dcp_mesh, tmp_path, kind):
    expected = values(dcp_mesh)
    assert values(every_kind / kind) == expected
    for to in KINDS:
        convert(every_kind / kind, tmp_path / to, to)
        assert values(tmp_path / to) == expected, to


def test_torch_reads_a_folder_that_we_cut(every_kind, dcp_mesh, tmp_path):
    cut = every_kind / "dcp cut"
    assert {name for name in os.listdir(cut) if name != ".metadata"} >= {"__0_0.distcp", "__2_0.distcp"}
    assert_same_tree(torch_loads(cut, tmp_path), torch_loads(dcp_mesh, tmp_path))
    with checkpoint.open(cut) as ck:
        assert ck["model.both"].cut == (2, 2)
        assert ck["model.rows"].boxes == (Box((0, 0), (4, 10)), Box((4, 0), (3, 10)))
        assert ck.layout("model.rows").files == ("__0_0.distcp", "__2_0.distcp")
    reader = dcp.FileSystemReader(cut)
    assert [list(c.sizes) for c in reader.read_metadata().state_dict_metadata["model.columns"].chunks] == [
        [7, 5],
        [7, 5],
    ]


def test_plain_data_and_containers_survive_a_dcp_folder(tmp_path):
    torch.save(sources.plain(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ck", "dcp")
    sources.make(tmp_path / "theirs", 1, sources.save_plain)
    ours, theirs = (torch_loads(tmp_path / name, tmp_path) for name in ("ck", "theirs"))
    theirs["model"]["param"] = theirs["model"]["param"].detach()
    assert ours.keys() == theirs.keys()
    for key in theirs:
        if key != "ordered":  # theirs becomes a dict, ours too
            assert_same_tree(ours[key], theirs[key])


def test_keys_that_are_one_as_text_do_not_fit_a_dcp_folder(tmp_path):
    torch.save({"a": {0: torch.ones(1), "0": {"b": torch.ones(2)}}}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"contradict each other(?s:.*)a\.0\.b at \(a, 0, b\)"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "ck", to="dcp")
    assert os.listdir(tmp_path) == ["a.pt"]


def test_the_libraries_read_parts(every_kind):
    folder = every_kind / "safetensors parts"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = set(index["weight_map"].values())
    assert len(names) > 3
    loaded = {}
    for name in names:
        loaded |= safetensors.torch.load_file(folder / name)
    assert {key: bytes_of(value) for key, value in loaded.items()} == values(folder)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in loaded.values())
    folder = every_kind / "torch parts"
    index = json.loads((folder / "pytorch_model.bin.index.json").read_text())
    loaded = {}
    for name in set(index["weight_map"].values()):
        loaded |= torch.load(folder / name, weights_only=True)
    assert loaded["optimizer.lr"] == 0.5
    assert loaded.keys() == index["weight_map"].keys()


def test_safetensors_of_torchs_checkpoints(tmp_path):
    from tests.ranks import run_ranks

    run_ranks(2, save_hugging_face, str(tmp_path))
    expected = torch.arange(15.0).reshape(5, 3).tolist()
    for name in ("cut", "joined"):
        ck = checkpoint.open(tmp_path / name)
        assert all(ck[key].numpy().tolist() == expected for key in ("rows", "columns")), name
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint.convert(tmp_path / name, tmp_path / f"{name}.pt", to="torch")
        checkpoint.convert(tmp_path / name, tmp_path / f"{name}.safetensors", to="safetensors")
        assert checkpoint.open(tmp_path / f"{name}.safetensors").metadata == {"format": "pt"}
    assert len(checkpoint.open(tmp_path / "cut")["columns"].boxes) == 2
    shutil.copytree(tmp_path / "cut", tmp_path / "last")
    os.remove(next((tmp_path / "last").glob("shard-00001*")))
    with pytest.raises(
        CheckpointError, match=r"(?s)Boxes are missing.*Of several parts that a rank holds of one tensor"
    ):
        checkpoint.open(tmp_path / "last")
    os.remove(next((tmp_path / "cut").glob("shard-00002*")))
    ck = checkpoint.open(tmp_path / "cut")  # the format does not say how large a tensor is
    assert ck["rows"].shape == (3, 3)
    with pytest.raises(CheckpointError, match="one rank's pieces") as caught:
        checkpoint.open(next((tmp_path / "cut").iterdir()))
    assert caught.value.fix == "Open its folder."


def save_hugging_face(rank, world, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(15.0).reshape(5, 3)
    state = {"rows": distribute_tensor(full, mesh, [Shard(0)]), "columns": distribute_tensor(full, mesh, [Shard(1)])}
    for name, join in (("cut", False), ("joined", True)):
        writer = dcp.HuggingFaceStorageWriter(f"{path}/{name}", save_distributed=True, enable_consolidation=join)
        dcp.save(state, storage_writer=writer)


def test_a_rank_writes_the_files_that_it_has_pieces_for(tmp_path):
    """With several files a rank, torch's writer leaves out those in which that rank has nothing."""
    from tests.ranks import run_ranks

    run_ranks(2, save_several_files, str(tmp_path / "several"))
    names = os.listdir(tmp_path / "several")
    assert len(names) == 3, "one rank has nothing in one of two files"
    ck = checkpoint.open(tmp_path / "several")
    assert ck["rows"].numpy().tolist() == torch.arange(15.0).reshape(5, 3).tolist()
    assert ck["plain"].numpy().tolist() == [1.0] * 4
    for name in names:
        if "00002-of-00002" in name:
            os.remove(tmp_path / "several" / name)
    with pytest.raises(CheckpointError, match="A part is missing"):
        checkpoint.open(tmp_path / "several")


def save_several_files(rank, world, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rows = distribute_tensor(torch.arange(15.0).reshape(5, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True, fqn_to_index_mapping={"rows": 1, "plain": 2})
    dcp.save({"rows": rows, "plain": torch.ones(4)}, storage_writer=writer)


# --- chosen, renamed, cast, merged -------------------------------------------------------------------------------


def save(tmp_path, name="a.pt"):
    model = {"layers.0.weight": torch.randn(3, 4), "layers.1.weight": torch.randn(3, 4), "norm": torch.ones(3)}
    torch.save({"model": model, "step": torch.tensor(7), "lr": 0.5, "list": [torch.ones(1), 2]}, tmp_path / name)
    return tmp_path / name


def test_select_and_exclude(tmp_path):
    src = save(tmp_path)
    done = checkpoint.convert(src, tmp_path / "b.pt", to="torch", select=["model.*", "lr"], exclude=["*.1.*"])
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded.keys() == {"model", "lr"}
    assert loaded["model"].keys() == {"layers.0.weight", "norm"}
    assert done.tensors == 2
    with pytest.raises(CheckpointError, match="No key matches this pattern"):
        checkpoint.convert(src, tmp_path / "c.pt", to="torch", select=["modle.*"])


def test_renames_stay_in_the_dict_that_they_name(tmp_path):
    src = save(tmp_path)
    checkpoint.convert(src, tmp_path / "b.pt", to="torch", rename=lambda key: key.replace("layers.", "blocks."))
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded["model"].keys() == {"blocks.0.weight", "blocks.1.weight", "norm"}
    chosen = {"select": ["model.*"], "to": "torch"}
    checkpoint.convert(src, tmp_path / "e.pt", rename=lambda key: f"{key}.new", **chosen)
    assert len(torch.load(tmp_path / "e.pt", weights_only=True)["model"]) == 3
    checkpoint.convert(src, tmp_path / "c.pt", rename=lambda key: key[6:], **chosen)
    assert torch.load(tmp_path / "c.pt", weights_only=True).keys() == {"layers.0.weight", "layers.1.weight", "norm"}
    with pytest.raises(CheckpointError, match="Two keys have the same new name"):
        checkpoint.convert(src, tmp_path / "d.pt", to="torch", rename=lambda key: "x")


NESTED = {
    "model": {"layers": {"0": {"w": torch.ones(1)}}},
    "opts": [{"state": {0: {"a": torch.ones(1)}}}, {"state": {0: {"a": torch.zeros(1)}, 1: {}}}],
    "pair": (torch.ones(1), {"state": {"a": torch.zeros(1)}}),
}


def test_metadata_of_modules_follow_renames(tmp_path):
    """What load_state_dict asks for the version of a module, at the top and further in, as for live state dicts."""
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2)))
    state = nn.DataParallel(module).state_dict()
    torch.save({"model": state, "epoch": 1}, tmp_path / "nested.pt")
    torch.save(state, tmp_path / "flat.pt")
    checkpoint.convert(tmp_path / "flat.pt", tmp_path / "a.pt", to="torch", rename=KeyRules([strip_prefix("module.")]))
    found = torch.load(tmp_path / "a.pt")
    assert found._metadata == module.state_dict()._metadata
    assert list(found) == list(module.state_dict())
    rules = [rename("model", "net"), rename("module.1", "module.head")]
    checkpoint.convert(tmp_path / "nested.pt", tmp_path / "b.pt", to="torch", rename=KeyRules(rules))
    versions = {"": 1, "module": 1, "module.0": 2, "module.head": 1, "module.head.0": 1}
    assert {name: its["version"] for name, its in torch.load(tmp_path / "b.pt")["net"]._metadata.items()} == versions
    checkpoint.convert(tmp_path / "nested.pt", tmp_path / "c.pt", to="torch", exclude=["epoch"], dtype="bfloat16")
    assert torch.load(tmp_path / "c.pt")["model"]._metadata == state._metadata


def test_metadata_of_modules_of_several_sources(tmp_path):
    """Parts of one model, and a model beside its optimizer; versions that differ are left out by name."""
    body, head = nn.Sequential(nn.BatchNorm1d(2)), nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    torch.save(body.state_dict(), tmp_path / "body.pt")
    torch.save(head.state_dict(), tmp_path / "head.pt")
    torch.save({"model": head.state_dict()}, tmp_path / "model.pt")
    torch.save({"optimizer": optimizer.state_dict(), "model": body.state_dict()}, tmp_path / "optimizer.pt")

    def convert(*names):
        checkpoint.convert([tmp_path / name for name in names], tmp_path / "out.pt", to="torch", overwrite=True)
        return torch.load(tmp_path / "out.pt")

    both = nn.Sequential(body[0], head[1])
    for names in (("body.pt", "head.pt"), ("head.pt", "body.pt")):
        found = convert(*names)
        assert found._metadata == both.state_dict()._metadata
        assert found.keys() == both.state_dict().keys()
        assert type(found) is OrderedDict
    assert convert("model.pt", "optimizer.pt")["model"]._metadata == both.state_dict()._metadata
    assert convert("head.pt", "optimizer.pt")._metadata == head.state_dict()._metadata
    more = OrderedDict({"1.more": torch.ones(1)})
    more._metadata = OrderedDict({"": {"version": 1}, "1": {"version": 7}})
    torch.save(more, tmp_path / "more.pt")
    with pytest.warns(UserWarning, match="metadata that differ are left out: _metadata: 1$"):
        found = convert("head.pt", "more.pt")
    assert list(found._metadata) == ["", "0"]


def test_what_has_no_place_beside_the_tensors_is_named(tmp_path):
    """Versions of modules, and what was set on tensors: in no format but one, and in none."""
    state = {"model": nn.Linear(2, 2).state_dict(), "p": nn.Parameter(torch.ones(1)), "t": torch.ones(2)}
    state["p"].tied_to, state["t"].tag = "model", 1
    torch.save(state, tmp_path / "a.pt")
    names = {"torch": "p.tied_to, t.tag", "dcp": "model._metadata, p.tied_to, t.tag"}
    for to, what in (names | {"safetensors": names["dcp"]}).items():
        with pytest.warns(UserWarning, match=f"has no place for metadata of the source; left out: {what}$"):
            checkpoint.convert(tmp_path / "a.pt", tmp_path / f"b.{to}", to=to)


def test_lists_that_torch_keeps_as_one_are_so_in_a_folder(tmp_path):
    """Else torch itself cannot load them: it looks for the list where we would have stored what it holds."""
    t = torch.ones(2)
    state = {
        "empty": [{}],
        "deep": [[{}], []],
        "tuples": [(t, {"a": 1}), ()],
        "both": [{}, t],
        "dicts": [{}, {"lr": 1}],
    }
    torch.save(state, tmp_path / "a.pt")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "ck", to="dcp")
    found = torch_loads(tmp_path / "ck", tmp_path)
    assert_same_tree(found, state)
    checkpoint.convert(tmp_path / "ck", tmp_path / "b.pt", to="torch")
    assert_same_tree(torch.load(tmp_path / "b.pt"), state)
    for name in ("a.pt", "ck"):
        target = {"tuples": [(torch.zeros(2), {"a": 0}), ()], "deep": [], "empty": None}
        checkpoint.load_into(tmp_path / name, target)
        assert_same_tree(target["tuples"], state["tuples"])


def test_renames_keep_the_nesting(tmp_path):
    torch.save(NESTED, tmp_path / "a.pt")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", rename=KeyRules([rename("layers", "blocks")]))
    expected = NESTED | {"model": {"blocks": {"0": {"w": torch.ones(1)}}}}
    assert_same_tree(torch.load(tmp_path / "b.pt"), expected)

    def new(key):
        return key.replace("state", "st").replace("pair.0", "pair.first").replace("opts", "optims")

    checkpoint.convert(tmp_path / "a.pt", tmp_path / "c.pt", to="torch", rename=new)
    expected = {
        "model": NESTED["model"],
        "pair": (None, {"st": {"a": torch.zeros(1)}}),
        "optims": [{"st": {0: {"a": torch.ones(1)}}}, {"st": {0: {"a": torch.zeros(1)}, 1: {}}}],
        "pair.first": torch.ones(1),
    }
    assert_same_tree(torch.load(tmp_path / "c.pt"), expected)


def by_name(optimizer):
    return {"model": {"layers.0.weight": torch.ones(2, 2), "layers.1.weight": torch.zeros(2, 2)}, "optim": optimizer}


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_an_optimizer_by_name_follows_as_a_live_one_does(tmp_path, kind):
    state = {f"layers.{i}.weight": {"exp_avg": torch.full((2, 2), float(i)), "eps": 0.5} for i in range(2)}
    groups = [{"params": ["layers.1.weight"], "lr": 0.1}, {"params": ["layers.0.weight", "layers.2.bias"], "lr": 0.2}]
    live = by_name({"state": state, "param_groups": groups})
    rules = [rename(r"layers.(\d+)", r"blocks.\1"), transpose("weight")]
    convert_saved(live, tmp_path, kind, KeyRules(rules))
    assert_same_tree(torch.load(tmp_path / "b.pt"), state_dict.KeyRules(rules)(live))
    outside = KeyRules([rename("optim.state.layers", "optim.layers")])
    with pytest.raises(CheckpointError, match="renamed out of the state of its optimizer"):
        convert_saved(live, tmp_path, kind, outside)


def test_an_optimizer_by_number_is_not_joined(tmp_path):
    groups = [{"params": [0], "lr": 0.1, "param_names": ["layers.0.weight"]}]
    numbered = by_name({"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": groups})
    rules = [rename("layers", "blocks")]
    convert_saved(numbered, tmp_path, "torch", KeyRules(rules))
    assert_same_tree(torch.load(tmp_path / "b.pt"), state_dict.KeyRules(rules)(numbered))
    joined = KeyRules([fuse(["layers.0.weight", "layers.1.weight"], "layers.weight")])
    with pytest.raises(CheckpointError, match="go by numbers cannot be joined"):
        convert_saved(numbered, tmp_path, "torch", joined)


def convert_saved(state, tmp_path, kind, rules):
    if kind == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    else:
        torch.save(state, tmp_path / "a")
    checkpoint.convert(tmp_path / "a", tmp_path / "b.pt", to="torch", rename=rules, overwrite=True)


def test_rules_join_split_and_transpose_without_reading(tmp_path):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 6, generator=g) for _ in range(3))
    sources.make(tmp_path / "ck", 2, save_attention, q, k, v)
    names = [rf"layers.(\d+).{name}.weight" for name in "qkv"]
    fused = KeyRules([fuse(names, r"layers.\1.qkv.weight", 0), transpose("qkv.weight")])
    checkpoint.convert(tmp_path / "ck", tmp_path / "a.pt", to="torch", rename=fused, verify=True)
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(loaded["layers.0.qkv.weight"], torch.cat([q, k, v]).t())
    back = KeyRules([transpose("qkv.weight"), split("layers.0.qkv.weight", [f"layers.0.{n}.weight" for n in "qkv"], 0)])
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.safetensors", to="safetensors", rename=back, dtype="bfloat16")
    loaded = safetensors.torch.load_file(tmp_path / "b.safetensors")
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        assert same_bits(loaded[f"layers.0.{name}.weight"], tensor.bfloat16())


def save_attention(rank, world, path, q, k, v):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    parts = zip("qkv", (q, k, v), (0, 1, 0), strict=True)
    state = {f"layers.0.{name}.weight": distribute_tensor(x, mesh, [Shard(dim)]) for name, x, dim in parts}
    dcp.save(state, checkpoint_id=path)


def test_several_inputs_become_one(tmp_path):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.pt"
    safetensors.torch.save_file({"model.w": torch.ones(2)}, a)
    torch.save({"optimizer": {"lr": 0.5, "m": torch.zeros(2)}}, b)
    checkpoint.convert([a, b], tmp_path / "c.pt", to="torch", verify=True)
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert loaded.keys() == {"model.w", "optimizer"}
    assert loaded["optimizer"]["lr"] == 0.5
    with pytest.raises(CheckpointError, match="the same key") as error:
        checkpoint.convert([b, a, a], tmp_path / "d.pt", to="torch")
    assert error.value.where == str(a)  # not only the folder that it lies in
    torch.save({"optimizer": {"m": {"x": torch.ones(1)}}}, tmp_path / "nested.pt")  # no key of b, but its place
    with pytest.raises(CheckpointError, match="the same key") as error:
        checkpoint.convert([b, tmp_path / "nested.pt"], tmp_path / "d.pt", to="torch")
    assert (error.value.got, error.value.where) == ("optimizer.m", str(tmp_path / "nested.pt"))


@pytest.mark.parametrize("globs", [{"exclude": ["*"]}, {"select": ["model.w"], "exclude": ["model.[wb]"]}])
def test_patterns_that_leave_nothing_are_refused(tmp_path, globs):
    """The file was written, and held nothing."""
    torch.save({"model": {"w": torch.ones(2), "b": torch.ones(1)}}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="The patterns leave no key") as error:
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", **globs)
    assert error.value.got == "2 keys, all of them left out"
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("glob", ["count", "wave", "lr"])
def test_a_cast_of_nothing_that_is_cast_is_refused(tmp_path, glob):
    """Integers, complex numbers and objects: nothing was cast, without a word."""
    state = {"w": torch.ones(2), "count": torch.arange(3), "wave": torch.ones(2) + 1j, "lr": 0.5}
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="No floating-point tensor matches this pattern") as error:
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", dtype={glob: "bfloat16", "*": "float16"})
    assert error.value.where == glob
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", select=["count"], dtype="bfloat16")


def test_casts_of_chosen_tensors(tmp_path):
    src = save(tmp_path)
    checkpoint.convert(
        src, tmp_path / "b.pt", to="torch", dtype={"*.0.*": "float64", "model.*": "bfloat16"}, verify=True
    )
    before, after = (torch.load(path, weights_only=True) for path in (src, tmp_path / "b.pt"))
    assert torch.equal(after["model"]["layers.0.weight"], before["model"]["layers.0.weight"].double())
    assert same_bits(after["model"]["layers.1.weight"], before["model"]["layers.1.weight"].bfloat16())
    assert after["list"][0].dtype == torch.float32
    checkpoint.convert(src, tmp_path / "c.pt", to="torch", dtype="float16")
    after = torch.load(tmp_path / "c.pt", weights_only=True)
    assert after["step"].dtype == torch.int64
    assert same_bits(after["list"][0], torch.ones(1).half())


def halfway(dtype):
    """Values between neighbours of a type of 16 bits: in the middle, and a little to each side."""
    values = torch.arange(2**15, dtype=torch.int16).view(dtype).double()
    values = values[values.isfinite()]
    steps = values.diff()
    middle = values + torch.cat([steps, steps[-1:]]) / 2
    return torch.cat([middle * (sign + side * 2.0**-40) for sign in (1, -1) for side in (-1, 0, 1)])


@pytest.mark.parametrize("source", FLOATING)
@pytest.mark.parametrize("target", TARGETS)
def test_casts_are_torchs(source, target):
    tensor = sources.random_bits((4096,), getattr(torch, source), seed=5)
    if tensor.itemsize == 1:
        tensor = torch.arange(256, dtype=torch.uint8).view(tensor.dtype)
    elif tensor.itemsize > 2:
        tensor = torch.cat([tensor, *[halfway(dtype).to(tensor.dtype) for dtype in (torch.float16, torch.bfloat16)]])
    ours = cast(np.frombuffer(bytes_of(tensor), DTYPES[source].numpy), source, target)
    ours = torch.from_numpy(ours.copy()).view(getattr(torch, target))
    theirs = tensor.to(getattr(torch, target))
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert same_bits(ours[~ours.isnan()], theirs[~ours.isnan()])


def test_casts_that_are_refused(tmp_path):
    for dtype in (torch.float32, torch.int64):  # also where there is nothing to cast
        torch.save({"w": torch.ones(2, dtype=dtype)}, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match="not cast to this type"):
            checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", dtype="int8")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"to": "torch", "mesh": (2,)}, "Only a dcp folder"),
        ({"to": "dcp", "placements": {"*": "R"}}, "Give the mesh too"),
        ({"to": "dcp", "mesh": (2,), "placements": {"*": "S(0),R"}}, "one placement an axis"),
        ({"to": "dcp", "mesh": (2,), "placements": {"*": "S(0/7)"}}, "do not fit"),
        ({"to": "dcp", "mesh": (2,), "placements": {"*": "P"}}, "one placement an axis"),
        ({"to": "dcp", "mesh": (2,), "placements": {"*": "S(7)"}}, "do not fit"),
        ({"to": "dcp", "mesh": (2,), "placements": {"layer.*": "S(0)"}}, "No key matches this pattern"),
        ({"to": "dcp", "mesh": (2,), "placements": {"*": "R", "*weight": "S(0)"}}, "match all keys of this one first"),
        ({"to": "dcp", "mesh": (9999, 9999)}, "mesh is out of all proportion"),
        ({"to": "torch", "dtype": {"*": "bfloat16", "*norm": "float32"}}, "match all keys of this one first"),
        ({"to": "onnx"}, "not written"),
        ({"to": "torch", "shard_size": 0}, "too little"),
    ],
)
def test_options_that_make_no_sense(tmp_path, kwargs, message):
    src = save(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.convert(src, tmp_path / "out", **kwargs)
    assert os.listdir(tmp_path) == ["a.pt"]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_mesh_and_placements(tmp_path_factory, data):
    """What is cut for any mesh comes together again, as torch puts it together too."""
    shape = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    mesh = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    placements = ",".join(data.draw(st.sampled_from(["R", *[f"S({d})" for d in range(len(shape))]])) for _ in mesh)
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    folder = tmp_path_factory.mktemp("any")
    torch.save({"w": tensor}, folder / "a.pt")
    checkpoint.convert(folder / "a.pt", folder / "ck", to="dcp", mesh=mesh, placements={"w": placements}, fsync=False)
    assert checkpoint.open(folder / "ck")["w"].numpy().tolist() == tensor.tolist()
    loaded = {"w": torch.empty_like(tensor)}
    dcp.load(loaded, checkpoint_id=folder / "ck", no_dist=True)
    assert torch.equal(loaded["w"], tensor)
