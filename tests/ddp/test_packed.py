"""Gradients whose numbers are packed on their way, as bucket_cap_mb="auto" decides over a slow link."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.slow_link import run_on_slow_link, why_not
from tests.models import mlp
from tests.ranks import by_messages, run_ranks
from torchshard.simulation import LinkSpeed


def pack_always():
    """From now on the link is slow, and packing is found to be better."""
    from torchshard.comm import probing
    from torchshard.ddp.reducing import observed

    by_messages()
    probing._SLOW = float("inf")
    observed.best_link = lambda ready, times, links, each: len(links) - 1


def never_pack():
    from torchshard.ddp.reducing import observed

    observed.best_link = lambda ready, times, links, each: 0


def _sums(rank):
    """How many packed sums this process has begun."""
    from torchshard.comm import packed

    return packed._known[dist.group.WORLD]._count


def _batch(rank, step, dtype=torch.float32):
    return torch.randn(16, 256, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def _steps(model, rank, dtype=torch.float32):
    """The gradients of five steps, one of them accumulated."""
    found = []
    for step in range(5):
        model.zero_grad()
        if step == 3:
            with model.no_sync() if hasattr(model, "no_sync") else model._orig_mod.no_sync():
                model(_batch(rank, 9, dtype)).square().mean().backward()
        model(_batch(rank, step, dtype)).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def _same(rank, world, kwargs, compiled, dtype):
    from torchshard.ddp import DistributedDataParallel

    pack_always()
    torch.manual_seed(0)
    module = mlp(256, 4).to(dtype)
    packed = DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb="auto", **kwargs)
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(module))
    before = _sums(rank)
    found = _steps(torch.compile(packed, backend="torchshard", fullgraph=True) if compiled else packed, rank, dtype)
    assert packed.reducer.link.packed
    assert _sums(rank) - before >= 3
    for ours, expected in zip(found, _steps(theirs, rank, dtype), strict=True):
        for a, b in zip(ours, expected, strict=True):
            assert torch.equal(a, b) if not compiled else torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    return [[g.view(-1).view(torch.uint8).numpy().tobytes() for g in step] for step in found]


CASES = {
    "as it is": ({}, False, torch.float32),
    "bucket views": ({"gradient_as_bucket_view": True}, False, torch.float32),
    "unused parameters": ({"find_unused_parameters": True}, False, torch.float32),
    "static graph": ({"static_graph": True}, False, torch.float32),
    "bfloat16": ({}, False, torch.bfloat16),
    "float64": ({}, False, torch.float64),
    "compiled": ({}, True, torch.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_torch(case):
    first, second = run_ranks(2, _same, *CASES[case], timeout=120)
    assert first == second


def _joins(rank, world):
    from torchshard.ddp import DistributedDataParallel

    pack_always()
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp(256, 4), bucket_cap_mb="auto")
    for step in range(2):
        model(_batch(rank, step)).square().mean().backward()
    before = _sums(rank)
    with model.join():
        for step in range(3 + rank):
            model.zero_grad()
            model(_batch(rank, step)).square().mean().backward()
    return _sums(rank) - before, [float(p.sum()) for p in model.parameters()]


def test_uneven_inputs():
    first, second = run_ranks(2, _joins, timeout=60)
    assert first == second
    assert first[0] >= 4


def _turns(rank, world):
    """Learning anew may bring the plain way back, and a hook of one's own is never packed."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from torchshard.ddp import DistributedDataParallel

    pack_always()
    model = DistributedDataParallel(mlp(256, 4), bucket_cap_mb="auto")

    def ways(model):
        counts = []
        for step in range(4):
            before = _sums(rank)
            model(_batch(rank, step)).square().mean().backward()
            counts.append(_sums(rank) - before)
        return counts[-1] > 0, model.reducer.link.packed, "packed on their way" in str(model.explain())

    found = [ways(model)]
    never_pack()
    found.append(ways(DistributedDataParallel(mlp(256, 4), bucket_cap_mb="auto")))
    pack_always()
    hooked = DistributedDataParallel(mlp(256, 4), bucket_cap_mb="auto")
    hooked.register_comm_hook(None, fp16_compress_hook)
    found.append(ways(hooked))
    later = DistributedDataParallel(mlp(256, 4), bucket_cap_mb="auto")
    assert ways(later)[0]
    later.register_comm_hook(None, fp16_compress_hook)
    return [*found, ways(later)]


def test_it_is_the_wrapper_that_decides():
    assert run_ranks(2, _turns, timeout=60) == [[(True,) * 3, (False,) * 3, (False,) * 3, (False,) * 3]] * 2


def _measured(rank, world):
    from torchshard.comm.probing import links_of

    pack_always()
    torch.set_default_dtype(torch.float64)  # which is none of the link's business
    torch.set_default_device("meta")
    device, group = torch.device("cpu"), dist.group.WORLD
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    links = links_of(group, device, wait=lambda works: [work.wait() for work in works])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert links_of(group, device, wait=list) is links
    return links


def test_both_ways_are_measured_and_all_ranks_know_the_same():
    first, second = run_ranks(2, _measured, timeout=60)
    assert first == second
    plain, packed = first
    assert (plain.packed, plain.work, packed.packed) == (False, 0.0, True)
    assert isinstance(packed, LinkSpeed)
    assert 0 < packed.work < 1e-6


def _fast(rank, world):
    from torchshard.comm import packed, probing
    from torchshard.ddp import DistributedDataParallel

    by_messages()
    probing._SLOW = 1.0  # bytes a second
    model = DistributedDataParallel(mlp(256, 4), bucket_cap_mb="auto")
    return len(model.reducer.links), len(packed._known)


def test_over_a_fast_link_nothing_is_tried():
    assert run_ranks(2, _fast, timeout=60) == [(1, 0)] * 2


def over_a_slow_link(rank, world):
    """What "auto" decides by itself; whether the gradients are torch's to the bit, in any case."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module, packed = mlp(256, 4), False
    expected = _steps(nn.parallel.DistributedDataParallel(copy.deepcopy(module)), rank)
    for _ in range(4):  # in one of them the machine may be busy with something else, and backward seem to be long
        ours = DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb="auto")
        for step, theirs in zip(_steps(ours, rank), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(step, theirs, strict=True))
        packed |= ours.reducer.link.packed
    return packed


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_over_a_slow_link():
    """100 Mbit/s, where a step of some ms waits for 100 ms."""
    answers = run_on_slow_link(100, 2, "tests.ddp.test_packed:over_a_slow_link")
    assert answers == [True, True]
