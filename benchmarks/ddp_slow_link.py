"""Eager data parallel over a slow link: bucket_cap_mb="auto" beside torch's own wrapper at the best of its sizes.

    python -m benchmarks.ddp_slow_link --mbits 1000 --rounds 9

Two gloo ranks inside a private network namespace whose loopback is throttled; see `slow_link.py`. All wrappers hold
the same weights and take turns in one run, a step each. What counts is the ratio to that size of torch's whose median
is the smallest.
"""

import argparse
import copy
import functools
import statistics
import sys

import torch
from torch import nn

from benchmarks.harness import compare, table, turn
from benchmarks.slow_link import run_on_slow_link, why_not
from tests.models import GPT, GPTConfig

CAPS = (1, 2, 5, 25)  # MiB; 25 are torch's default


def steps(rank, world, rounds):
    """Seconds of each round's step by wrapper, and the size that "auto" has come to, in bytes."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(rank)
    module = GPT(GPTConfig(layers=4, width=256, heads=4, context=128))
    x = torch.randint(0, 256, (4, 128))
    wrappers = {
        f"torch, {cap} MiB": nn.parallel.DistributedDataParallel(
            copy.deepcopy(module), **({} if cap == 25 else {"bucket_cap_mb": cap})
        )
        for cap in CAPS
    }
    wrappers["auto"] = DistributedDataParallel(module, bucket_cap_mb="auto")

    def step(model):
        model.zero_grad()
        model(x).square().mean().backward()

    for model in wrappers.values():
        for _ in range(3):
            step(model)
    for model in wrappers.values():
        for p, q in zip(module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    times = {name: [] for name in wrappers}
    for number in range(rounds):
        for name, model in [*wrappers.items()][:: -1 if number % 2 else 1]:
            times[name].append(turn(functools.partial(step, model)))
    return times, wrappers["auto"].reducer.policy.cap


def main() -> int:
    """The table, a row for each of torch's sizes; 1 if the best one is not beaten."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbits", type=int, default=1000, help="of the link")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if reason := why_not():
        print(f"not measured: {reason}")
        return 0
    body = "benchmarks.ddp_slow_link:steps"
    times, cap = run_on_slow_link(options.mbits, 2, body, options.rounds)[0]
    ours = times.pop("auto")
    found = {name: compare(name, list(zip(ours, theirs, strict=True))) for name, theirs in times.items()}
    best = min(times, key=lambda name: statistics.median(times[name]))
    print(table([*found.values()], "ms"))
    print(f"\nbest of torch's: {best}; ratio {found[best].ratio:.2f}; auto: {cap / 2**20:.2f} MiB")
    print(f"GPT of 4 x 256, 2 gloo ranks, {options.mbits} Mbit/s, torch {torch.__version__}")
    return int(found[best].ratio >= 1)


if __name__ == "__main__":
    sys.exit(main())
