"""Converting a checkpoint of two ranks: torchshard, torch's own converter and a plain copy, in turns.

    python -m benchmarks.convert --gib 1

Each turn is a process of its own, with warm page caches and the destination removed before; nothing is flushed to the
disk, as torch's converter does not either. "work" is the conversion without the imports, which do not grow with the
checkpoint; "process" has them. Peak memory is that of the process (VmHWM) less that of the bare interpreter. (ru_maxrss
would not do: it begins at the peak of the process that started this one.)
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import Comparison, compare

_CODE = """
import sys, time
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
src, dst = sys.argv[1:]
bare = peak()
{imports}
start = time.perf_counter()
{work}
print(time.perf_counter() - start, peak() - bare)
"""
_OURS = "from torchshard import checkpoint"
_COPY = """
with open(dst, "wb") as out:
    for file in pathlib.Path(src).iterdir():
        shutil.copyfileobj(file.open("rb"), out, 2**20)
"""
_TORCH = "dcp_to_torch_save"
# name -> what it imports, what it does
_CONVERTERS = {
    "torchshard, to torch": (_OURS, "checkpoint.convert(src, dst, to='torch', fsync=False)"),
    "torchshard, to safetensors": (_OURS, "checkpoint.convert(src, dst, to='safetensors', fsync=False)"),
    "plain copy": ("import pathlib, shutil", _COPY),
    _TORCH: (f"from torch.distributed.checkpoint.format_utils import {_TORCH}", f"{_TORCH}(src, dst)"),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One conversion: seconds of the work and of the process, MiB at the peak."""

    work: float
    process: float
    peak: float


@dataclass(frozen=True, slots=True)
class Row:
    """All turns of one converter on one checkpoint; `against_torch` compares the work, round by round."""

    checkpoint: str
    converter: str
    turns: Sequence[Turn]
    against_torch: Comparison


def _turn(converter: str, src: Path, dst: Path) -> Turn:
    imports, work = _CONVERTERS[converter]
    dst.unlink(missing_ok=True)
    command = [sys.executable, "-c", _CODE.format(imports=imports, work=work), str(src), str(dst)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    work_seconds, peak = map(float, done.stdout.split())
    return Turn(work_seconds, seconds, peak)


def _write_source(rank: int, world: int, path: str, gib: float, dim: int) -> None:
    """A state dict of 16 MiB matrices on `world` ranks, cut along one dim."""
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    import torchshard

    mesh = init_device_mesh("cpu", (world,))
    size = [2048, 2048]
    size[dim] //= world
    local = torch.from_numpy(np.random.default_rng(rank).integers(0, 2**31, size, np.int32)).view(torch.float32)
    matrix = torchshard.DTensor.from_local(local, mesh, [torchshard.Shard(dim)])
    state = {f"layers.{i}.weight": matrix for i in range(max(1, round(gib * 64)))}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


def measured(gib: float = 1.0, rounds: int = 5, say: Callable[[str], None] = lambda line: None) -> list[Row]:
    """One row for each converter, for a checkpoint cut by rows and one cut by columns.

    Args:
        gib: size of the checkpoint.
        rounds: turns that each converter takes, after one to warm up.
        say: told what is going on.
    """
    from tests.ranks import run_ranks

    rows = []
    for cut, dim in (("rows", 0), ("columns", 1)):
        with tempfile.TemporaryDirectory(prefix="torchshard-") as folder:
            src, dst = Path(folder) / "ck", Path(folder) / "out"
            name = f"{gib:g} GiB by {cut}"
            say(f"{name}: writing")
            run_ranks(2, _write_source, str(src), gib, dim, timeout=600)
            turns: dict[str, list[Turn]] = {converter: [] for converter in _CONVERTERS}
            for i in range(rounds + 1):
                say(f"{name}: turn {i} of {rounds}")
                for converter, its in turns.items():
                    its.append(_turn(converter, src, dst))
            theirs = [turn.work for turn in turns[_TORCH][1:]]
            for converter, its in turns.items():
                pairs = list(zip([turn.work for turn in its[1:]], theirs, strict=True))
                rows.append(Row(name, converter, its[1:], compare(converter, pairs)))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    shown = [
        (
            row.checkpoint,
            row.converter,
            row.against_torch.ours,
            statistics.median([turn.process for turn in row.turns]),
            row.against_torch.ratio,
            f"{row.against_torch.low:.2f} .. {row.against_torch.high:.2f}",
            max(turn.peak for turn in row.turns),
        )
        for row in rows
    ]
    headers = ["checkpoint", "converter", "work s", "process s", "ratio to torch", "95 % of the ratio", "peak MiB"]
    formats = (None, None, ".2f", ".2f", ".2f", None, ".0f")
    return str(tabulate(shown, headers, tablefmt="github", floatfmt=formats))


def main(gib: float = 1.0, rounds: int = 5, say: Callable[[str], None] = lambda line: None) -> str:
    """The table; arguments as those of `measured`."""
    return table(measured(gib, rounds, say))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each converter")
    options = parser.parse_args()
    print(main(options.gib, options.rounds, lambda line: print(line, file=sys.stderr)))
