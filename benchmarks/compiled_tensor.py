"""Compiled tensor parallelism: a step (forward, backward) of a block with DTensors beside one written by hand.

    python -m benchmarks.compiled_tensor

Two gloo ranks with one thread each. Ours is an MLP whose weights are DTensors, cut by columns and by rows; the other
side has this rank's parts as plain parameters and calls functional collectives where they are due, in an autograd
function of its own. Both are compiled by inductor as one graph, hold the same weights and take turns in one run; their
gradients are compared. The last column is what DTensors cost beyond: wrapping at the edges of the graph.
"""

import functools
import statistics

import torch
from tabulate import tabulate
from torch import nn
from torch.distributed import _functional_collectives as functional

from benchmarks.harness import compare, rounds_on_ranks, turn
from tests.ranks import run_ranks

CASES = {"MLP of 16, batch 4": (16, 4), "MLP of 1024, batch 128": (1024, 128)}  # width, batch


class _Enter(torch.autograd.Function):
    """What every rank has goes into its part of the work: gradients are summed on the way back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return functional.all_reduce(grad, "sum", ctx.group), None


class _Leave(torch.autograd.Function):
    """The sum of what the ranks have made; its gradient is that of each term."""

    @staticmethod
    def forward(ctx, x, group):
        return functional.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class MLP(nn.Module):
    """Two linear maps: widened four times, cut between them."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class ByHand(nn.Module):
    """The MLP's part on this rank, with the collectives written out."""

    def __init__(self, mlp, rank, group):
        super().__init__()
        self.up = nn.Parameter(mlp.up.weight.detach().chunk(2, 0)[rank].clone())
        self.down = nn.Parameter(mlp.down.weight.detach().chunk(2, 1)[rank].contiguous())
        self.group = group

    def forward(self, x):
        x = torch.relu(nn.functional.linear(_Enter.apply(x, self.group), self.up))
        return _Leave.apply(nn.functional.linear(x, self.down), self.group)


def _compare(rank, world, case, rounds):
    from torchshard import init_device_mesh
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    width, batch = CASES[case]
    mesh = init_device_mesh("cpu", (world,))
    ours = MLP(width)
    theirs = ByHand(ours, rank, mesh.get_group())
    parallelize_module(ours, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    compiled = {side: torch.compile(side, fullgraph=True) for side in (ours, theirs)}
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ones = torch.ones(batch, width)

    def step(side):
        side.zero_grad()
        x.grad = None
        compiled[side](x).backward(ones)

    steps = [functools.partial(step, side) for side in (ours, theirs)]
    gradients = []
    for side, its_step in zip((ours, theirs), steps, strict=True):
        turn(its_step, 5)
        gradients.append([x.grad, *[getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in side.parameters()]])
    for p, q in zip(*gradients, strict=True):
        torch.testing.assert_close(p, q)
    return rounds_on_ranks(*steps, rounds, 0.1)


def main(rounds: int = 41) -> str:
    """The table."""
    rows = []
    for case in CASES:
        times = run_ranks(2, _compare, case, rounds, timeout=600)[0]
        found = compare(case, times)
        beyond = statistics.median(ours - theirs for ours, theirs in times)
        span = f"{found.low:.3f} .. {found.high:.3f}"
        rows.append((case, found.ours * 1e3, found.theirs * 1e3, found.ratio, span, beyond * 1e6))
    headers = ["case", "torchshard ms", "by hand ms", "ratio", "95 % of the ratio", "beyond us"]
    text = tabulate(rows, headers, tablefmt="github", floatfmt=("", ".3f", ".3f", ".3f", "", ".0f"))
    return f"{text}\n\ntorch {torch.__version__}, 2 gloo ranks, one thread each."


if __name__ == "__main__":
    print(main())
