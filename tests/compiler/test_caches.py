"""Compiled code of other processes, out of inductor's and AOTAutograd's caches: it reduces with the wrapper at hand."""

import copy
import os

import torch
import torch.distributed as dist

from tests.compiler.models import batch, error, loss_of, make
from tests.compiler.test_gradients import IN_GRAPH, check, train
from tests.inductor_cache import own_cache
from tests.ranks import run_ranks


def _cold(rank, world, directory):
    """The string and inductor, nothing compiled yet; what was compiled, as torch saves it."""
    os.environ.update(own_cache(directory))
    answers = train(rank, world, "inductor", ["mlp", "both"])
    saved = torch.compiler.save_cache_artifacts()
    return answers, saved[0] if saved else b""


def _hits():
    from torch._dynamo.utils import counters

    found = counters["aot_autograd"], counters["inductor"]
    return [counts[kind] for counts in found for kind in counts if kind.endswith("cache_miss")], found[0][
        "autograd_cache_hit"
    ]


def _other_wrappers():
    """Two wrappers of one class in turns: all ranks average, and each one alone; worst error of both, and counts."""
    from torchshard.ddp import DistributedDataParallel

    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([other]) for other in range(world)][rank]
    found = []
    trials = []
    for group, shares in ((dist.group.WORLD, range(world)), (alone, [rank])):
        module = make("mlp")
        for p in module.parameters():
            torch.nn.init.normal_(p, 0, 0.2)
        reference = copy.deepcopy(module)
        ddp = DistributedDataParallel(module, bucket_cap_mb=0.01, process_group=group, gradient_as_bucket_view=True)
        trials.append((ddp, torch.compile(ddp, backend="torchshard"), reference, shares))
    x, y = batch("mlp", 8)
    for _ in range(3):
        for ddp, model, reference, shares in trials:
            ddp.zero_grad()
            reference.zero_grad()
            loss_of(model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
            for share in shares:
                (loss_of(reference(x.chunk(world)[share]), y.chunk(world)[share]) / len(shares)).backward()
            found.append(error(ddp, reference))
    return found, [(ddp.reducer.counters.in_graph, ddp.reducer.counters.by_hook) for ddp, *_ in trials]


def _warm(rank, world, directory, fresh, saved):
    """Rank 0 shares the directory of the cold run; rank 1 has one of its own, and loads what was saved."""
    os.environ.update(own_cache(fresh if rank else directory))
    if rank:
        torch.compiler.load_cache_artifacts(saved)
    answers = train(rank, world, "inductor", ["mlp", "both"])
    torch._dynamo.reset()
    others = _other_wrappers()
    misses, hits = _hits()
    return answers, others, misses, hits


def test_two_processes_and_one_cache(tmp_path):
    directory, fresh = str(tmp_path / "shared"), str(tmp_path / "fresh")
    cold = run_ranks(2, _cold, directory, timeout=280)
    for answers, _ in cold:
        check(answers, IN_GRAPH)
    for answers, (errors, counts), misses, hits in run_ranks(2, _warm, directory, fresh, cold[1][1], timeout=200):
        check(answers, IN_GRAPH)
        assert max(errors) < 1e-5
        assert counts == [(16, 8), (16, 8)]
        assert misses == []
        assert hits >= 4
