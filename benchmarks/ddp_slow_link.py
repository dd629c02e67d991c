"""Data parallel over a slow link: bucket_cap_mb="auto", eager and compiled, beside torch's own wrapper.

    python -m benchmarks.ddp_slow_link --mbits 1000 --rounds 9

Two gloo ranks inside a private network namespace whose loopback is throttled; see `slow_link.py`. All wrappers hold
the same weights and take turns in one run, a step each. Eager steps are compared with those of torch's wrapper at
several sizes, of which the one with the smallest median counts; compiled ones with torch's DDPOptimizer and with the
bound, forward + max(backward, wire): compute is that of the compiled module without a wrapper, in the same run, and
the wire's time is that of the bytes that two ranks send through one loopback. The floor is the same with the wire's
time as measured: all gradients in one all-reduce, with nothing computed beside it; headers of packets travel too. Both
take a byte on the wire for a byte of gradients; "auto" is below them where it sends numbers packed.
"""

import argparse
import copy
import functools
import statistics
import sys

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import compare, table, turn
from benchmarks.slow_link import run_on_slow_link, why_not
from tests.models import GPT, GPTConfig

CAPS = (1, 2, 5, 25)  # MiB; 25 are torch's default
AUTO, COMPILED, PIECES, OPTIMIZER = '"auto"', 'compiled, "auto"', 'in pieces, "auto"', "DDPOptimizer"
ALONE, FORWARD, WIRE = "no communication", "its forward", "only communication"
BOUND, FLOOR = "bound", "floor"


def steps(rank, world, rounds):
    """Seconds of each round's step by wrapper; what "auto" has come to, from which link; bytes of all gradients."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(rank)
    module = GPT(GPTConfig(layers=4, width=256, heads=4, context=128))
    x = torch.randint(0, 256, (4, 128))
    theirs = {cap: _torchs(module, cap) for cap in CAPS}
    ours = [DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb="auto") for _ in range(3)]
    models = {
        **{f"torch, {cap} MiB": model for cap, model in theirs.items()},
        AUTO: ours[0],
        OPTIMIZER: torch.compile(_torchs(module, 25)),
        COMPILED: torch.compile(ours[1], backend="torchshard"),
        PIECES: torch.compile(ours[2], backend="torchshard", options={"reduction": "split"}),
        ALONE: torch.compile(module),
    }

    def step(model):
        model.zero_grad()
        model(x).square().mean().backward()

    for model in models.values():
        for _ in range(5):
            step(model)
    for name, model in models.items():
        for p, q in zip(ours[0].parameters(), model.parameters(), strict=True):
            assert name == ALONE or torch.allclose(p.grad, q.grad, rtol=1e-3, atol=1e-5), name
    times = {name: [] for name in models} | {FORWARD: [], WIRE: []}
    everything = torch.zeros(sum(p.numel() for p in module.parameters()))
    for number in range(rounds):
        for name, model in [*models.items()][:: -1 if number % 2 else 1]:
            times[name].append(turn(functools.partial(step, model)))
        times[FORWARD].append(turn(functools.partial(models[ALONE], x)))
        times[WIRE].append(turn(functools.partial(dist.all_reduce, everything)))
    chosen = [[model.reducer.policy.cap, model.reducer.policy.first] for model in ours]
    return times, (chosen, str(ours[0].reducer.link)), everything.nbytes


def _torchs(module, cap):
    return nn.parallel.DistributedDataParallel(copy.deepcopy(module), **({} if cap == 25 else {"bucket_cap_mb": cap}))


def main() -> int:
    """The tables; 1 if torch's best is not beaten."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbits", type=int, default=1000, help="of the link")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if reason := why_not():
        print(f"not measured: {reason}")
        return 0
    body = "benchmarks.ddp_slow_link:steps"
    times, (sizes, link), nbytes = run_on_slow_link(options.mbits, 2, body, options.rounds, timeout=500)[0]
    eager = [f"torch, {cap} MiB" for cap in CAPS]
    best = min(eager, key=lambda name: statistics.median(times[name]))

    def beside(ours, others):
        return [compare(f"{ours} : {name}", list(zip(times[ours], times[name], strict=True))) for name in others]

    print(table(found := beside(AUTO, eager), "ms"))
    ratio = found[eager.index(best)].ratio
    auto = ", ".join(f"{cap / 2**20:.2f} MiB, the first {first / 2**20:.2f}" for cap, first in sizes)
    print(f"\nbest of torch's: {best}; ratio {ratio:.2f}; auto: {auto}; {link}\n")
    wire = 2 * nbytes * 8 / (options.mbits * 1e6)  # a ring of two sends each byte twice, through one loopback
    computed = list(zip(times[FORWARD], times[ALONE], times[WIRE], strict=True))
    times[BOUND] = [f + max(a - f, wire) for f, a, _ in computed]
    times[FLOOR] = [f + max(a - f, measured) for f, a, measured in computed]
    compiled, pieces = beside(COMPILED, [OPTIMIZER, best, AUTO, BOUND, FLOOR, ALONE]), beside(PIECES, [OPTIMIZER, best])
    print(table(compiled + pieces + beside(FLOOR, [OPTIMIZER, best]), "ms"))
    print(f"\nGPT of 4 x 256, 2 gloo ranks, {options.mbits} Mbit/s, torch {torch.__version__}")
    return int(ratio >= 1)


if __name__ == "__main__":
    sys.exit(main())
