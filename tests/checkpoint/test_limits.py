"""What a conversion may use of memory and time."""

import time

import numpy as np
import pytest
import safetensors.numpy
import torch

from tests.checkpoint import sources
from tests.checkpoint.sources import python

MIB = 2**20
OVERHEAD = 128  # MiB over the bare interpreter, with buffers of 64 MiB

PEAK = """
import sys

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

before = peak()
from torchshard import checkpoint
checkpoint.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], max_memory=int(sys.argv[4]), fsync=False)
print(peak() - before)
"""


def peak_of(src, dst, to, memory=64 * MIB):
    """MiB that a conversion took beyond the interpreter."""
    done = python(PEAK, src, dst, to, memory)
    assert done.returncode == 0, done.stderr
    dst.unlink()
    return float(done.stdout)


@pytest.fixture(scope="module")
def quarter(tmp_path_factory):
    """256 MiB in 16 matrices on two ranks, by rows and by columns."""
    folder = tmp_path_factory.mktemp("quarter")
    return [sources.make(folder / str(dim), 2, sources.save_large, 256, dim) for dim in (0, 1)]


@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_memory_of_converting_a_quarter_gib(quarter, tmp_path, to):
    for src in quarter:
        assert peak_of(src, tmp_path / "out", to) < OVERHEAD


def test_memory_follows_the_limit(quarter, tmp_path):
    for src in quarter:
        assert peak_of(src, tmp_path / "out", "safetensors", 4 * MIB) < 64


def test_memory_of_one_large_transposed_tensor(tmp_path):
    """Strided reads go through whole buffers: the most that a conversion uses."""
    torch.save({"w": torch.empty(4096, 8192).t()}, tmp_path / "t.pt")
    assert peak_of(tmp_path / "t.pt", tmp_path / "out", "safetensors") < OVERHEAD


@pytest.mark.full
@pytest.mark.parametrize("dim", [0, 1])
def test_memory_of_converting_a_gib(tmp_path, dim):
    src = sources.make(tmp_path / "ck", 2, sources.save_large, 1024, dim)
    for to in ("torch", "safetensors"):
        assert peak_of(src, tmp_path / "out", to) < OVERHEAD


def test_reading_one_tensor_of_a_large_file_touches_little(tmp_path):
    array = np.zeros((64, MIB), np.uint8)
    safetensors.numpy.save_file({str(i): array for i in range(4)}, tmp_path / "a.safetensors")
    code = PEAK.split("from torchshard")[0] + "from torchshard import checkpoint\n" + (
        "assert checkpoint.open(sys.argv[1])['3'][5:6].shape == (1, 2**20)\nprint(peak() - before)"
    )  # fmt: skip
    done = python(code, tmp_path / "a.safetensors")
    assert float(done.stdout) < 48, done.stderr


def test_many_small_tensors_are_quick(tmp_path):
    """Ten thousand keys: no time or memory that goes with their number in a bad way."""
    torch.save({f"layer.{i}.w": torch.full((4,), float(i)) for i in range(10_000)}, tmp_path / "a.pt")
    start = time.monotonic()
    assert peak_of(tmp_path / "a.pt", tmp_path / "out", "safetensors") < OVERHEAD
    assert time.monotonic() - start < 30
