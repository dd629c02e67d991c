"""What an import costs beyond torch's own: CPU time of fresh interpreters; their files were compiled and read before.

    python -m benchmarks.imports

The command line and the tools for checkpoints do without torch until they need it; what they take is beside an
interpreter that imports nothing.
"""

import os
import statistics
import subprocess
import sys

from tabulate import tabulate

from benchmarks.harness import cpu_seconds, in_turns

TORCH = "import torch, torch.distributed.tensor"
CASES = {  # what is imported: (the whole program, the one that it is beside)
    "DTensor, DistributedDataParallel": (f"{TORCH}; from torchshard import DTensor, DistributedDataParallel", TORCH),
    "all public names": (f"{TORCH}; from torchshard import *", TORCH),
    "torchshard.checkpoint": ("from torchshard.checkpoint import *", "pass"),
}

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _run(program: str) -> float:
    """CPU seconds of an interpreter that runs a program."""
    before = cpu_seconds()
    subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=True)
    return cpu_seconds() - before


def main(rounds: int = 15) -> str:
    """The table."""
    rows = []
    for what, programs in CASES.items():
        for program in programs:
            _run(program)
        found = in_turns(*programs, rounds, _run)
        beyond = statistics.median(ours - theirs for ours, theirs in found)
        rows.append((what, statistics.median(theirs for _, theirs in found) * 1e3, beyond * 1e3))
    headers = ["imported from torchshard", "without ms", "beyond ms"]
    return str(tabulate(rows, headers, tablefmt="github", floatfmt=".0f"))


if __name__ == "__main__":
    print(main())
