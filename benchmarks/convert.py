"""Converting checkpoints: torchshard, cp of the same bytes, and torch's own routes, in turns.

    python -m benchmarks.convert --gib 1

Each turn is a process of its own, with warm page caches and the destination removed before; nothing is flushed to the
disk, as none of the others does either. Seconds are those of the work, without start and imports of the interpreter.
Peak memory is that of the process (VmHWM) less that of the bare interpreter. (ru_maxrss would not do: it begins at the
peak of the process that started this one.) At the end comes one table of the worst of all and of what each may be.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import Comparison, compare, cpu_seconds

_CODE = """
import sys, time
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
src, dst = sys.argv[1:]
bare = peak()
{imports}
start, cpu = time.perf_counter(), time.process_time()
{work}
print(time.perf_counter() - start, time.process_time() - cpu, peak() - bare)
"""
_OURS = "from torchshard.checkpoint import convert"
_CP = "cp"
_DCP_TO_TORCH = "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save"
_TORCH_TO_DCP = "from torch.distributed.checkpoint.format_utils import torch_save_to_dcp"
_HF = """
import os, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageWriter
"""
_HF_WORK = """
metadata = FileSystemReader(src).read_metadata().state_dict_metadata
state = {key: torch.empty(m.size, dtype=m.properties.dtype) for key, m in metadata.items()}
dcp.load(state, checkpoint_id=src, no_dist=True)
dcp.save(state, storage_writer=HuggingFaceStorageWriter(dst), no_dist=True)
"""
_SAVE_FILE = "import torch, safetensors.torch"
_SAVE_FILE_WORK = "safetensors.torch.save_file(torch.load(src, mmap=True), dst)"
# source -> destination -> what other routes there are: name, imports, work
_ROUTES: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("dcp by rows", "torch"): [("dcp_to_torch_save", _DCP_TO_TORCH, "dcp_to_torch_save(src, dst)")],
    ("dcp by rows", "safetensors"): [("load, Hugging Face writer", _HF, _HF_WORK)],
    ("dcp by rows", "dcp"): [],
    ("dcp by columns", "torch"): [("dcp_to_torch_save", _DCP_TO_TORCH, "dcp_to_torch_save(src, dst)")],
    ("dcp by columns", "safetensors"): [("load, Hugging Face writer", _HF, _HF_WORK)],
    ("dcp by columns", "dcp"): [],
    ("torch", "torch"): [],
    ("torch", "safetensors"): [("safetensors save_file", _SAVE_FILE, _SAVE_FILE_WORK)],
    ("torch", "dcp"): [("torch_save_to_dcp", _TORCH_TO_DCP, "torch_save_to_dcp(src, dst)")],
    ("safetensors", "torch"): [],
    ("safetensors", "safetensors"): [],
    ("safetensors", "dcp"): [],
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One conversion: seconds of the work, of them on the CPU (of all threads), MiB at the peak."""

    work: float
    cpu: float
    peak: float


@dataclass(frozen=True, slots=True)
class Row:
    """All turns of one route between two formats; `against_cp` compares the work, round by round."""

    source: str
    to: str
    route: str
    turns: Sequence[Turn]
    against_cp: Comparison


def _remove(path: Path) -> None:
    """Make room for the next turn; what the last one has left for the disk to be written is not to be paid by it."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    os.sync()


def _turn(imports: str, work: str, src: Path, dst: Path) -> Turn:
    _remove(dst)
    command = [sys.executable, "-c", _CODE.format(imports=imports, work=work), str(src), str(dst)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Turn(*map(float, done.stdout.split()))


def _copied(src: Path, dst: Path) -> Turn:
    _remove(dst)
    start, before = time.perf_counter(), cpu_seconds()
    subprocess.run(["cp", "-r", str(src), str(dst)], check=True)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - before
    return Turn(seconds, cpu, 0)


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


def _sources(folder: Path, gib: float) -> dict[str, Path]:
    """A checkpoint of each kind."""
    from tests.ranks import run_ranks
    from torchshard import checkpoint

    made = {"dcp by rows": folder / "rows", "dcp by columns": folder / "columns"}
    for dim, path in enumerate(made.values()):
        run_ranks(2, _write_source, str(path), gib, dim, timeout=600)
    made |= {"torch": folder / "a.pt", "safetensors": folder / "a.safetensors"}
    for to in ("torch", "safetensors"):
        checkpoint.convert(made["dcp by rows"], made[to], to=to, fsync=False)
    return made


def measured(
    gib: float = 1.0, rounds: int = 5, say: Callable[[str], None] = lambda line: None, others: bool = True
) -> list[Row]:
    """One row for each route between two formats.

    Args:
        gib: size of the checkpoint.
        rounds: turns that each route takes, after one to warm up.
        say: told what is going on.
        others: whether torch's routes take part.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="torchshard-") as name:
        folder = Path(name)
        say(f"writing sources of {gib:g} GiB in {folder}")
        sources = _sources(folder, gib)
        for (source, to), more in _ROUTES.items():
            say(f"{source} to {to}")
            src, dst = sources[source], folder / "out"
            ours = f"convert(src, dst, to={to!r}, fsync=False)"
            routes = [("torchshard", _OURS, ours), *(more if others else [])]
            turns: dict[str, list[Turn]] = {_CP: [], **{route: [] for route, _, _ in routes}}
            for _ in range(rounds + 1):
                turns[_CP].append(_copied(src, dst))
                for route, imports, work in routes:
                    turns[route].append(_turn(imports, work, src, dst))
            _remove(dst)
            copies = [turn.work for turn in turns[_CP][1:]]
            for route, its in turns.items():
                pairs = list(zip([turn.work for turn in its[1:]], copies, strict=True))
                rows.append(Row(source, to, route, its[1:], compare(route, pairs)))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    shown = [
        (
            row.source,
            row.to,
            row.route,
            statistics.median([turn.work for turn in row.turns]),
            row.against_cp.ratio,
            f"{row.against_cp.low:.2f} .. {row.against_cp.high:.2f}",
            statistics.median([turn.cpu for turn in row.turns]),
            max(turn.peak for turn in row.turns),
        )
        for row in rows
    ]
    headers = ["from", "to", "route", "seconds", "ratio to cp", "95 % of the ratio", "CPU s", "peak MiB"]
    formats = (None, None, None, ".2f", ".2f", None, ".2f", ".0f")
    return str(tabulate(shown, headers, tablefmt="github", floatfmt=formats))


def inspected(keys: int = 10_000, rounds: int = 5) -> list[tuple[str, int, float, float]]:
    """Format, tensors, seconds and CPU seconds of `torchshard inspect`, with the interpreter."""
    import torch
    import torch.distributed.checkpoint as dcp

    from torchshard import checkpoint

    rows = []
    with tempfile.TemporaryDirectory(prefix="torchshard-") as name:
        state = {f"layers.{i}.weight": torch.zeros(4) for i in range(keys)}
        dcp.save(state, checkpoint_id=f"{name}/dcp", no_dist=True)
        paths = {"dcp": f"{name}/dcp", "torch": f"{name}/a.pt", "safetensors": f"{name}/a.safetensors"}
        for to in ("torch", "safetensors"):
            checkpoint.convert(paths["dcp"], paths[to], to=to)
        # With bytecode, as a package that is installed has it.
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{name}/bytecode"}
        for kind, path in paths.items():
            command = [sys.executable, "-m", "torchshard", "inspect", path]
            subprocess.run(command, capture_output=True, check=True, env=env)
            seconds = []
            for _ in range(rounds):
                start, before = time.perf_counter(), cpu_seconds()
                subprocess.run(command, capture_output=True, check=True, env=env)
                seconds.append((time.perf_counter() - start, cpu_seconds() - before))
            wall, cpu = [statistics.median(column) for column in zip(*seconds, strict=True)]
            rows.append((kind, keys, wall, cpu))
    return rows


_READ_ONE = """
import sys, time
from torchshard import checkpoint
import numpy
def read():
    with open("/proc/self/io") as io:
        return int(io.readline().split()[1])
with checkpoint.open(sys.argv[1]) as ck:
    ck["w2"][0:1]  # what has to be imported is
before, start = read(), time.perf_counter()
with checkpoint.open(sys.argv[1]) as ck:
    assert ck["w3"].numpy().nbytes == 2**26
print(time.perf_counter() - start, read() - before)
"""


def read_alone() -> tuple[float, float]:
    """Seconds and bytes that reading one tensor of 64 MiB out of a file of 4 GiB (of holes) takes."""
    with tempfile.NamedTemporaryFile(prefix="torchshard-", suffix=".safetensors") as file:
        sizes = [2**31, 2**30, 2**30 - 2**26, 2**26]
        ends = list(itertools.accumulate(sizes))
        spans = [
            {"dtype": "U8", "shape": [n], "data_offsets": [end - n, end]} for n, end in zip(sizes, ends, strict=True)
        ]
        header = json.dumps({f"w{i}": span for i, span in enumerate(spans)}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + ends[-1])
        done = subprocess.run([sys.executable, "-c", _READ_ONE, file.name], capture_output=True, text=True, check=True)
    seconds, count = map(float, done.stdout.split())
    return seconds, count


def limits(rows: Sequence[Row], inspections: Sequence[tuple[str, int, float, float]], read: float) -> str:
    """The worst of each, where it was, and what it may be."""
    medians = {(r.source, r.to, r.route): statistics.median([t.work for t in r.turns]) for r in rows}
    ours = [row for row in rows if row.route == "torchshard"]
    shown = []
    slowest = max(ours, key=lambda row: row.against_cp.ratio)
    shown.append(("slowest beside cp", f"{slowest.source} to {slowest.to}", slowest.against_cp.ratio, 1.5))
    for route in dict.fromkeys([r.route for r in rows if r.route not in (_CP, "torchshard")]):
        pairs = {key: medians[*key[:2], "torchshard"] / medians[key] for key in medians if key[2] == route}
        worst = max(pairs, key=lambda key: pairs[key])
        shown.append((f"slowest beside {route}", f"{worst[0]} to {worst[1]}", pairs[worst], 0.3))
    largest = max(ours, key=lambda row: max(turn.peak for turn in row.turns))
    peak = max(turn.peak for turn in largest.turns)
    shown.append(("MiB over the interpreter", f"{largest.source} to {largest.to}", peak, 64))
    shown += [(f"seconds to inspect {count:,} tensors", kind, wall, 1.5) for kind, count, wall, _ in inspections]
    shown.append(("bytes read for one tensor of 4 GiB, to its own", "safetensors", read / 2**26, 1.01))
    headers = ["what", "where", "measured", "limit"]
    return str(tabulate(shown, headers, tablefmt="github", floatfmt=".2f"))


def main(gib: float = 1.0, rounds: int = 5, say: Callable[[str], None] = lambda line: None, others: bool = True) -> str:
    """The tables; arguments as those of `measured`."""
    rows = measured(gib, rounds, say, others)
    say("inspecting many tensors, reading one")
    inspections, (seconds, count) = inspected(rounds=rounds), read_alone()
    headers = ["inspect", "tensors", "seconds", "CPU seconds"]
    told = tabulate(inspections, headers, tablefmt="github", floatfmt=".2f")
    one = f"One tensor of 64 MiB out of a file of 4 GiB: {seconds:.2f} s, {count / 2**20:.2f} MiB read"
    return f"{table(rows)}\n\n{told}\n\n{one}\n\n{limits(rows, inspections, count)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each route")
    parser.add_argument("--ours", action="store_true", help="leave out torch's routes, which take long")
    options = parser.parse_args()
    print(main(options.gib, options.rounds, lambda line: print(line, file=sys.stderr), not options.ours))
