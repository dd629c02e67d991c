"""Cold compile time of a wrapped model: the first step through our backend beside that through torch's DDPOptimizer.

    python -m benchmarks.compile_time --rounds 3

What is timed is torch.compile and the first step (forward, backward, all compilation); each has a process of its own,
with empty caches, and one rank, which cuts and reduces like any other. The sides take turns; what counts is the ratio
of each round, in CPU time of the process and of the compilers that it starts.
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.compile_step import cases
from benchmarks.harness import Comparison, compare, cpu_seconds, in_turns, table


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


def main() -> str:
    """The table, or one time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs=2, metavar=("SIDE", "CASE"))
    options = parser.parse_args()
    if options.only:
        return str(first_step(*options.only))
    return f"{table(compared(options.rounds), 'ms')}\n\ntorch {torch.__version__}, one rank; CPU time, empty caches"


if __name__ == "__main__":
    print(main())
