"""The safetensors format: what the reference library writes and reads."""

import json
import warnings

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.checkpoint.sources import bytes_of, random_bits
from torchshard import checkpoint
from torchshard.errors import CheckpointError


def file_of(path, header, data=b""):
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(body).to_bytes(8, "little") + body + data)
    return path


def test_what_the_library_writes(tmp_path):
    tensors = {
        "b": random_bits((3, 4), torch.bfloat16),
        "a": torch.arange(5),
        "none": torch.empty(0, 2),
        "s": torch.tensor(1.0),
    }
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata={"by": "me"})
    ck = checkpoint.open(tmp_path / "a.safetensors")
    assert ck.metadata == {"by": "me"}
    assert ck.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert ck[key].numpy().tobytes() == bytes_of(tensor)


def test_what_we_write_is_aligned_and_says_its_framework(tmp_path):
    torch.save({"odd": torch.ones(3, dtype=torch.uint8), "wide": torch.ones(3, dtype=torch.float64)}, tmp_path / "a.pt")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "a.safetensors", to="safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("wide").tolist() == [1.0] * 3
    wide = checkpoint.open(tmp_path / "a.safetensors")["wide"].pieces[0].place().start
    assert wide % 8 == 0


GOOD = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
BAD = {
    "not json": (b"{nonsense", "header is damaged"),
    "a list": (b"{}"[:0] + b"[1]", "no checkpoint"),
    "twice": (b'{"a":1,"a":2}', "occurs twice"),
    "deep": (b'{"a":' * 100_000, "header is damaged"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, "no type, shape or byte range"),
    "entry is text": ({"w": "x"}, "no type, shape or byte range"),
    "type": ({"w": GOOD["w"] | {"dtype": "F13"}}, "type of a tensor is not read"),
    "type is a list": ({"w": GOOD["w"] | {"dtype": []}}, "type of a tensor is not read"),
    "negative": ({"w": GOOD["w"] | {"shape": [-2]}}, "not a list of sizes"),
    "fraction": ({"w": GOOD["w"] | {"shape": [2.0]}}, "not a list of sizes"),
    "huge": ({"w": GOOD["w"] | {"shape": [2**62, 2**62]}}, "does not fit its shape"),
    "immense": (b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', "header is damaged"),
    "range": ({"w": GOOD["w"] | {"data_offsets": [0, 4]}}, "does not fit its shape"),
    "backwards": ({"w": GOOD["w"] | {"data_offsets": [8, 0]}}, "does not fit its shape"),
    "gap": ({"w": GOOD["w"] | {"data_offsets": [4, 12]}}, "overlap or leave a gap"),
    "overlap": (GOOD | {"v": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "overlap or leave a gap"),
    "beyond": ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "not as long as its header says"),
    "metadata": (GOOD | {"__metadata__": {"a": 1}}, "metadata is not text"),
    "metadata is half a letter": (b'{"__metadata__":{"a":"\\ud800"}}', "metadata is not text"),
    "metadata is a list": (GOOD | {"__metadata__": [1]}, "metadata is not text"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_headers_that_lie(tmp_path, name):
    header, message = BAD[name]
    path = file_of(tmp_path / "a.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.open(path)
    assert "a.safetensors" in str(caught.value)


def test_a_header_longer_than_the_file(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + b'{"w"')
    with pytest.raises(CheckpointError, match="longer than the file or the format allows"):
        checkpoint.open(path)


def test_a_name_that_the_format_keeps_for_itself(tmp_path):
    torch.save({"__metadata__": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="cannot hold this name"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.safetensors", to="safetensors")


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.lists(st.integers(0, 4), max_size=3), max_size=5))
def test_any_names_and_shapes_survive(tmp_path_factory, shapes):
    folder = tmp_path_factory.mktemp("names")
    names = {k for k in shapes if k != "__metadata__" and k.isprintable()}
    tensors = {k: random_bits(shapes[k], torch.int16) for k in names}
    safetensors.torch.save_file(tensors, folder / "a.safetensors")
    checkpoint.convert(folder / "a.safetensors", folder / "b.pt", to="torch")
    checkpoint.convert(folder / "b.pt", folder / "c.safetensors", to="safetensors", verify=True)
    loaded = safetensors.torch.load_file(folder / "c.safetensors")
    assert {k: bytes_of(v) for k, v in loaded.items()} == {k: bytes_of(v) for k, v in tensors.items()}


def test_metadata_are_kept(tmp_path):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    safetensors.torch.save_file({"x": torch.ones(1)}, a, metadata={"by": "me", "rank": "8"})
    safetensors.torch.save_file({"y": torch.ones(1)}, b, metadata={"by": "me", "rank": "4"})
    checkpoint.convert(a, tmp_path / "c.safetensors", to="safetensors", dtype="bfloat16")
    assert checkpoint.open(tmp_path / "c.safetensors").metadata == {"format": "pt", "by": "me", "rank": "8"}
    with pytest.warns(UserWarning, match=r"metadata that differ are left out: rank$"):
        checkpoint.convert([a, b], tmp_path / "d.safetensors", to="safetensors")
    assert checkpoint.open(tmp_path / "d.safetensors").metadata == {"format": "pt", "by": "me"}


def in_parts(folder, *metadata):
    """A folder of safetensors files, one for each of these."""
    folder.mkdir()
    for i, one in enumerate(metadata):
        name = f"model-{i + 1:05}-of-{len(metadata):05}.safetensors"
        safetensors.torch.save_file({f"{i}": torch.ones(1)}, folder / name, metadata=one)
    return folder


def test_metadata_of_parts_are_kept(tmp_path):
    parts = in_parts(tmp_path / "parts", {"by": "me", "scale": "2"}, None, {"by": "me", "format": "pt"})
    weight_map = {f"{i}": f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)}
    expected = {"format": "pt", "by": "me", "scale": "2"}
    for i in range(2):
        checkpoint.convert(parts, tmp_path / f"{i}.safetensors", to="safetensors")
        assert checkpoint.open(tmp_path / f"{i}.safetensors").metadata == expected
        checkpoint.convert(parts, tmp_path / f"{i}", to="safetensors", shard_size=8)
        for file in (tmp_path / f"{i}").glob("*.safetensors"):
            assert checkpoint.open(file).metadata == expected
        index = {"metadata": {"total_size": 12}, "weight_map": weight_map}
        (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint.open(parts).metadata == {"total_size": "12"}


def test_what_an_index_does_not_name_is_said(tmp_path):
    folder = tmp_path / "ck"
    folder.mkdir()
    safetensors.torch.save_file({"a": torch.ones(1), "b": torch.ones(2)}, folder / "1.safetensors")
    torch.save({"b": torch.zeros(2)}, folder / "2.bin")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.bin"}}))
    with pytest.warns(UserWarning, match=r"^not in the index, and left out: 1\.safetensors: b$"):
        opened = checkpoint.open(folder)
    assert opened["b"].numpy().tolist() == [0, 0]


@pytest.mark.parametrize("weight_map", [{"a": "1.safetensors"}, {}])
def test_a_file_that_the_index_of_a_folder_does_not_name_is_said(tmp_path, weight_map):
    """All who open the folder say it, once; a conversion, unless the file is a source of its own."""
    folder, index = tmp_path / "ck", tmp_path / "ck" / "model.safetensors.index.json"
    folder.mkdir()
    safetensors.torch.save_file({"a": torch.ones(1)}, folder / "1.safetensors")
    safetensors.torch.save_file({"b": torch.ones(2)}, folder / "consolidated.safetensors")
    torch.save({"b": torch.zeros(2)}, folder / "optimizer.bin")
    (folder / "again.safetensors").symlink_to("1.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map}))
    left = [*([] if weight_map else ["1.safetensors", "again.safetensors"]), "consolidated.safetensors"]
    said = rf"^not in the index, and left out: {', '.join(left)}$"
    state = {key: torch.zeros(1) for key in weight_map}
    for call in (checkpoint.open, checkpoint.inspect, lambda path: checkpoint.load_into(path, state)):
        with pytest.warns(UserWarning, match=said) as caught:
            call(folder)
        assert len(caught) == 1
    with warnings.catch_warnings(action="error"):
        assert list(checkpoint.open(index)) == list(weight_map)  # the user named it
    if weight_map:
        with pytest.warns(UserWarning, match=r"further sources; left out: consolidated.*, optimizer\.bin$") as caught:
            checkpoint.convert(folder, tmp_path / "a.pt", to="torch")
        assert len(caught) == 1
        (folder / "optimizer.bin").unlink()
        with warnings.catch_warnings(action="error"):
            checkpoint.convert([folder, folder / "consolidated.safetensors"], tmp_path / "b.pt", to="torch")


def test_files_of_tensors_beside_the_checkpoint_of_a_folder_are_named(tmp_path, monkeypatch):
    folder = tmp_path / "ck"
    folder.mkdir()
    safetensors.torch.save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    torch.save({"b": torch.zeros(2)}, folder / "optimizer.bin")
    torch.save({"c": 1}, folder / "scheduler.bin")
    (folder / "config.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"^the folder holds more, .*left out: optimizer\.bin, scheduler\.bin$"):
        checkpoint.convert(folder, tmp_path / "a.pt", to="torch")
    sources = [folder, folder / "optimizer.bin", folder / "scheduler.bin"]
    with warnings.catch_warnings(action="error"):
        checkpoint.convert(sources, tmp_path / "b.pt", to="torch")
    assert list(torch.load(tmp_path / "b.pt")) == ["a", "b", "c"]
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"^the folder holds more"):
        checkpoint.convert("ck", tmp_path / "c.pt", to="torch", progress=lambda *_: monkeypatch.chdir("/"))


def test_an_index_of_pieces_is_refused(tmp_path):
    """A piece would pass for its tensor."""
    said = json.dumps({"w": {"saved_offsets": [2]}})
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "1.safetensors", metadata={"DCP_SHARDING_INFO": said})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "1.safetensors"}}))
    with pytest.raises(CheckpointError, match="do not make it up"):
        checkpoint.open(tmp_path)


def test_metadata_of_parts_that_differ_are_named(tmp_path):
    parts = in_parts(tmp_path / "parts", {"by": "me", "rank": "0"}, {"by": "me", "rank": "1"})
    with pytest.warns(UserWarning, match=r"metadata that differ are left out: rank$") as caught:
        checkpoint.convert(parts, tmp_path / "a.safetensors", to="safetensors")
    assert len(caught) == 1
    assert checkpoint.open(tmp_path / "a.safetensors").metadata == {"format": "pt", "by": "me"}


@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize("shard_size", [None, 2**20])
def test_metadata_that_a_format_has_no_place_for_are_named(tmp_path, to, shard_size):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    safetensors.torch.save_file({"x": torch.ones(1)}, a, metadata={"format": "pt", "quant": "scale=0.1", "by\n": "me"})
    safetensors.torch.save_file({"x": torch.ones(1)}, b, metadata={"format": "pt"})
    options = {"to": to, "shard_size": shard_size, "overwrite": True}
    with pytest.warns(UserWarning, match=r"no place for metadata of the source; left out: ") as caught:
        checkpoint.convert(a, tmp_path / "out", **options)
    (said,) = [str(w.message) for w in caught]
    assert set(said.partition("left out: ")[2].split(", ")) == {"quant", r"'by\n'"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.convert(b, tmp_path / "out", **options)
