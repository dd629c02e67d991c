"""Eager data parallel: a step (zero_grad, forward, backward) of our wrapper beside torch's own.

    python -m benchmarks.ddp_step --rounds 31               # --messages: ranks do not sum in one another's memory

Two gloo ranks with one thread each. Both wrappers hold the same weights, take turns in one run, and their gradients
are compared; what counts is the ratio of each round, in wall time on rank 0.
"""

import argparse
import copy
import functools
import os

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from benchmarks.harness import Comparison, compare, geometric_mean, rounds_on_ranks, table, turn
from tests.models import GPT, GPTConfig, mlp
from tests.ranks import run_ranks


class Tiny(nn.Module):
    """1,000 parameters of a hundred elements."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(100) for _ in range(1000))

    def forward(self, x):
        for weight in self.weights:
            x = x * weight
        return x


def _cases():
    tokens = torch.randint(0, 256, (4, 64))
    return {
        "MLP, 6 x 1024": (mlp(1024, 6), torch.randn(16, 1024)),
        "GPT, 148 parameters": (GPT(GPTConfig(layers=12, width=128, heads=4, context=64)), tokens),
        "1,000 tiny parameters": (Tiny(), torch.ones(100)),
    }


def _compare(rank, world, case, rounds, settings):
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(rank)
    module, x = _cases()[case]
    settings = dict(settings)
    hook = settings.pop("hook", None)
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(module), **settings)
    ours = DistributedDataParallel(module, **settings)
    if hook:
        theirs.register_comm_hook(None, hook)
        ours.register_comm_hook(None, hook)

    def step(model):
        model.zero_grad()
        model(x).square().mean().backward()

    sides = [functools.partial(step, model) for model in (ours, theirs)]
    for side in sides:
        turn(side, 5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    return rounds_on_ranks(*sides, rounds, 0.1)


SETTINGS = {
    "defaults": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "fp16 hook": {"hook": fp16_compress_hook},
}


def compared(rounds: int = 31) -> list[Comparison]:
    """All cases, at all settings."""
    return [
        compare(f"{case}; {name}", run_ranks(2, _compare, case, rounds, settings, timeout=300)[0])
        for name, settings in SETTINGS.items()
        for case in _cases()
    ]


def main() -> str:
    """The table, and the geometric mean of each setting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--messages", action="store_true", help="as between two machines")
    options = parser.parse_args()
    if options.messages:
        os.environ["TORCHSHARD_READ_NEIGHBOURS"] = "0"  # read where ranks are started
    found = compared(options.rounds)
    means = [f"{geometric_mean([c for c in found if c.name.endswith(name)]):.2f} ({name})" for name in SETTINGS]
    way = "by messages" if options.messages else "in memory"
    return (
        f"{table(found, 'ms')}\n\ngeometric mean of the ratios: {', '.join(means)}\n"
        f"torch {torch.__version__}, 2 gloo ranks, one thread each, {way}"
    )


if __name__ == "__main__":
    print(main())
