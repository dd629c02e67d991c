"""A checkpoint as a lazy mapping, of every format."""

import json
import os
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint.filesystem import SerializationFormat

from tests.checkpoint import sources
from tests.checkpoint.sources import bytes_of, flat, random_bits, torch_loads
from torchshard import checkpoint
from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.files import Files
from torchshard.errors import CheckpointError
from torchshard.layout import Box


@pytest.mark.parametrize("name", ["dcp_plain", "dcp_plain2", "dcp_two", "dcp_three", "dcp_mesh", "dcp_st"])
def test_every_tensor_of_a_dcp_folder(name, request, tmp_path):
    folder = request.getfixturevalue(name)
    expected = flat(torch_loads(folder, tmp_path))
    with checkpoint.open(folder) as ck:
        assert ck.format == "dcp"
        assert ck.metadata == {"version": "1.0.0"}
        for key, entry in ck.items():
            if not isinstance(entry, checkpoint.TensorEntry):
                continue
            tensor = expected[key]
            assert entry.dtype == str(tensor.dtype).removeprefix("torch.")
            assert entry.shape == tuple(tensor.shape)
            assert entry.nbytes == tensor.nbytes
            array = entry.numpy()
            assert array.dtype == DTYPES[entry.dtype].numpy
            assert array.tobytes() == bytes_of(tensor)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_written_without_a_process_group_to_a_path(tmp_path):
    dcp.save({"w": torch.arange(3), "where": 1}, checkpoint_id=tmp_path / "ck")
    ck = checkpoint.open(tmp_path / "ck")
    assert ck["w"].numpy().tolist() == [0, 1, 2]
    assert ck["where"].value() == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", [{}, {"thread_count": 2}, {"single_file_per_rank": False}])
def test_a_dcp_folder_whose_values_are_safetensors(dcp_two, tmp_path, options):
    """Which torch writes and does not read; pieces, objects in front of them, and a piece that is another."""
    folder, plain = f"{dcp_two}.safetensors", tmp_path / "plain"
    with checkpoint.open(dcp_two) as expected, checkpoint.open(folder) as ck:
        assert len(ck) == 9
        assert all(ck[key].numpy().tobytes() == expected[key].numpy().tobytes() for key in ck)
        assert [ck[key].boxes for key in ck] == [expected[key].boxes for key in ck]
    state = {"w": torch.arange(6.0).reshape(2, 3), "few": torch.ones(1).bool(), "n": {"lr": 0.5}}
    writer = dcp.FileSystemWriter(plain, serialization_format=SerializationFormat.SAFETENSORS, **options)
    dcp.save(state, storage_writer=writer)
    torch.save(state, tmp_path / "plain.pt")
    assert not checkpoint.diff(plain, tmp_path / "plain.pt")
    (path,) = [path for path in plain.glob("*.distcp") if b"[0, 0]" in path.read_bytes()]
    path.write_bytes(path.read_bytes().replace(b"[0, 0]", b"[2, 0]"))
    with pytest.raises(CheckpointError, match="another piece than the metadata say"):
        checkpoint.open(plain)["w"].numpy()


def test_objects_of_a_dcp_folder(dcp_plain):
    ck = checkpoint.open(dcp_plain)
    values = {key: e.value() for key, e in ck.items() if isinstance(e, checkpoint.ObjectEntry)}
    plain = sources.plain()
    assert values["optimizer.param_groups.0.betas"] == (0.9, 0.999)
    assert values["optimizer.param_groups.0.fused"] is None
    for key in ("step", "name", "bytes", "big", "set"):
        assert values[key] == plain[key]
        assert type(values[key]) is type(plain[key])
    assert values["size"] == (2, 3)
    assert repr(values["dtype"]) == "torch.bfloat16"
    tensor, number = values["pair"]
    assert number == 3
    assert tensor.numpy().tolist() == [1.0, 1.0]


def test_boxes_say_how_a_tensor_is_stored(dcp_mesh):
    ck = checkpoint.open(dcp_mesh)
    assert sorted(ck["model.both"].boxes) == [
        Box((0, 0), (4, 5)), Box((0, 5), (4, 5)), Box((4, 0), (3, 5)), Box((4, 5), (3, 5)),
    ]  # fmt: skip
    assert ck["model.both"].cut == (2, 2)
    assert ck["model.replicated"].boxes == (Box((0, 0), (7, 10)),)
    assert ck["model.nothing"].boxes == ()
    assert len(ck["model.few"].boxes) == 2  # the empty pieces of the other ranks are left out


def indices(shape):
    def one(n):
        bound = st.one_of(st.none(), st.integers(-n - 2, n + 2))
        step = st.one_of(st.none(), st.integers(1, 3), st.integers(-3, -1))
        integer = st.integers(-n, n - 1) if n else st.nothing()
        return st.one_of(st.builds(slice, bound, bound, step), integer)

    def spell(parts, cut, dots):
        return (*parts[:cut], Ellipsis) if dots else tuple(parts[:cut])

    full = st.tuples(*map(one, shape))
    return st.builds(spell, full, st.integers(0, len(shape)), st.booleans())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_slices_are_those_of_numpy(dcp_mesh, data):
    ck = checkpoint.open(dcp_mesh)
    key = data.draw(st.sampled_from(["model.both", "model.columns", "model.twice", "model.middle", "model.nothing"]))
    full = ck[key].numpy()
    index = data.draw(indices(full.shape))
    ours, theirs = np.asarray(ck[key][index]), np.asarray(full[index])
    assert ours.shape == theirs.shape
    assert np.array_equal(ours, theirs)


def test_only_the_rows_asked_for_are_read(tmp_path, monkeypatch):
    torch.save({"w": torch.arange(1_000_000).reshape(1000, 1000)}, tmp_path / "w.pt")
    entry = checkpoint.open(tmp_path / "w.pt")["w"]
    entry.pieces[0].place()
    read = []
    real = Files.read_scattered
    monkeypatch.setattr(
        Files, "read_scattered", lambda self, n, o, b: (read.append(sum(map(len, b))), real(self, n, o, b))
    )
    assert entry[10:12].tolist() == [list(range(10_000, 11_000)), list(range(11_000, 12_000))]
    assert sum(read) == 2 * 8000
    assert entry[3, 5] == 3005
    assert sum(read) == 2 * 8000 + 8


def test_wrong_indices(dcp_two):
    entry = checkpoint.open(dcp_two)["model.rows"]
    wrong = ((0, 0, 0), (..., ...), ([1, 2],), (None,), 7, (0, 10), True, (0, False), np.True_, np.array([0, 1]), 1.0)
    for index in wrong:
        with pytest.raises(IndexError):
            entry[index]


def test_a_mapping(dcp_two):
    ck = checkpoint.open(dcp_two)
    assert "model.rows" in ck
    assert "model" not in ck
    assert len(ck) == len(list(ck)) == len(ck.keys())
    with pytest.raises(KeyError):
        ck["nothing"]
    assert repr(ck).startswith("<Checkpoint dcp at ")


@pytest.mark.parametrize("dtype", sources.DTYPES, ids=str)
def test_every_type_in_torch_and_safetensors_files(tmp_path, dtype):
    tensor = random_bits((5, 3), dtype, seed=3)
    torch.save({"w": tensor}, tmp_path / "w.pt")
    files = [tmp_path / "w.pt"]
    name = str(dtype).removeprefix("torch.")
    if DTYPES[name].safetensors:
        safetensors.torch.save_file({"w": tensor}, tmp_path / "w.safetensors")
        files.append(tmp_path / "w.safetensors")
    for file in files:
        entry = checkpoint.open(file)["w"]
        assert (entry.dtype, entry.shape) == (name, (5, 3))
        assert entry.numpy().tobytes() == bytes_of(tensor)


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "text").write_text("hello, this is text")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "pickle").write_bytes(b"\x80\x02}.")
    (tmp_path / "folder").mkdir()
    cases = {
        "text": "no checkpoint",
        "empty": "an empty file",
        "pickle": "not what torch.save writes",
        "folder": r"without the file",
    }
    for name, message in cases.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            checkpoint.open(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    for name in ("optimizer.pt", "pytorch_model.bin", "readme.txt"):
        (tmp_path / "folder" / name).touch()
    with pytest.raises(CheckpointError, match=r"fix: *Name one of its files: optimizer\.pt, pytorch_model\.bin$"):
        checkpoint.open(tmp_path / "folder")
    for call in (
        checkpoint.open, checkpoint.inspect, lambda path: checkpoint.load_into(path, {}),
        lambda path: checkpoint.convert(path, "a", to="torch"), lambda path: checkpoint.convert("a", path, to="torch"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="cannot hold a NUL character"):
            call("a\0b")
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.open(tmp_path / "missing")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_file_of_a_dcp_folder_is_not_taken_for_a_checkpoint(tmp_path, name):
    """One with a single piece is an archive such as torch.save writes."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "ck", no_dist=True)
    with pytest.raises(CheckpointError, match=r"part of a folder of torch.distributed.checkpoint[^$]*Open the folder"):
        checkpoint.open(tmp_path / "ck" / name)


def test_nothing_imports_torch(dcp_mesh, tmp_path):
    code = """
import sys
from torchshard import checkpoint
checkpoint.inspect(sys.argv[1])
assert "numpy" not in sys.modules
ck = checkpoint.open(sys.argv[1])
assert ck["model.both"][2:5, 3:7].shape == (3, 4)
assert ck["optimizer.lr"].value() == 0.5
checkpoint.convert(sys.argv[1], sys.argv[2], to="torch", verify=True)
assert "torch" not in sys.modules
"""
    done = sources.python(code, dcp_mesh, tmp_path / "out.pt")
    assert done.returncode == 0, done.stderr


def test_the_file_that_is_named_may_be_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    torch.save({"w": torch.arange(3)}, tmp_path / "there" / "a.pt")
    (tmp_path / "here.pt").symlink_to(tmp_path / "there" / "a.pt")
    assert checkpoint.open(tmp_path / "here.pt")["w"][1] == 1
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "m_rank0.pt").symlink_to(tmp_path / "there" / "a.pt")
    with pytest.raises(CheckpointError, match="outside of its folder"):  # found, not named
        checkpoint.open(tmp_path / "ranks")


def test_a_relative_path_stays_what_it_was(tmp_path, monkeypatch):
    """Programs change their folder (hydra does); what lies there under the same name is not the checkpoint."""
    for number, run in enumerate(("mine", "other")):
        (tmp_path / run).mkdir()
        monkeypatch.chdir(tmp_path / run)
        torch.save({"w": torch.full((3,), float(number))}, "a.pt")
        safetensors.torch.save_file({"w": torch.full((3,), float(number))}, "a.safetensors")
        dcp.save({"w": torch.full((3,), float(number))}, checkpoint_id="a", no_dist=True)
    for name in ("a.pt", "a.safetensors", "a", "../mine/a.pt"):
        monkeypatch.chdir(tmp_path / "mine")
        with checkpoint.open(name) as ck:
            monkeypatch.chdir(tmp_path / "other")
            assert ck["w"].numpy().tolist() == [0.0] * 3
            assert str(ck.path) == name
    monkeypatch.chdir(tmp_path / "mine")
    (tmp_path / "mine" / "a.pt").unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.open("a.pt")
    assert str(caught.value.where) == "a.pt"  # as it was given


ODD_NAMES = ["model\u00a0v2", "\u200d", "mod\nel", "m\udcff", "\x1b[31m", "a b*", "-x", "..x", ".x"]


@pytest.mark.parametrize("odd", ODD_NAMES, ids=ascii)
def test_files_of_any_name(tmp_path, odd):
    folder = tmp_path / odd
    folder.mkdir()
    file = folder / f"{odd}.pt"
    torch.save({"w": torch.arange(3)}, tmp_path / "plain.pt")
    (tmp_path / "plain.pt").rename(file)
    checkpoint.convert(file, folder / f"{odd}.safetensors", to="safetensors", verify=True)
    checkpoint.convert(file, folder / f"{odd}.ck", to="dcp", verify=True)
    (folder / "parts").mkdir()
    checkpoint.convert(file, folder / "parts" / f"{odd}.safetensors", to="safetensors")
    (folder / "ranks").mkdir()
    file.rename(folder / "ranks" / f"{odd}_rank0.pt")
    index = folder / f"{odd}.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "whole"}}))
    (folder / "whole").write_bytes((folder / "ranks" / f"{odd}_rank0.pt").read_bytes())
    for path in (
        folder / f"{odd}.safetensors", folder / f"{odd}.ck", folder / "parts", folder / "ranks", index,
        folder / "ranks" / "*rank*.pt",
    ):  # fmt: skip
        with checkpoint.open(path) as ck:
            assert ck["w"].numpy().tolist() == [0, 1, 2]
            assert ck.layout("w").files


def test_names_inside_of_a_checkpoint_are_text(tmp_path):
    torch.save({"w": torch.arange(3)}, tmp_path / "a\nb")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a\nb"}}))
    for path in (index, tmp_path):
        with pytest.raises(CheckpointError, match="not text") as caught:
            checkpoint.open(path)
        assert caught.value.got == r"'a\nb'"


@pytest.mark.parametrize("name", ["pipe", "pipe.json", "pipe_rank0.pt"])
def test_a_named_pipe_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    for path in (tmp_path / name, tmp_path / "*_rank*.pt") if "rank" in name else (tmp_path / name,):
        with pytest.raises(CheckpointError, match="not a regular file"):
            checkpoint.open(path)


def test_the_cache_of_hugging_face(tmp_path):
    """A snapshot is links to blobs beside it; where these lead on, they are refused as any link out of the folder."""
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "0a1b"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    safetensors.torch.save_file({"w": torch.arange(3)}, blobs / "77")
    (blobs / "78").write_text('{"weight_map": {"w": "model-00001-of-00001.safetensors"}}')
    (snapshot / "model-00001-of-00001.safetensors").symlink_to("../../blobs/77")
    for path in (snapshot, snapshot / "model-00001-of-00001.safetensors"):
        assert checkpoint.open(path)["w"][1] == 1
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/78")
    assert checkpoint.open(snapshot)["w"][1] == 1
    (blobs / "77").rename(tmp_path / "elsewhere")
    (blobs / "77").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="outside of its folder"):
        checkpoint.open(snapshot)


def test_more_files_than_may_be_open(tmp_path):
    for rank in range(150):
        torch.save({"same": torch.ones(2), f"own{rank}": torch.ones(1)}, tmp_path / f"m_rank{rank}.pt")
    code = """
import resource, sys, warnings
from torchshard import checkpoint
warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
checkpoint.convert(sys.argv[1], sys.argv[2], to="torch")
"""
    done = sources.python(code, tmp_path / "m_rank*.pt", tmp_path / "out.pt")
    assert done.returncode == 0, done.stderr


def test_metadata_as_torch_2_1_wrote_them(tmp_path):
    """Properties are those of ShardedTensor; there is no version, no storage_meta, nothing about transformations."""
    sources.make(tmp_path / "ck", 1, sources.save, {"w": torch.arange(6.0).reshape(2, 3), "n": {"lr": 0.5}})
    metadata = pickle.loads((tmp_path / "ck" / ".metadata").read_bytes())
    for description in metadata.state_dict_metadata.values():
        if hasattr(description, "properties"):
            now = vars(description.properties)
            description.properties = TensorProperties(**now)
    for info in metadata.storage_data.values():
        vars(info).pop("transform_descriptors", None)
    for name in ("version", "storage_meta"):
        vars(metadata).pop(name, None)
    body = pickle.dumps(metadata)
    assert b"_shard.sharded_tensor.metadata" in body
    (tmp_path / "ck" / ".metadata").write_bytes(body)
    with checkpoint.open(tmp_path / "ck") as ck:
        assert ck["w"].numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
        assert ck["n.lr"].value() == 0.5
        assert ck.metadata == {}
