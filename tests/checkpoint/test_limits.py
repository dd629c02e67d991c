"""What a conversion may use of memory and time."""

import gc
import json
import pickle
import shutil

import pytest
import torch

from tests.checkpoint import sources
from tests.checkpoint.sources import python
from torchshard import checkpoint
from torchshard.checkpoint import zips
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats import torch_file
from torchshard.checkpoint.pickles import inert
from torchshard.checkpoint.pickles.inert import Size
from torchshard.checkpoint.pickles.write import Alike, Pairs, dump

MIB = 2**20

PEAK = """
import sys

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

before = peak()
from torchshard import checkpoint
dtype = sys.argv[5] if sys.argv[5] != "None" else None
checkpoint.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], max_memory=int(sys.argv[4]), dtype=dtype, fsync=False)
print(peak() - before)
"""


def peak_of(src, dst, to, memory=64 * MIB, dtype=None):
    """MiB that a conversion took beyond the interpreter."""
    done = python(PEAK, src, dst, to, memory, dtype)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(dst) if dst.is_dir() else dst.unlink()
    return float(done.stdout)


@pytest.fixture(scope="module")
def quarter(tmp_path_factory):
    """256 MiB in 16 matrices on two ranks, by rows and by columns."""
    folder = tmp_path_factory.mktemp("quarter")
    return [sources.make(folder / str(dim), 2, sources.save_large, 256, dim) for dim in (0, 1)]


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_memory_of_converting_a_quarter_gib(quarter, tmp_path, to):
    for src in quarter:
        assert peak_of(src, tmp_path / "out", to) < 64


def test_memory_of_small_buffers(quarter, tmp_path):
    for src in quarter:
        assert peak_of(src, tmp_path / "out", "safetensors", 4 * MIB) < 48


@pytest.mark.parametrize(("memory", "size"), [(64, 128), (256, 256)])
def test_memory_of_one_large_transposed_tensor(tmp_path, memory, size):
    """Strided reads go through whole buffers: the most that a conversion uses; most of all where values are cast."""
    torch.save({"w": torch.empty(4096, size * MIB // 4096 // 4).t()}, tmp_path / "t.pt")
    for dtype in (None, "bfloat16"):
        assert peak_of(tmp_path / "t.pt", tmp_path / "out", "safetensors", memory * MIB, dtype) < memory


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_transposed_tensor_is_gone_through_a_few_times_only(tmp_path, monkeypatch, dtype):
    """Once a block, which therefore is as large as memory allows, cast or not."""
    torch.save({"w": torch.empty(2048, 4096).t()}, tmp_path / "t.pt")
    read = []
    real = Files.read_into
    monkeypatch.setattr(Files, "read_into", lambda self, *a: read.append(len(a[-1])) or real(self, *a))
    options = {"to": "safetensors", "dtype": dtype, "fsync": False}
    checkpoint.convert(tmp_path / "t.pt", tmp_path / "out", max_memory=256 * MIB, **options)
    assert sum(read) < 20 * 2048 * 4096 * 4


@pytest.mark.full
@pytest.mark.parametrize("memory", [64, 256])
@pytest.mark.parametrize("dim", [0, 1])
def test_memory_of_converting_a_gib(tmp_path, dim, memory):
    src = sources.make(tmp_path / "ck", 2, sources.save_large, 1024, dim)
    for to in ("torch", "safetensors", "dcp"):
        for dtype in (None, "bfloat16"):
            assert peak_of(src, tmp_path / "out", to, memory * MIB, dtype) < memory
    shutil.rmtree(src)


def test_one_tensor_of_four_gib_is_read_without_the_rest(tmp_path):
    """Counted by the system: bytes that the process read. The file is one of holes."""
    header = {
        f"w{i}": {"dtype": "U8", "shape": [2**20, 1024], "data_offsets": [i << 30, (i + 1) << 30]} for i in range(4)
    }
    body = json.dumps(header).encode()
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(len(body).to_bytes(8, "little") + body)
        file.truncate(8 + len(body) + 2**32)
    code = """
import sys
def read():
    with open("/proc/self/io") as io:
        return int(io.readline().split()[1])
import numpy
from torchshard import checkpoint
checkpoint.open(sys.argv[1])["w0"][0:1, 0:1]
before = read()
assert checkpoint.open(sys.argv[1])["w3"][1000:2000].shape == (1000, 1024)
print(read() - before)
"""
    done = python(code, tmp_path / "a.safetensors")
    assert 1000 * 1024 <= float(done.stdout) < 1000 * 1024 + 16384, done.stderr


INSPECT = """
import sys, time
from torchshard.cli import main
sys.argv = ["torchshard", "inspect", sys.argv[1]]
try:
    main()
finally:
    print(time.process_time(), file=sys.stderr)
"""


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_ten_thousand_tensors_are_shown_in_time(many, tmp_path, to):
    """On the CPU, with the interpreter; benchmarks/convert.py holds it to 1.5 s where nothing else runs."""
    checkpoint.convert(many, tmp_path / "out", to=to, fsync=False)
    done = python(INSPECT, tmp_path / "out")
    assert "10000 tensors" in done.stdout.splitlines()[-1]
    assert float(done.stderr) < 3


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "a.pt"
    torch.save({f"layer.{i}.w": torch.full((4,), float(i)) for i in range(10_000)}, path)
    return path


def test_memory_of_many_small_tensors(many, tmp_path):
    assert peak_of(many, tmp_path / "out", "safetensors") < 128  # entries, not buffers


def test_memory_of_many_small_tensors_in_a_folder(many, tmp_path):
    """An archive each, alike but for a checksum, and metadata whose records are made as they are written: 2 KiB."""
    assert peak_of(many, tmp_path / "out", "dcp") < 64


def test_archives_of_tensors_that_are_alike_are_laid_out_once(many, tmp_path, monkeypatch):
    """And each is finished once: what tells one conversion from another does not need them."""
    laid, finished = [], []
    real, finish = zips.lay_out, torch_file.ArchivePlan.finish
    monkeypatch.setattr(zips, "lay_out", lambda sizes: laid.append(sizes) or real(sizes))
    monkeypatch.setattr(torch_file.ArchivePlan, "finish", lambda *args: finished.append(args) or finish(*args))
    torch_file.of_tensor.cache_clear()
    checkpoint.convert(many, tmp_path / "out", to="dcp", select=["layer.1*"], fsync=False)
    assert len(laid) == 1
    assert len(finished) == 1111


def test_what_was_pickled_is_let_go_of():
    """By itself: looking for garbage is put off where there are many entries."""
    tree = {"a": {1, 2}, "b": inert.OrderedDict({"c": (1, b"x")})}
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            dump(tree, lambda entry: None)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_what_is_alike_is_made_anew_for_each_reader_of_it():
    box = Alike([1, {"size": Size((2, 3))}, "text"])
    data = dump({"a": box, "b": box, "c": box, "d": Pairs(lambda: [("e", box)])}, lambda entry: None, shared=False)
    found = pickle.loads(data)
    assert found == dict.fromkeys("abc", box.value) | {"d": {"e": box.value}}
    assert len({id(value) for value in (*map(found.get, "abc"), found["d"]["e"])}) == 4
