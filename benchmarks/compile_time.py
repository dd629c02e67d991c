"""Cold compile time: the first step through ours beside that through torch's own.

    python -m benchmarks.compile_time --rounds 3

What is timed is torch.compile and the first step (forward, backward, all compilation). The sides take turns; what
counts is the ratio of each round.

The first table is of models that DistributedDataParallel wraps, ours through our backend, torch's through its
DDPOptimizer. Each has a process of its own, with empty caches, and one rank, which cuts and reduces like any other; the
CPU time is that of the process and of the compilers that it starts.

The second is of a Llama cut by tensor parallel styles, ours beside torch's, and beside the same model uncut: CPU time
of a rank of a group that computes nothing, in a process that has compiled each before and forgotten it. The backend is
aot_eager, as DTensors add to the time of tracing; what inductor makes of the graphs comes on top on every side.
"""

import argparse
import functools
import gc
import os
import subprocess
import sys
import tempfile
import time
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.compile_step import cases
from benchmarks.harness import Comparison, compare, cpu_seconds, in_turns, table
from tests.parallel.llama import Config, Llama, plan
from tests.ranks import fake_ranks

LLAMA = {"Llama, weights cut": "tp", "Llama, sequence split too": "sp"}  # the kind of plan


def first_step(side: str, case: str) -> float:
    """Seconds of CPU time of the first step in this process."""
    from torchshard.ddp import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    make, x = cases()[case]
    wrapped = (DistributedDataParallel if side == "ours" else nn.parallel.DistributedDataParallel)(make())
    start = cpu_seconds()
    model = torch.compile(wrapped, backend="torchshard" if side == "ours" else "inductor")
    model(x).square().mean().backward()
    seconds = cpu_seconds() - start
    dist.destroy_process_group()
    return seconds


def _alone(side: str, case: str) -> float:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.compile_time", "--only", side, case]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{side}: {done.stderr}"
    return float(done.stdout.split()[-1])


def compared(rounds: int) -> list[Comparison]:
    """All cases."""
    found = []
    for case in cases():
        sides = [functools.partial(_alone, side, case) for side in ("ours", "torch")]
        found.append(compare(case, in_turns(*sides, rounds, lambda side: side())))
    return found


def _traced(library: ModuleType | None, kind: str) -> float:
    """Seconds of CPU time of the first step of a Llama whose styles are of `library`, or that is uncut."""
    from torchshard import init_device_mesh

    model: nn.Module = Llama(Config(256, width=64, layers=2, hidden=128))
    if library:
        model = library.parallelize_module(model, init_device_mesh("cpu", (2,)), plan(kind, library))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    torch.compiler.reset()
    gc.collect()
    start = time.process_time()
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens)
    getattr(out, "to_local", lambda: out)().square().mean().backward()
    return time.process_time() - start


def styles(rounds: int) -> str:
    """The second table."""
    from torch.distributed.tensor import parallel as upstream

    from torchshard import parallel

    torch.set_num_threads(1)
    others = {"torch's styles": upstream, "uncut": None}
    found = []
    with fake_ranks(2):
        for name, kind in LLAMA.items():
            for beside, library in others.items():
                sides = [functools.partial(_traced, each, kind) for each in (parallel, library)]
                for side in sides:
                    side()
                found.append(compare(f"{name}, beside {beside}", in_turns(*sides, rounds, lambda side: side())))
    return table(found, "ms", "other")


def main() -> str:
    """The table, or one time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs=2, metavar=("SIDE", "CASE"))
    options = parser.parse_args()
    if options.only:
        return str(first_step(*options.only))
    wrapped = table(compared(options.rounds), "ms")
    return f"{wrapped}\n\n{styles(2 * options.rounds + 1)}\n\ntorch {torch.__version__}; CPU time of one rank"


if __name__ == "__main__":
    print(main())
