"""What is converted is, bit by bit, what torch itself loads."""

import contextlib
import json
import os
import warnings
import zipfile

import pytest
import safetensors
import safetensors.torch
import torch

from tests.checkpoint import sources
from tests.checkpoint.sources import assert_same_tree, flat, same_bits, torch_loads
from torchshard import checkpoint
from torchshard.errors import CheckpointError
from torchshard.layout import Box

FOLDERS = ["dcp_plain", "dcp_plain2", "dcp_two", "dcp_three", "dcp_mesh", "dcp_st"]


def to_safetensors(src, dst, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint.convert(src, dst, to="safetensors", **kwargs)


@pytest.fixture(params=FOLDERS)
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("memory", [2**20, 64 * 2**20])
def test_dcp_to_torch_equals_what_torch_makes_of_it(folder, tmp_path, memory):
    done = checkpoint.convert(folder, tmp_path / "out.pt", to="torch", max_memory=memory, verify=True)
    assert done.written
    assert done.left_out == ()
    expected = torch_loads(folder, tmp_path)
    for options in ({}, {"mmap": True}):
        assert_same_tree(torch.load(tmp_path / "out.pt", weights_only=True, **options), expected)
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:  # a strict reader: checksums, sizes, headers
        assert archive.testzip() is None


@pytest.mark.parametrize("name", FOLDERS[2:])
def test_dcp_to_safetensors_equals_what_torch_loads(name, request, tmp_path):
    folder = request.getfixturevalue(name)
    to_safetensors(folder, tmp_path / "out.safetensors", verify=True)
    loaded = safetensors.torch.load_file(tmp_path / "out.safetensors")
    expected = {k: v for k, v in flat(torch_loads(folder, tmp_path)).items() if isinstance(v, torch.Tensor)}
    assert loaded.keys() == expected.keys()
    for key, tensor in expected.items():
        assert same_bits(loaded[key], tensor), key


def test_pieces_of_any_cut_come_together(dcp_mesh, tmp_path):
    to_safetensors(dcp_mesh, tmp_path / "out.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "out.safetensors")
    full = torch.arange(70, dtype=torch.float32).reshape(7, 10)
    for key in ("rows", "columns", "replicated", "both", "twice", "inner"):
        assert torch.equal(loaded[f"model.{key}"], full), key
    assert torch.equal(loaded["model.middle"], torch.arange(60).reshape(3, 5, 4))


def test_shardedtensors_of_unequal_rows(dcp_st, tmp_path):
    to_safetensors(dcp_st, tmp_path / "out.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert loaded["st"].tolist() == [[0.0, 0.0]] * 3 + [[1.0, 1.0]]


def test_objects_are_named_where_the_format_cannot_hold_them(dcp_two, tmp_path):
    with pytest.warns(UserWarning, match=r"safetensors holds tensors only; left out: optimizer\.lr$") as caught:
        done = checkpoint.convert(dcp_two, tmp_path / "out.safetensors", to="safetensors")
    assert done.left_out == ("optimizer.lr",)
    assert len(caught) == 1


def test_tensors_inside_of_objects_are_carried(tmp_path):
    torch.save({"pair": (torch.ones(2), 3)}, tmp_path / "a.pt")
    with pytest.warns(UserWarning, match=r"left out: pair\.1$"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.safetensors", to="safetensors")
    assert safetensors.torch.load_file(tmp_path / "b.safetensors").keys() == {"pair.0"}


def test_tensors_inside_of_dcp_objects_are_carried(dcp_plain, tmp_path):
    src = tmp_path / "no_complex128"
    state = sources.plain()
    del state["model"]["complex128"]
    sources.make(src, 1, sources.save, state)
    to_safetensors(src, tmp_path / "b.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert torch.equal(loaded["pair.0"], torch.ones(2))
    assert set(loaded) == {k for k, v in flat(state).items() if isinstance(v, torch.Tensor)}
    for key, tensor in flat(state).items():
        if isinstance(tensor, torch.Tensor):
            assert same_bits(loaded[key], tensor), key


def test_objects_that_are_not_plain_data(dcp_foreign, tmp_path):
    with pytest.raises(CheckpointError, match=r"argparse\.Namespace") as caught:
        checkpoint.convert(dcp_foreign, tmp_path / "out.pt", to="torch")
    assert "args" in str(caught.value.where)
    assert os.listdir(tmp_path) == []
    with pytest.warns(UserWarning, match=r"left out: args \(argparse\.Namespace\)"):
        checkpoint.convert(dcp_foreign, tmp_path / "out.safetensors", to="safetensors")
    assert safetensors.torch.load_file(tmp_path / "out.safetensors")["w"].tolist() == [0, 1, 2, 3]


def test_a_type_that_safetensors_lacks_is_named(dcp_plain, tmp_path):
    with pytest.raises(CheckpointError, match="cannot hold the type complex128") as caught:
        checkpoint.convert(dcp_plain, tmp_path / "out.safetensors", to="safetensors")
    assert "model.complex128" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_round_trip_through_all_formats(dcp_three, tmp_path):
    expected = {k: v for k, v in flat(torch_loads(dcp_three, tmp_path)).items() if isinstance(v, torch.Tensor)}
    to_safetensors(dcp_three, tmp_path / "a.safetensors")
    checkpoint.convert(tmp_path / "a.safetensors", tmp_path / "b.pt", to="torch", verify=True)
    to_safetensors(tmp_path / "b.pt", tmp_path / "c.safetensors", verify=True)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert all(same_bits(loaded[key], tensor) for key, tensor in expected.items())


def test_the_destination_is_complete_or_absent(dcp_two, tmp_path):
    class Stop(Exception):
        pass

    def progress(done, total):
        assert 0 < done <= total
        raise Stop

    with pytest.raises(Stop):
        to_safetensors(dcp_two, tmp_path / "out.safetensors", progress=progress)
    assert os.listdir(tmp_path) == []


def test_progress_ends_at_the_total(dcp_two, tmp_path):
    for verify in (False, True):
        done, total = [], set()

        def progress(so_far, in_all, done=done, total=total):
            done.append(so_far)
            total.add(in_all)

        to_safetensors(dcp_two, tmp_path / f"{verify}.safetensors", verify=verify, progress=progress)
        assert total == {done[-1]}
        assert done == sorted(done)


@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_conversion_ends_where_it_began(tmp_path, monkeypatch, to, fails):
    for run in ("mine", "other"):
        (tmp_path / run).mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    torch.save({"w": torch.arange(3)}, "a.pt")

    def away(done, total):
        os.chdir(tmp_path / "other")
        if fails:
            raise KeyError

    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        checkpoint.convert("a.pt", "b", to=to, verify=True, progress=away)
    assert sorted(os.listdir(tmp_path / "mine")) == (["a.pt"] if fails else ["a.pt", "b"])
    assert not os.listdir(tmp_path / "other")


def test_what_exists_is_left_alone(dcp_two, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    with pytest.raises(CheckpointError, match="destination exists"):
        to_safetensors(dcp_two, out)
    assert out.read_text() == "mine"
    to_safetensors(dcp_two, out, overwrite=True)
    assert safetensors.torch.load_file(out)


def test_the_source_is_not_touched(dcp_two, tmp_path):
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in dcp_two.iterdir()}
    to_safetensors(dcp_two, tmp_path / "out.safetensors", verify=True)
    for place in (dcp_two, dcp_two / "out.safetensors"):
        with pytest.raises(CheckpointError, match="never touched"):
            to_safetensors(dcp_two, place, overwrite=True)
    assert before == {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in dcp_two.iterdir()}


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_a_destination_around_the_source_is_refused(tmp_path, to):
    folder, blobs = tmp_path / "ck", tmp_path / "blobs"
    folder.mkdir()
    blobs.mkdir()
    safetensors.torch.save_file({"w": torch.ones(2), "b": torch.ones(1)}, folder / "model.safetensors")
    weight_map = {"w": "model.safetensors", "b": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    safetensors.torch.save_file({"w": torch.ones(2)}, blobs / "77")
    (folder / "link.safetensors").symlink_to(blobs / "77")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    options = {"to": to, "shard_size": 2**20, "overwrite": True}
    for name in ("model.safetensors", "model.safetensors.index.json", "link.safetensors"):
        for place in (folder, tmp_path):
            with pytest.raises(CheckpointError, match="never touched"):
                checkpoint.convert(folder / name, place, **options)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_dry_run_says_the_size_and_writes_nothing(dcp_two, tmp_path):
    dry = to_safetensors(dcp_two, tmp_path / "out.safetensors", dry_run=True)
    assert not dry.written
    assert os.listdir(tmp_path) == []
    wet = to_safetensors(dcp_two, tmp_path / "out.safetensors")
    assert wet.nbytes == dry.nbytes == (tmp_path / "out.safetensors").stat().st_size
    assert (wet.tensors, wet.pieces) == (dry.tensors, dry.pieces)
    assert str(dry).startswith("would write ")


def test_bad_arguments(dcp_two, tmp_path):
    with pytest.raises(CheckpointError, match="format is not written"):
        checkpoint.convert(dcp_two, tmp_path / "x", to="onnx")
    with pytest.raises(CheckpointError, match="max_memory is too little"):
        to_safetensors(dcp_two, tmp_path / "x", max_memory=1000)
    for size in (2**60, 2**100):
        with pytest.raises(CheckpointError, match=r"no memory for buffers(?s:.*)max_memory=67108864"):
            to_safetensors(dcp_two, tmp_path / "x", max_memory=size)
    with pytest.raises(CheckpointError, match="folder of the destination does not exist"):
        to_safetensors(dcp_two, tmp_path / "no" / "x")
    with pytest.raises(CheckpointError, match="destination is a folder"):
        to_safetensors(dcp_two, tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        to_safetensors(tmp_path / "nothing", tmp_path / "x")


def test_placements_that_do_not_fit_all_keys(tmp_path):
    torch.save({"w": torch.ones(4, 2), "step": torch.tensor(3)}, tmp_path / "a.pt")
    cut = {"to": "dcp", "mesh": (2, 2), "placements": {"*": "S(0),S(1)"}}
    with pytest.raises(CheckpointError, match="placements do not fit: Shard") as caught:
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "cut", **cut)
    assert caught.value.where == "step"
    assert caught.value.fix == "placements for this key before those of globs that match it: 'step=R,R'"
    cut["placements"] = {"step": "R,R", **cut["placements"]}
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "cut", **cut)


def test_heads_stay_whole(tmp_path):
    weight = torch.arange(84.0).reshape(21, 4)  # three heads of seven rows
    torch.save({"w": weight}, tmp_path / "a.pt")
    checkpoint.convert(
        tmp_path / "a.pt", tmp_path / "cut", to="dcp", mesh=(2,), placements={"w": "S(0*7)"}, verify=True
    )
    assert checkpoint.open(tmp_path / "cut")["w"].boxes == (Box((0, 0), (14, 4)), Box((14, 0), (7, 4)))
    with pytest.raises(CheckpointError, match=r"do not fit.*whole units") as caught:
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "no", to="dcp", mesh=(2,), placements={"w": "S(0*4)"})
    assert caught.value.where == "w"


WRONG = {
    "dtype": [torch.bfloat16, {"*": torch.bfloat16}, ["bfloat16"]],
    "rename": [{"a": "b"}, "a"],
    "shard_size": ["5GB", 1.5, True],
    "max_memory": ["64MiB", 2.0**26],
    "mesh": [4, "2x2", (2.0,)],
    "placements": [{"*": ["S(0)"]}, ["S(0)"], "S(0)"],
    "select": ["model.*", [1]],
    "exclude": ["model.*"],
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_another_type(dcp_two, tmp_path, name):
    for value in WRONG[name]:
        with pytest.raises(CheckpointError, match=f"The argument {name} is of another type") as caught:
            checkpoint.convert(dcp_two, tmp_path / "x", to="dcp", **{name: value})
        assert caught.value.expected
    with pytest.raises(CheckpointError, match="argument select is of another type"):
        checkpoint.inspect(dcp_two, select="model.*")
    with pytest.raises(CheckpointError, match="argument rename is of another type"):
        checkpoint.load_into(dcp_two, {}, rename={"a": "b"})
    with pytest.raises(CheckpointError, match="new name of a key is no text"):
        checkpoint.convert(dcp_two, tmp_path / "x", to="dcp", rename=lambda key: None)


@pytest.mark.parametrize("place", [".", "..", "", "folder/..", "/"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_destination_without_a_name_of_its_own(dcp_two, tmp_path, monkeypatch, place, overwrite):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    with pytest.raises(CheckpointError, match="has no name of its own"):
        checkpoint.convert(dcp_two, place, to="dcp", overwrite=overwrite)
    assert os.listdir(tmp_path) == ["folder"]
    checkpoint.convert(dcp_two, "../folder/./ck", to="dcp")
    assert os.listdir(tmp_path / "folder") == ["ck"]


def test_room_is_checked_first(dcp_two, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 900, 100))
    with pytest.raises(CheckpointError, match="not enough room") as caught:
        to_safetensors(dcp_two, tmp_path / "out.safetensors")
    assert "100 B" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_nothing(dcp_two, tmp_path, monkeypatch):
    def full(fd, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        to_safetensors(dcp_two, tmp_path / "out.safetensors")
    assert os.listdir(tmp_path) == []


def test_verify_notices_what_reached_the_disk_wrong(dcp_two, tmp_path, monkeypatch):
    real = os.pwrite

    def flip(fd, data, offset):
        broken = bytearray(data)
        if offset > 4000:  # beyond the header
            broken[0] ^= 1
        return real(fd, broken, offset)

    monkeypatch.setattr(os, "pwrite", flip)
    with pytest.raises(CheckpointError, match="What was written is not what was read"):
        to_safetensors(dcp_two, tmp_path / "out.safetensors", verify=True)
    assert os.listdir(tmp_path) == []
