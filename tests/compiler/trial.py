"""One model in two forms, stepped side by side: wrapped and compiled on ranks, and plain on every rank's batch."""

import copy

import torch

from tests.compiler.models import Parts, error
from tests.ranks import run_ranks


class Trial:
    """A wrapped and compiled model, beside a plain one that sees every rank's batch.

    Args:
        rank, world: of this process.
        how: a key of tests.compiler.traced.BACKENDS.
        make: makes the module.
        compile: keywords for torch.compile.
        alone: the group is a fake one, which leaves every rank its own share of the average.
        to_none: whether gradients are dropped before each step; else they are zeroed.
        settings: for the wrapper.
    """

    def __init__(self, rank, world, how="traced", make=Parts, compile=None, alone=False, to_none=True, **settings):
        from tests.compiler.traced import BACKENDS
        from torchshard.ddp import DistributedDataParallel

        torch.manual_seed(0)
        self.to_none = to_none
        self.rank, self.world, self.ranks = rank, world, [rank] if alone else range(world)
        module = make()
        self.reference = copy.deepcopy(module)
        self.ddp = DistributedDataParallel(module, **{"bucket_cap_mb": 0.01, **settings})
        self.model = torch.compile(self.ddp, **BACKENDS[how](), **(compile or {}))

    def step(self, objective, size=8, ranks=None, divisor=None):
        """Gradients of an objective, averaged over ranks; their error, and what was counted.

        Args:
            objective: function of (model, module, rank, size) -> loss, or losses whose backwards run one by one.
            size: of a rank's batch.
            ranks: those that have a batch; all, unless given.
            divisor: of the sum; the world's size, unless given.
        """
        before = copy.copy(self.ddp.reducer.counters)
        for model in (self.ddp, self.reference):
            model.zero_grad(self.to_none)
        _backward(objective(self.model, self.ddp.module, self.rank, size))
        for rank in self.ranks if ranks is None else ranks:
            _backward(objective(self.reference, self.reference, rank, size), divisor or self.world)
        after = self.ddp.reducer.counters
        counts = after.in_graph - before.in_graph, after.by_hook - before.by_hook, after.late - before.late
        return error(self.ddp, self.reference), *counts


def _backward(losses, divisor=1):
    for loss in losses if isinstance(losses, tuple) else (losses,):
        (loss / divisor).backward()


def run_in_turn(rank, world, trials):
    """What each function of (rank, world) answers; nothing compiled is left to the next."""
    answers = []
    for run in trials:
        answers.append(run(rank, world))
        torch._dynamo.reset()
    return answers


def check_on_each_rank(trials):
    """Run trials on two ranks, started once, and check what each rank answers: function of (rank, world) -> check."""
    for answers in run_ranks(2, run_in_turn, [*trials], timeout=250):
        for check, found in zip(trials.values(), answers, strict=True):
            check(found)
