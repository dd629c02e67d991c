"""Compiled tensor parallelism: a step (forward, backward) of a block with DTensors beside one written by hand.

    python -m benchmarks.compiled_tensor

Ours is an MLP whose weights are DTensors, cut by columns and by rows; the other side has this rank's parts as plain
parameters and calls functional collectives where they are due, in an autograd function of its own. Both are compiled by
inductor as one graph, hold the same weights and take turns in one run; their gradients are compared. What DTensors cost
beyond is wrapping at the edges of the graph.

The first table is of two gloo ranks with one thread each, in wall time. There the step of the small one is mostly
waiting, so the second table has its CPU time, on a fake group, also with torch's own styles in place of ours.
"""

import copy
import functools
import statistics

import torch
from tabulate import tabulate
from torch import nn
from torch.distributed import _functional_collectives as functional

from benchmarks.harness import compare, interleaved, rounds_on_ranks, turn
from tests.ranks import fake_ranks, run_ranks

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
    """The MLP's part on this rank, of the same modules, with the collectives written out."""

    def __init__(self, mlp, rank, group):
        super().__init__()
        self.up, self.down = copy.deepcopy(mlp.up), copy.deepcopy(mlp.down)
        self.up.weight = nn.Parameter(mlp.up.weight.detach().chunk(2, 0)[rank].clone())
        self.down.weight = nn.Parameter(mlp.down.weight.detach().chunk(2, 1)[rank].contiguous())
        self.group = group

    def forward(self, x):
        x = torch.relu(self.up(_Enter.apply(x, self.group)))
        return _Leave.apply(self.down(x), self.group)


def _sides(width, rank, mesh):
    """The MLP made parallel by our styles and by torch's, and the one by hand, all of the same weights; compiled."""
    from torch.distributed.tensor import parallel as upstream

    from torchshard import parallel as ours

    plain = MLP(width)
    sides = {"by hand": ByHand(plain, rank, mesh.get_group())}
    for name, library in (("torchshard", ours), ("torch", upstream)):
        plan = {"up": library.ColwiseParallel(), "down": library.RowwiseParallel()}
        sides[name] = library.parallelize_module(copy.deepcopy(plain), mesh, plan)
    return {name: (side, torch.compile(side, fullgraph=True)) for name, side in sides.items()}


def _step(side, compiled, x):
    side.zero_grad()
    x.grad = None
    compiled(x).backward(torch.ones_like(x))


def _gradients(side, x):
    return [x.grad, *[getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in side.parameters()]]


def _compare(rank, world, case, rounds):
    from torchshard import init_device_mesh

    width, batch = CASES[case]
    sides = _sides(width, rank, init_device_mesh("cpu", (world,)))
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    steps, gradients = [], []
    for name in ("torchshard", "by hand"):
        steps.append(functools.partial(_step, *sides[name], x))
        turn(steps[-1], 5)
        gradients.append(_gradients(sides[name][0], x))
    for p, q in zip(*gradients, strict=True):
        torch.testing.assert_close(p, q)
    return rounds_on_ranks(*steps, rounds, 0.1)


def beyond_by_hand(rounds: int = 15) -> str:
    """CPU time beyond that of the side by hand, of the small case on a fake group of two ranks, as a table."""
    from torchshard import init_device_mesh

    torch.set_num_threads(1)
    with fake_ranks(2):
        width, batch = next(iter(CASES.values()))
        sides = _sides(width, 0, init_device_mesh("cpu", (2,)))
        x = torch.randn(batch, width).requires_grad_()

        def forward(_, compiled, x):
            with torch.no_grad():
                compiled(x)

        rows = []
        for what, run in (("forward", forward), ("forward and backward", _step)):
            hand, *others = [functools.partial(run, *sides[name], x) for name in ("by hand", "torchshard", "torch")]
            found = [interleaved(what, other, hand, rounds=rounds, seconds=0.05) for other in others]
            beyond = [(c.ours - c.theirs) * 1e6 for c in found]
            rows.append((what, found[0].theirs * 1e6, *beyond))
        headers = ["CPU time, us", "by hand", "torchshard: beyond", "torch's styles: beyond"]
        return str(tabulate(rows, headers, tablefmt="github", floatfmt=".0f"))


def main(rounds: int = 41) -> str:
    """Both tables."""
    rows = []
    for case in CASES:
        times = run_ranks(2, _compare, case, rounds, timeout=600)[0]
        found, beyond = compare(case, times), statistics.median(ours - theirs for ours, theirs in times)
        span = f"{found.low:.3f} .. {found.high:.3f}"
        rows.append((case, found.ours * 1e3, found.theirs * 1e3, found.ratio, span, beyond * 1e6))
    headers = ["case", "torchshard ms", "by hand ms", "ratio", "95 % of the ratio", "beyond us"]
    text = tabulate(rows, headers, tablefmt="github", floatfmt=("", ".3f", ".3f", ".3f", "", ".0f"))
    return f"{text}\n\ntorch {torch.__version__}, 2 gloo ranks, one thread each.\n\n{beyond_by_hand()}"


if __name__ == "__main__":
    print(main())
