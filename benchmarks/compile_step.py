"""Compiled data parallel: a step (zero_grad, forward, backward) through our backend beside torch's DDPOptimizer.

    python -m benchmarks.compile_step

Two gloo ranks with one thread each. Ours is our wrapper under torch.compile(backend="torchshard"); torch's is its own
wrapper under torch.compile, which cuts the graph where its buckets are full. Both hold the same weights, take turns in
one run, and their gradients are compared; what counts is the ratio of each round, in wall time on rank 0.
"""

import copy
import functools

import torch
from torch import nn

from benchmarks.harness import Comparison, compare, rounds_on_ranks, table, turn
from tests.models import GPT, GPTConfig, mlp
from tests.ranks import run_ranks


class MLP(nn.Module):
    """Layers in a module of its own: torch's wrapper does not compile a bare nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(1024, 8)

    def forward(self, x):
        return self.layers(x)


def cases():
    """Name -> what makes the module, and its input."""
    tokens = torch.randint(0, 256, (4, 128), generator=torch.Generator().manual_seed(0))
    return {
        "MLP, 8 x 1024, batch 64": (MLP, torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))),
        "GPT, 4 layers of 256": (lambda: GPT(GPTConfig(layers=4, width=256, heads=4, context=128)), tokens),
    }


def _compare(rank, world, case, rounds):
    from torchshard.ddp import DistributedDataParallel

    make, x = cases()[case]
    module = make()
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(module))
    ours = DistributedDataParallel(module)

    def step(compiled):
        compiled.zero_grad()
        compiled(x).square().mean().backward()

    compiled = torch.compile(ours, backend="torchshard"), torch.compile(theirs)
    sides = [functools.partial(step, side) for side in compiled]
    for side in sides:
        turn(side, 5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    assert ours.reducer.counters.in_graph, "gradients are reduced in the graph"
    return rounds_on_ranks(*sides, rounds, 0.3)


def compared(rounds: int = 31) -> list[Comparison]:
    """All cases."""
    return [compare(case, run_ranks(2, _compare, case, rounds, timeout=600)[0]) for case in cases()]


def main() -> str:
    """The table."""
    return (
        f"{table(compared(), 'ms')}\n\ntorch {torch.__version__}, 2 gloo ranks, one thread each; torch's side is its "
        "DDPOptimizer."
    )


if __name__ == "__main__":
    print(main())
