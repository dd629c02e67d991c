"""What an import costs beyond torch's own: CPU time of fresh interpreters, whose files were compiled and read before.

    python -m benchmarks.imports

The command line and the tools for checkpoints do without torch until they need it.
"""

import os
import statistics
import subprocess
import sys

from tabulate import tabulate

TORCH = "import torch, torch.distributed.tensor"
CASES = {  # what is measured: (what is imported before, what then)
    "torch, torch.distributed.tensor": ("", TORCH),
    "DTensor, DistributedDataParallel, after these": (TORCH, "from torchshard import DTensor, DistributedDataParallel"),
    "all public names, after these": (TORCH, "from torchshard import *"),
    "torchshard.checkpoint alone": ("", "from torchshard.checkpoint import *"),
}
PROGRAM = "{}\nimport time\nstart = time.process_time()\n{}\nprint(time.process_time() - start)"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _seconds(before: str, then: str) -> float:
    """CPU time of what is imported `then`, in an interpreter that has imported what comes `before`."""
    command = [sys.executable, "-c", PROGRAM.format(before, then)]
    return float(subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main(rounds: int = 11) -> str:
    """The table."""
    for programs in CASES.values():
        _seconds(*programs)
    times = [[_seconds(*programs) * 1e3 for programs in CASES.values()] for _ in range(rounds)]
    rows = [
        (what, statistics.median(found), min(found), max(found))
        for what, found in zip(CASES, zip(*times, strict=True), strict=True)
    ]
    return str(tabulate(rows, ["CPU time, ms", "median", "least", "most"], tablefmt="github", floatfmt=".0f"))


if __name__ == "__main__":
    print(main())
