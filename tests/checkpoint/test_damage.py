"""Damaged, incomplete and hostile checkpoints: one sentence with file and field, and never anything but an error."""

import functools
import io
import os
import pickle
import shutil
import time
import warnings
import zipfile
import zlib
from contextlib import contextmanager

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from tests.checkpoint import sources
from tests.ranks import run_ranks
from torchshard import checkpoint
from torchshard.checkpoint.entries import Extent, Piece, Place, TensorEntry
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats.out import whole_slot
from torchshard.checkpoint.moving.runner import Budget, Move, comparable, move
from torchshard.checkpoint.zips import around, lay_out
from torchshard.errors import CheckpointError
from torchshard.keys import KeyRules, transpose
from torchshard.layout import Box


@pytest.fixture
def copy(dcp_two, tmp_path):
    """A folder of its own to damage."""
    shutil.copytree(dcp_two, tmp_path / "ck")
    return tmp_path / "ck"


def change(folder, edit):
    """Edit the metadata as Python objects, and write it back."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))


def info(metadata, key):
    """The storage entry of the first box of a key."""
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def fails(path, message, out=None):
    """Opening or converting fails with one sentence that names the file; nothing is left behind."""
    before = set(os.listdir(path.parent))
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.convert(path, path.parent / "out.pt", to="torch")
    assert set(os.listdir(path.parent)) == before
    text = str(caught.value)
    assert str(path) in text
    assert len(text) < 1000
    return text


def test_a_missing_file(copy):
    (copy / "__1_0.distcp").unlink()
    assert "__1_0.distcp" in fails(copy, "file does not exist")


def test_a_file_cut_off(copy):
    file = copy / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    assert "__0_0.distcp" in fails(copy, "A file is cut off")


def test_an_empty_metadata_file(copy):
    (copy / ".metadata").write_bytes(b"")
    fails(copy, "pickle is damaged")


def test_metadata_of_something_else(copy):
    (copy / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    fails(copy, "The field metadata is not as torch writes it")


class Evil:
    def __reduce__(self):
        return os.system, ("exit 1",)


def test_hostile_metadata(copy):
    change(copy, lambda metadata: metadata.planner_data.__setitem__("plain", Evil()))
    assert ".metadata" in fails(copy, r"posix\.system, which is not plain data and is never run")
    (copy / ".metadata").write_bytes(pickle.dumps(Evil()))
    fails(copy, r"posix\.system")


def test_a_hostile_tensor(copy):
    """The archive of one box holds a pickle that calls something."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", b"cposix\nsystem\n(Vexit 1\ntR.")
        archive.writestr("archive/data/0", bytes(160))
    body = data.getvalue()
    (copy / "evil.distcp").write_bytes(body)

    def edit(metadata):
        entry = info(metadata, "model.rows")
        entry.relative_path, entry.offset, entry.length = "evil.distcp", 0, len(body)

    change(copy, edit)
    text = fails(copy, r"posix\.system")
    assert "evil.distcp: model.rows" in text


ESCAPES = ["../outside", "/etc/passwd", "a/../../outside", "..", "", "link", "nul\0byte", "folder", "\ud800"]


@pytest.mark.parametrize("name", ESCAPES)
def test_paths_never_leave_the_folder(copy, name):
    (copy.parent / "outside").write_bytes(bytes(10_000))
    (copy / "link").symlink_to(copy.parent / "outside")
    (copy / "folder").mkdir()

    def edit(metadata):
        entry = info(metadata, "model.rows")
        entry.relative_path, entry.offset = name, 0

    change(copy, edit)
    outside = "names a file outside of its folder" if name.isprintable() else "names a file by what is not text"
    fails(copy, outside if name != "folder" else "not a regular file")


def test_a_pipe_is_not_waited_for(copy):
    os.mkfifo(copy / "pipe")

    def edit(metadata):
        info(metadata, "model.rows").relative_path = "pipe"

    change(copy, edit)
    fails(copy, "not a regular file")


EDITS = {
    "offset beyond the file": (lambda m: setattr(info(m, "model.rows"), "offset", 10**9), "A file is cut off"),
    "offset beyond the world": (lambda m: setattr(info(m, "model.rows"), "offset", 2**80), "not a list of sizes"),
    "negative offset": (lambda m: setattr(info(m, "model.rows"), "offset", -1), "not a list of sizes"),
    "length of text": (lambda m: setattr(info(m, "model.rows"), "length", "x"), "not a list of sizes"),
    "length too short": (lambda m: setattr(info(m, "model.rows"), "length", 20), "larger than the archive"),
    "length a little short": (lambda m: setattr(info(m, "model.rows"), "length", 1500), "damaged or cut off"),
    "offset shifted": (lambda m: setattr(info(m, "model.rows"), "offset", 64), "damaged or cut off|something else"),
    "path is a number": (lambda m: setattr(info(m, "model.rows"), "relative_path", 3), "field relative_path"),
    "no storage data": (lambda m: setattr(m, "storage_data", None), "field storage_data"),
    "one is not stored": (lambda m: m.storage_data.pop(MetadataIndex("model.rows", [0, 0])), "where a box is stored"),
    "keys are numbers": (lambda m: m.state_dict_metadata.__setitem__(7, BytesStorageMetadata()), "state_dict_metadata"),
    "entry is None": (lambda m: m.state_dict_metadata.__setitem__("x", None), "state_dict_metadata"),
    "object is not stored": (lambda m: m.state_dict_metadata.__setitem__("x", BytesStorageMetadata()), "where a box"),
    "tensor as object": (
        lambda m: m.state_dict_metadata.__setitem__("model.rows", BytesStorageMetadata()),
        "where a box is stored",
    ),
    "transformed": (
        lambda m: setattr(info(m, "model.rows"), "transform_descriptors", ["stream.zstd/1"]),
        r"stored transformed[^$]*stream\.zstd/1",
    ),
    "a hole": (lambda m: m.state_dict_metadata["model.rows"].chunks.pop(), "Boxes are missing"),
    "overlap": (
        lambda m: setattr(m.state_dict_metadata["model.rows"], "size", torch.Size([6, 10])),
        "lies outside of its tensor",
    ),
    "too large": (
        lambda m: setattr(m.state_dict_metadata["model.rows"], "size", torch.Size([2**40, 2**22])),
        "Boxes are missing",
    ),
    "other dims": (lambda m: setattr(m.state_dict_metadata["model.rows"], "size", torch.Size([70])), "number of dims"),
    "other type": (
        lambda m: setattr(m.state_dict_metadata["model.rows"].properties, "dtype", torch.int32),
        "holds something else than the metadata says",
    ),
    "wider type": (
        lambda m: setattr(m.state_dict_metadata["model.bf16"].properties, "dtype", torch.complex128),
        "holds something else than the metadata says",
    ),
    "unread type": (
        lambda m: setattr(m.state_dict_metadata["model.rows"].properties, "dtype", torch.bits8),
        r"torch\.bits8",
    ),
    "sparse": (
        lambda m: setattr(m.state_dict_metadata["model.rows"].properties, "layout", torch.sparse_coo),
        "not dense",
    ),
    "nesting contradicts": (lambda m: m.planner_data.__setitem__("plain", ("model",)), "contradict each other"),
    "nesting through a tensor": (lambda m: m.planner_data.__setitem__("plain", ("model", "rows", "x")), "contradict"),
    "a list bomb": (lambda m: m.planner_data.__setitem__("plain", ("list", 10**15)), "contradict"),
    "negative place": (lambda m: m.planner_data.__setitem__("plain", ("list", -1)), "contradict"),
    "no place": (lambda m: m.planner_data.__setitem__("plain", ()), "contradict"),
    "place is None": (lambda m: m.planner_data.__setitem__("plain", (None,)), "field planner_data"),
    "deep place": (lambda m: m.planner_data.__setitem__("plain", ("x",) * 5000), "contradict"),
    "planner data is text": (lambda m: setattr(m, "planner_data", "x"), "field planner_data"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_metadata_that_lies(copy, name):
    edit, message = EDITS[name]
    change(copy, edit)
    fails(copy, message)


def test_boxes_that_overlap(copy):
    def edit(metadata):
        _, second = metadata.state_dict_metadata["model.rows"].chunks
        second.offsets = torch.Size([3, 0])
        stored = metadata.storage_data
        stored[MetadataIndex("model.rows", [3, 0])] = stored[MetadataIndex("model.rows", [4, 0])]

    change(copy, edit)
    fails(copy, "Two boxes hold the same elements")


def flip(ck, key, piece=0):
    """Change one bit of a tensor's data in the file, whose name is given back."""
    with checkpoint.open(ck) as opened:
        place = opened[key].pieces[piece].place()
    file = place.extent.files.root / place.extent.file
    body = bytearray(file.read_bytes())
    body[place.start + 5] ^= 4
    file.write_bytes(body)
    return file


ROUTES = {
    "rows": ("model.rows", {"to": "torch"}),
    "columns": ("model.columns", {"to": "torch"}),
    "replicated": ("model.replicated", {"to": "torch"}),
    "not of floats": ("model.middle", {"to": "torch"}),
    "in an optimizer": ("optimizer.state.rows.exp_avg", {"to": "torch"}),
    "to safetensors": ("model.rows", {"to": "safetensors", "select": ["model.*"]}),
    "columns to safetensors": ("model.columns", {"to": "safetensors", "select": ["model.*"]}),
    "to dcp": ("model.rows", {"to": "dcp"}),
    "to dcp for a mesh": ("model.rows", {"to": "dcp", "mesh": (3,), "placements": {"model.rows": "S(1)"}}),
    "to parts": ("model.rows", {"to": "torch", "shard_size": 200}),
    "cast": ("model.rows", {"to": "torch", "dtype": "bfloat16"}),
    "transposed": ("model.rows", {"to": "torch", "rename": KeyRules([transpose("model.rows")])}),
    "alone": ("model.rows", {"to": "torch", "select": ["model.rows"]}),
    "read again": ("model.rows", {"to": "torch", "verify": True}),
}


@pytest.mark.parametrize("piece", [0, 1])
@pytest.mark.parametrize("route", ROUTES)
def test_a_flipped_byte_in_the_data(copy, route, piece):
    key, options = ROUTES[route]
    file = flip(copy, key, piece if "replicated" not in route else 0)
    for resume in (False, True, True):  # a journal of what was read does not make it right
        with pytest.raises(CheckpointError, match="data do not match its checksum") as caught:
            checkpoint.convert(copy, copy.parent / "out", resume=resume, **options)
        assert f"{file}, bytes" in str(caught.value)
        assert str(caught.value).endswith(f": {key}")
        assert not (copy.parent / "out").exists()


def stop_halfway(done, total):
    if done > total / 2:
        raise InterruptedError


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_columns_and_casts_in_many_blocks(tmp_path, dtype, damaged):
    """Pieces whose checksums come together from rows of many blocks, some of them read before an interruption."""
    w = torch.arange(512 * 600, dtype=torch.float32).reshape(512, 600)
    torch.save({"w": w}, tmp_path / "a.pt")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "cut", to="dcp", mesh=(3,), placements={"w": "S(1)"})
    if damaged:
        flip(tmp_path / "cut", "w", 1)
    out = tmp_path / "out.pt"
    convert = functools.partial(
        checkpoint.convert, tmp_path / "cut", out, to="torch", dtype=dtype, max_memory=2**20, resume=True
    )

    with pytest.raises(InterruptedError):
        convert(progress=stop_halfway)
    if damaged:
        with pytest.raises(CheckpointError, match=r"__1_0\.distcp, bytes[^$]*: w$"):
            convert()
    else:
        convert()
        assert torch.equal(torch.load(out)["w"], w.to(getattr(torch, dtype)))


def test_resumed_with_verify_after_an_interruption_without(tmp_path):
    state = {f"w{i}": torch.arange(2**16, dtype=torch.int32) + i for i in range(8)}
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")

    convert = functools.partial(
        checkpoint.convert, tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="safetensors", resume=True
    )
    with pytest.raises(InterruptedError):
        convert(progress=stop_halfway)
    convert(verify=True)
    assert all(torch.equal(v, state[k]) for k, v in safetensors.torch.load_file(tmp_path / "b.safetensors").items())


@pytest.mark.parametrize("cut", [0, 1])
def test_checksums_of_pieces_in_order_and_transposed(tmp_path, cut):
    """Some pieces are compared as they are read, others are rearranged; the sum of the tensor is right with both."""
    full = np.arange(300 * 200, dtype=np.int32).reshape(300, 200)
    pieces, body = [], b""
    for i, part in enumerate(np.split(full, 4, axis=cut)):
        data = (part if i % 2 else part.T).tobytes()
        files = Files(tmp_path)
        extent = Extent(files, "a", len(body), len(data), zlib.crc32(data))
        stride = (part.shape[1], 1) if i % 2 else (1, part.shape[0])
        place = Place(extent, len(body), stride)
        offset = (0, i * part.shape[1]) if cut else (i * part.shape[0], 0)
        pieces.append(Piece(Box(offset, part.shape), lambda place=place: place))
        body += data
    (tmp_path / "a").write_bytes(body)
    entry = TensorEntry("int32", full.shape, tuple(pieces), "w")
    slot = whole_slot(entry, 0)
    (crc,) = move([Move(None, slot, comparable(slot))], None, Budget(2**20))
    assert crc == zlib.crc32(full.tobytes())
    for at in (len(body) // 4 + 9, len(body) - 9):  # of the pieces in order
        damaged = bytearray(body)
        damaged[at] ^= 1
        (tmp_path / "a").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="do not match its checksum"):
            move([Move(None, slot, comparable(slot))], None, Budget(2**20))


def test_a_flipped_byte_in_a_torch_file(tmp_path):
    matrix = torch.arange(24.0).reshape(4, 6)
    state = {"w": matrix, "view": matrix.t()[1:3], "b": torch.ones(3)}
    for key in state:
        torch.save(state, tmp_path / "a.pt")
        flip(tmp_path / "a.pt", key)
        fails(tmp_path / "a.pt", r"data do not match its checksum[^$]*a\.pt, bytes")
        rest = ["b"] if key != "b" else ["w", "view"]  # what is not read is not looked at
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "rest.pt", to="torch", select=rest)
        (tmp_path / "rest.pt").unlink()


def test_a_flipped_byte_among_the_objects(tmp_path):
    """In a pickle it would be another number, or another key."""
    torch.save({"w": torch.ones(3), "lr": 0.5}, tmp_path / "a.pt")
    body = (tmp_path / "a.pt").read_bytes()
    half = pickle.dumps(0.5, 2)[2:-1]
    assert body.count(half) == 1
    (tmp_path / "a.pt").write_bytes(body.replace(half, half[:1] + pickle.dumps(0.75, 2)[3:-1]))
    assert "data.pkl does not match its checksum" in fails(tmp_path / "a.pt", "damaged or cut off")


@contextmanager
def unsummed():
    """torch stores no checksums."""
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


def test_checksums_that_torch_did_not_store(tmp_path):
    with unsummed():
        torch.save({"w": torch.arange(5.0), "lr": 0.5}, tmp_path / "a.pt")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", verify=True)
    assert torch.load(tmp_path / "b.pt")["w"].tolist() == [0, 1, 2, 3, 4]


def test_a_file_that_shrinks_while_it_is_read(copy, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        checkpoint.convert(copy, copy.parent / "out.pt", to="torch")


@pytest.mark.parametrize("how", ["in place", "another file"])
def test_a_file_that_is_written_while_it_is_read(tmp_path, how):
    """Otherwise some tensors would be of one checkpoint, and some of the next."""
    path, out = tmp_path / "a.safetensors", tmp_path / "b.pt"
    safetensors.torch.save_file({f"w{i}": torch.zeros(2**18) for i in range(4)}, path)

    def written(done, total):
        safetensors.torch.save_file({f"w{i}": torch.ones(2**18) for i in range(4)}, tmp_path / "new")
        if how == "another file":
            os.replace(tmp_path / "new", path)
        else:
            path.write_bytes((tmp_path / "new").read_bytes())
            (tmp_path / "new").unlink()

    with pytest.raises(CheckpointError, match=r"written to while it was read(?s:.*)a\.safetensors"):
        checkpoint.convert(path, out, to="torch", fsync=False, progress=written)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    with pytest.raises(CheckpointError, match="written to while it was read"):
        checkpoint.load_into(path, {"w0": torch.zeros(2**18)}, progress=written)


def test_a_disk_that_fails(copy, monkeypatch):
    def fail(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"cannot be read: Input/output error"):
        checkpoint.open(copy)


@pytest.mark.parametrize("name", [".metadata", "a.pt", "old.pt", "a.safetensors", "x.safetensors.index.json"])
def test_a_file_of_holes_that_claims_any_size(tmp_path, name):
    """Little on the disk: what it says of its size is checked before there is memory for it."""
    size, path = 2**36, tmp_path / name
    head = {"a.pt": b"", "old.pt": LEGACY + b"\x80\x02]", "a.safetensors": (2**35).to_bytes(8, "little") + b"{"}
    with path.open("wb") as file:
        if name == "a.pt":
            records = lay_out([("data.pkl", size)])
            for at, body in around(records, [None], [0]):
                file.seek(at)
                file.write(body)
        else:
            file.write(head.get(name, b""))
            file.truncate(size)
    before = peak()
    with pytest.raises(CheckpointError, match=r"out of all proportion|is damaged|longer than the file"):
        checkpoint.open(tmp_path if name == ".metadata" else path)
    assert peak() - before < 64


def test_very_many_boxes_of_no_order(copy):
    def edit(metadata):
        chunks = [ChunkStorageMetadata(torch.Size([2 * i, 0]), torch.Size([1, 40_000])) for i in range(10_000)]
        chunks += [ChunkStorageMetadata(torch.Size([1, i]), torch.Size([40_000, 1])) for i in range(10_000)]
        metadata.state_dict_metadata["model.rows"].chunks = chunks
        metadata.state_dict_metadata["model.rows"].size = torch.Size([40_001, 40_000])
        where = info(metadata, "model.rows")
        where.length = 2**20
        os.truncate(copy / where.relative_path, 2**21)
        metadata.storage_data |= {MetadataIndex("model.rows", chunk.offsets): where for chunk in chunks}

    change(copy, edit)
    start = time.process_time()
    fails(copy, "some are missing, or hold the same elements")
    assert time.process_time() - start < 5


def test_a_folder_that_cannot_be_looked_into(tmp_path, monkeypatch):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "hidden").mkdir()
    real = os.stat

    def refuse(path, *args, **kwargs):
        if "closed" in str(path) or str(path).endswith(".metadata"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)
    for work in (
        lambda: checkpoint.open(tmp_path / "closed" / "a.pt"),
        lambda: checkpoint.open(tmp_path / "hidden"),
        lambda: checkpoint.convert(tmp_path / "a.pt", tmp_path / "closed" / "b.pt", to="torch"),
        lambda: checkpoint.convert(tmp_path / "a.pt", tmp_path / "closed" / "b.pt", to="torch", resume=True),
    ):
        with pytest.raises(CheckpointError, match="Permission denied"):
            work()


def test_a_folder_without_metadata_says_so(copy):
    (copy / ".metadata").unlink()
    fails(copy, "no checkpoint that is read here")


# --- mutations of valid files ------------------------------------------------------------------------------------


def explore(path, out):
    """Everything that reads: what comes out may be wrong values, or an error that names the file; nothing else."""
    with warnings.catch_warnings():
        text = _explore(path, out)
    assert not text or str(path) in text or "safetensors cannot hold" in text, text


def _explore(path, out):
    try:
        warnings.simplefilter("ignore")
        with checkpoint.open(path) as ck:
            for entry in ck.values():
                if isinstance(entry, checkpoint.TensorEntry) and entry.nbytes < 2**20:
                    entry.numpy()
            str(checkpoint.inspect(path))
        checkpoint.convert(path, out, to="torch", overwrite=True, verify=True, fsync=False)
        checkpoint.convert(path, out, to="safetensors", overwrite=True, fsync=False)
        checkpoint.convert(
            path, f"{out}.dcp", to="dcp", overwrite=True, fsync=False, mesh=(2,), placements={"w": "S(0)"}
        )
    except CheckpointError as error:
        return str(error)
    return ""


@st.composite
def mutations(draw, size):
    """Where to write which bytes, and where to cut."""
    edits = draw(st.lists(st.tuples(st.integers(0, size - 1), st.binary(min_size=1, max_size=4)), max_size=3))
    cut = draw(st.one_of(st.just(size), st.integers(0, size)))
    return edits, cut


def mutated(body, change):
    edits, cut = change
    out = bytearray(body)
    for at, data in edits:
        out[at : at + len(data)] = data
    return bytes(out[:cut])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Small valid checkpoints of each format: a dcp folder's parts, a torch file, a safetensors file."""
    folder = tmp_path_factory.mktemp("small")
    state = {"w": torch.arange(6.0).reshape(2, 3), "lr": 0.5, "n": {"m": [torch.ones(1)]}}
    sources.make(folder / "dcp", 1, save_unsummed, state)
    state = {"w": torch.arange(6.0).reshape(2, 3).t(), "s": "text", "p": (1, [torch.ones(2)])}
    with unsummed():
        torch.save(state, folder / "a.pt")
    checkpoint.convert(folder / "dcp", folder / "b.pt", to="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.convert(folder / "a.pt", folder / "c.safetensors", to="safetensors")
    torch.save({"w": torch.arange(6.0).reshape(2, 3), "n": 1}, folder / "old.pt", _use_new_zipfile_serialization=False)
    run_ranks(1, save_distributed, str(folder))
    checkpoint.convert(folder / "a.pt", folder / "parts", to="torch", shard_size=20)
    checkpoint.convert(folder / "a.pt", folder / "cut", to="dcp", mesh=(2,), placements={"w": "S(0)"})
    return folder


def save_distributed(rank, world, folder):
    """Distributed tensors on one rank, whole therefore, in a torch.save file."""
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    shard = LocalShard.from_tensor_and_offsets(torch.ones(2, 2), [0, 0], 0)
    w = distribute_tensor(torch.arange(6.0).reshape(2, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    with unsummed():
        torch.save({"w": w, "st": init_from_local_shards([shard], 2, 2)}, f"{folder}/distributed.pt")


def save_unsummed(rank, world, path, state):
    """Checksums would stop most mutations before these can do harm."""
    with unsummed():
        sources.save(rank, world, path, state)


def peak():
    """MiB that this process has had at most."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def fuzz(examples, small, tmp_path, name):
    body = (small / name).read_bytes()
    shutil.copytree(small, tmp_path / "in")
    target = tmp_path / "in" / name.split("/")[0]

    @settings(max_examples=examples, deadline=None, database=None)
    @given(mutations(len(body)))
    def check(mutation):
        (tmp_path / "in" / name).write_bytes(mutated(body, mutation))
        start = time.process_time()
        explore(target, tmp_path / "out")
        assert time.process_time() - start < 5

    before = peak()
    check()
    assert peak() - before < 512
    assert set(os.listdir(tmp_path)) <= {"in", "out", "out.dcp"}


PARTS = [
    "a.pt", "b.pt", "c.safetensors", "dcp/.metadata", "dcp/__0_0.distcp", "old.pt", "distributed.pt",
    "parts/pytorch_model.bin.index.json", "cut/.metadata",
]  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_mutations_of_valid_files(small, tmp_path, name):
    fuzz(40, small, tmp_path, name)


@pytest.mark.full
@pytest.mark.parametrize("name", PARTS)
def test_many_mutations_of_valid_files(small, tmp_path, name):
    fuzz(1200, small, tmp_path, name)


LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
HEADS = [b"", b"PK\3\4", b"\x10" + bytes(7) + b"{", b"\x80\x02", LEGACY]


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.full)])
def test_random_files(tmp_path, count):
    @settings(max_examples=count, deadline=None, database=None)
    @given(body=st.binary(max_size=200), head=st.sampled_from(HEADS))
    def check(body, head):
        (tmp_path / "x").write_bytes(head + body)
        start = time.process_time()
        explore(tmp_path / "x", tmp_path / "out")
        assert time.process_time() - start < 5

    before = peak()
    check()
    assert peak() - before < 512
