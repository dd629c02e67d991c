"""Steps over a slow link, measured, beside the same steps on paper."""

import statistics
import time

import torch
import torch.distributed as dist

from tests.models import mlp
from torchshard.compiler import measure, simulate
from torchshard.ddp import DistributedDataParallel

CAPS = (0.25, 1.0, 25.0)


def _median(run, repeat):
    times = []
    for _ in range(repeat):
        dist.barrier()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _all_reduce(numel):
    tensor = torch.zeros(numel)
    return _median(lambda: dist.all_reduce(tensor), 5)


def steps(rank, world):
    """For each cap, seconds of a step: measured and simulated."""
    small, large = _all_reduce(1), _all_reduce(1 << 20)
    messages = 2 * (world - 1)
    bandwidth = messages / world * (4 << 20) / (large - small)
    x, found = torch.randn(256, 512), {}
    for cap in CAPS:
        ddp = DistributedDataParallel(mlp(512, 6), bucket_cap_mb=cap)

        def step(ddp=ddp):
            ddp.zero_grad()
            ddp(x).sum().backward()

        for _ in range(2):
            step()
        dist.barrier()
        times = measure(ddp, x)
        played = simulate(
            ddp.reducer.plan, world_size=world, bandwidth=bandwidth, latency=small / messages, times=times
        )
        found[cap] = _median(step, 9), played.seconds, played.compute
    return found
