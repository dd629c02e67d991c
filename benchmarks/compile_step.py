"""Compiled data parallel: a step (zero_grad, forward, backward) through our backend beside torch's ways.

    python -m benchmarks.compile_step

Two gloo ranks with one thread each. Ours is our wrapper under torch.compile(backend="torchshard"); torch's is its own
wrapper: under torch.compile, which cuts the graph where its buckets are full (DDPOptimizer), and is compared with ours
under plain torch.compile, too; with its reducer in Python under compiled autograd, where ours is measured under
compiled autograd as well; and eager. Both sides hold the same weights, take turns in one run, and their gradients are
compared; what counts is the ratio of each round, in wall time on rank 0.
"""

import contextlib
import copy
import functools

import torch
from torch import nn
from torch._dynamo import compiled_autograd

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


def _in_pieces(model):
    return torch.compile(model), contextlib.nullcontext


def _eager(model):
    return model, contextlib.nullcontext


def _in_graph(model):
    return torch.compile(model, backend="torchshard"), contextlib.nullcontext


def _python_reducer(model):
    return torch.compile(model), functools.partial(compiled_autograd._enable, torch.compile())


def _in_both_graphs(model):
    compiler = torch.compile(backend="torchshard")
    return torch.compile(model, backend="torchshard"), functools.partial(compiled_autograd._enable, compiler)


RIVALS = {  # torch's way -> how it is called, our way, torch's setting
    "DDPOptimizer": (_in_pieces, _in_graph, "ddp_optimizer"),
    "DDPOptimizer, both with inductor": (_in_pieces, _in_pieces, "ddp_optimizer"),
    "python_reducer": (_python_reducer, _in_both_graphs, "python_reducer"),
    "eager": (_eager, _in_graph, "ddp_optimizer"),
}


def _compare(rank, world, case, rival, rounds):
    from torchshard.ddp import DistributedDataParallel

    make, x = cases()[case]
    use_theirs, use_ours, setting = RIVALS[rival]
    torch._dynamo.config.optimize_ddp = setting
    module = make()
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(module))
    ours = DistributedDataParallel(module)

    def step(model, around):
        model.zero_grad()
        with around():
            model(x).square().mean().backward()

    sides = [functools.partial(step, *use(model)) for use, model in ((use_ours, ours), (use_theirs, theirs))]
    for side in sides:
        turn(side, 5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    assert bool(ours.reducer.counters.in_graph) is (use_ours is not _in_pieces), "gradients are reduced in the graph"
    return rounds_on_ranks(*sides, rounds, 0.3)


def compared(rounds: int = 31) -> list[Comparison]:
    """All cases."""
    return [
        compare(f"{case} : {rival}", run_ranks(2, _compare, case, rival, rounds, timeout=600)[0])
        for case in cases()
        for rival in RIVALS
    ]


def main() -> str:
    """The table."""
    return f"{table(compared(), 'ms')}\n\ntorch {torch.__version__}, 2 gloo ranks, one thread each"


if __name__ == "__main__":
    print(main())
