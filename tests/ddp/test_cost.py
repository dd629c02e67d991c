"""What a step of a wrapper costs in the interpreter, in calls of Python functions: the same number on every machine."""

import gc
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks


class Layers(nn.Module):
    """A stack of small layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _calls(step: Callable[[], object]) -> Counter[str]:
    """How often each function of the package is called in a step, by name."""
    seen: Counter[str] = Counter()

    def note(frame, event, _arg):
        code = frame.f_code
        if event == "call" and "/torchshard/" in code.co_filename:
            seen[f"{code.co_filename.rpartition('/torchshard/')[2]}: {code.co_qualname}"] += 1

    gc.disable()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen


def _of_a_step(layers: int, backend: str | None, again: int = 20) -> Counter[str]:
    from torchshard.ddp import DistributedDataParallel

    model: nn.Module = DistributedDataParallel(Layers(layers))
    run = torch.compile(model, backend=backend) if backend else model

    def step():
        run(torch.ones(4, 8)).sum().backward()
        for p in model.parameters():
            p.grad = None

    for _ in range(again):  # buckets are laid out, and steps no longer recorded
        step()
    # of the least that several take: where gloo still holds a bucket of the step before, that is made anew
    return min((_calls(step) for _ in range(5)), key=Counter.total)


def count(rank, world, backend):
    few, many = _of_a_step(4, backend), _of_a_step(20, backend)
    return sum(few.values()), dict(many - few), few.most_common(20)


@pytest.mark.parametrize(("world", "most"), [(1, 150), (2, 160)])
def test_in_eager_mode(world, most):
    for calls, more, common in run_ranks(world, count, None):
        assert calls <= most, common
        assert not more  # nothing is called for each parameter
