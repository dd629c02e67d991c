"""Memory of data parallel, eager and compiled (aot_eager): the peak of some steps with our wrapper and torch's.

    python -m benchmarks.ddp_memory

Two gloo ranks; each wrapper has processes of its own. Peaks are those of the resident set, as Linux counts it, above
what the bare module and one step of it take; in MiB, beside the size of the parameters. The C library is told to give
memory back at once; else what it keeps decides.
"""

import gc
import os
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

from benchmarks.compile_step import MLP
from benchmarks.ddp_step import SETTINGS
from tests.models import mlp
from tests.ranks import run_ranks

MiB = 1 << 20

CASES = {
    **SETTINGS,
    "torch.compile": {"compiled": True},
    "torch.compile, bucket views": {"compiled": True, "gradient_as_bucket_view": True},
}


def _status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def peak(rank, world, ours, name):
    """MiB at most, of a wrapper from its construction to the end of its fifth step."""
    from torchshard.ddp import DistributedDataParallel

    settings = dict(CASES[name])
    hook, compiled, module = settings.pop("hook", None), settings.pop("compiled", False), MLP()
    x = torch.randn(16, 1024)
    nn.parallel.DistributedDataParallel(nn.Linear(2, 2))(torch.ones(2, 2)).sum().backward()  # what is loaded once
    DistributedDataParallel(nn.Linear(2, 2))(torch.ones(2, 2)).sum().backward()
    torch.compile(nn.Linear(2, 2), backend="aot_eager")(torch.ones(2, 2)).sum().backward()
    module(x).sum().backward()
    module.zero_grad()
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
    model = (DistributedDataParallel if ours else nn.parallel.DistributedDataParallel)(module, **settings)
    if hook:
        model.register_comm_hook(None, hook)
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    for _ in range(5):
        model.zero_grad()
        model(x).square().mean().backward()
    return _status("VmHWM") - before


def compared(names=tuple(CASES)) -> list[tuple[str, float, float]]:
    """For each setting, the peaks of rank 0 in MiB: ours, torch's."""
    return [(name, *(run_ranks(2, peak, ours, name, timeout=120)[0] for ours in (True, False))) for name in names]


def main() -> str:
    """The table."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(128 << 10)  # read when the server of ranks starts
    size = sum(p.nbytes for p in mlp(1024, 8).parameters()) / MiB
    rows = [(name, ours, theirs, ours / theirs) for name, ours, theirs in compared()]
    headers = [f"parameters of {size:.0f} MiB", "torchshard MiB", "torch MiB", "ratio"]
    return str(tabulate(rows, headers, tablefmt="github", floatfmt=(None, ".1f", ".1f", ".2f")))


if __name__ == "__main__":
    print(main())
