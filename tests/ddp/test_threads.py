"""Hooks come in several threads at once where a module has parameters on several devices: autograd has one for each."""

import threading
import time

import torch
from torch import nn

from tests.ranks import run_ranks


def _everywhere(function):
    """The same function, called by two threads at once."""

    def twice(*args):
        results, threads = [], [threading.Thread(target=lambda: results.append(function(*args))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 2, "one has raised"
        return results[0]

    return twice


def _run(rank, world):
    from torchshard import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    reducer, started = ddp.reducer, []

    def start(bucket, number, is_last, real=reducer.reduction.start):
        started.append(number)
        time.sleep(0.005)  # as if the collective took it: others may run
        real(bucket, number, is_last)

    reducer.reduction.start = start
    for name in ("complete", "outside"):
        setattr(reducer, name, _everywhere(getattr(reducer, name)))
    found = []
    for step in range(3):
        model.zero_grad()
        started.clear()
        ddp(torch.full((2, 8), rank + step + 1.0)).square().mean().backward()
        found.append((started == [*range(len(reducer.buckets))], [p.grad.clone() for p in model.parameters()]))
    plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    plain.load_state_dict(model.state_dict())
    for step, (in_order, gradients) in enumerate(found):
        plain.zero_grad()
        x = torch.cat([torch.full((2, 8), r + step + 1.0) for r in range(world)])
        plain(x).square().mean().backward()
        assert in_order or not step, (step, started)  # the buckets of the first step are laid out anew at its end
        torch.testing.assert_close(gradients, [p.grad for p in plain.parameters()])
    return len(reducer.buckets)


def test_each_bucket_is_reduced_once_and_in_its_turn():
    assert min(run_ranks(2, _run)) > 3
