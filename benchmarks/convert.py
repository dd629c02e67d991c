"""Converting a checkpoint: torchshard beside `cp` of the same bytes and torch's own converter, in turns in one run.

    python -m benchmarks.convert --gib 1

Each side runs in a process of its own. What a bare `import` of the side's modules takes is measured too and taken off
the time ("net"), as it does not grow with the checkpoint. Page caches are warm for all sides; the destination is
removed between turns. Peak memory is that of the process, less that of a bare interpreter.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import compare

_PEAK = """
import sys, time
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
bare = peak()
start = time.perf_counter()
{imports}
loaded = time.perf_counter()
{work}
print(loaded - start, time.perf_counter() - loaded, peak() - bare)
"""


@dataclass
class Side:
    """One way to do the job: what it imports, what it does, and what was measured (seconds, MiB)."""

    name: str
    imports: str
    work: str
    seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def run(self, src: Path, dst: Path) -> None:
        """One turn."""
        dst.unlink(missing_ok=True)
        code = _PEAK.format(imports=self.imports, work=self.work.format(src=str(src), dst=str(dst)))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        _, seconds, peak = map(float, done.stdout.splitlines()[-1].split())
        self.seconds.append(seconds)
        self.peaks.append(peak)


_OURS = "from torchshard import checkpoint"
_COMMAND = "import torchshard.cli, torchshard.checkpoint, numpy"
_TORCH = "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save"


def _sides() -> list[Side]:
    def ours(to: str, fsync: bool) -> str:
        return f"checkpoint.convert({{src!r}}, {{dst!r}}, to={to!r}, fsync={fsync})"

    command = (
        "sys.argv = ['torchshard', 'convert', {src!r}, {dst!r}, '--to', 'safetensors', '--no-fsync']\n"
        "try:\n    torchshard.cli.main()\nexcept SystemExit as end:\n    assert not end.code"
    )
    return [
        Side("torchshard, to safetensors", _OURS, ours("safetensors", False)),
        Side("torchshard, to torch", _OURS, ours("torch", False)),
        Side("torchshard command, to safetensors", _COMMAND, command),
        Side("torchshard, to safetensors, fsync", _OURS, ours("safetensors", True)),
        Side("torch dcp_to_torch_save", _TORCH, "dcp_to_torch_save({src!r}, {dst!r})"),
    ]


def _copy(src: Path, dst: Path, fsync: bool) -> float:
    """Seconds of `cp` of all files, concatenated size alike."""
    for old in dst.parent.glob("copy*"):
        old.unlink()
    start = time.perf_counter()
    for i, file in enumerate(sorted(src.iterdir())):
        subprocess.run(["cp", file, f"{dst.parent}/copy{i}"], check=True)
    if fsync:
        subprocess.run(["sync", *dst.parent.glob("copy*")], check=True)
    return time.perf_counter() - start


def _write_source(rank: int, world: int, path: str, gib: float, dim: int) -> None:
    """A state dict of 16 MiB matrices on `world` ranks, cut along one dim."""
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    size = [2048, 2048]
    size[dim] //= world
    local = torch.from_numpy(np.random.default_rng(rank).integers(0, 2**31, size, np.int32)).view(torch.float32)
    names = [f"layers.{i}.weight" for i in range(max(1, round(gib * 64)))]
    state = {name: DTensor.from_local(local, mesh, [Shard(dim)], run_check=False) for name in names}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


def _rows(src: Path, cut: str, rounds: int, say: Callable[[str], None]) -> list[tuple[object, ...]]:
    sides = _sides()
    copies: dict[bool, list[float]] = {False: [], True: []}
    dst = src.parent / "out"
    for turn in range(rounds + 1):
        say(f"{cut}: turn {turn} of {rounds}")
        times = {fsync: _copy(src, dst, fsync) for fsync in copies}
        for side in sides:
            side.run(src, dst)
        dst.unlink(missing_ok=True)
        if turn:  # the first turn warms the caches
            for fsync, seconds in times.items():
                copies[fsync].append(seconds)
        else:
            for side in sides:
                side.seconds.clear()
    rows: list[tuple[object, ...]] = [
        (cut, name, statistics.median(copies[fsync]), None, None, None)
        for fsync, name in ((False, "cp"), (True, "cp, fsync"))
    ]
    torch_seconds = sides[-1].seconds
    for side in sides:
        base = copies["fsync" in side.name]
        against_cp = compare(side.name, list(zip(side.seconds, base, strict=True))).ratio
        against_torch = compare(side.name, list(zip(side.seconds, torch_seconds, strict=True))).ratio
        median, peak = statistics.median(side.seconds), max(side.peaks)
        rows.append((cut, side.name, median, against_cp, None if side is sides[-1] else against_torch, peak))
    return rows


def main(gib: float = 1.0, rounds: int = 5, ranks: int = 2, say: Callable[[str], None] = lambda line: None) -> str:
    """The table as text.

    Args:
        gib: size of the checkpoint.
        rounds: turns that each side takes, after one to warm up.
        ranks: that wrote the checkpoint.
        say: told what is going on.
    """
    from tests.ranks import run_ranks

    rows = []
    for cut, dim in (("rows", 0), ("columns", 1)):
        with tempfile.TemporaryDirectory(prefix="torchshard-") as folder:
            src = Path(folder) / "ck"
            say(f"{cut}: writing {gib:g} GiB on {ranks} ranks")
            run_ranks(ranks, _write_source, str(src), gib, dim, timeout=600)
            rows += _rows(src, f"{gib:g} GiB, {cut}", rounds, say)
    headers = ["checkpoint", "side", "s net", "to cp", "to torch", "peak MiB"]
    formats = (None, None, ".2f", ".2f", ".2f", ".0f")
    return str(tabulate(rows, headers, tablefmt="github", floatfmt=formats))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(main(options.gib, options.rounds, options.ranks, lambda line: print(line, file=sys.stderr)))
