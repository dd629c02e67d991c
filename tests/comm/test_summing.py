"""Sums over ranks of one machine, made in one another's memory."""

import gc
import os
import struct
import threading
import time
import warnings
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import by_messages, run_ranks
from torchshard.comm.terms import segments
from torchshard.errors import RankMismatchError

CPU = torch.device("cpu")


def all_reduce_of(group=None, said=0, owner=0, whole=0):
    """What sums without the group's transport: in memory, of whatever size, what is larger than may be said."""
    from torchshard.comm import reach, summing

    reach.SAID, reach.WHOLE = said, whole
    group = group or dist.group.WORLD
    summing.look_for_neighbours(group, CPU)
    assert summing._known[group] is not None
    return summing.all_reduce_of(group, owner)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_segments_are_a_partition(numel, ranks):
    bounds = segments(numel, ranks)
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == numel
    lengths = [end - begin for begin, end in bounds]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == -(-numel // ranks)


def _terms(shape, dtype, world):
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point or dtype.is_complex:
        return [torch.randn(shape, dtype=dtype, generator=generator) for _ in range(world)]
    return [torch.randint(-9, 9, shape, dtype=dtype, generator=generator) for _ in range(world)]


def _is_sum(x, terms):
    """Whether it is, up to a rounding of each addition."""
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    exact, size = sum(t.to(wide) for t in terms), sum(t.abs().double() for t in terms)
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() or x.is_complex() else 0
    return bool(((x.to(wide) - exact).abs() <= len(terms) * eps * size).all())


def _values(rank, world, said, whole):
    all_reduce = all_reduce_of(said=said, whole=whole)
    found = []
    shapes = [(1,), (2,), (7,), (1000,), (3, 5), (32 * 1024 * world + 1,), (400_001,)]
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64]
    for dtype in dtypes:
        for shape in shapes:
            terms = _terms(shape, dtype, world)
            x = terms[rank].clone()
            before = x._version
            all_reduce(x).wait()
            assert x._version == before  # as after any collective
            assert _is_sum(x, terms)
            found.append(x)
    many = [torch.full((5000,), float(rank + k)) for k in range(20)]
    for work in [all_reduce(x) for x in many][::-1]:  # all on their way at once
        work.wait()
    assert [float(x[-1]) for x in many] == [sum(range(world)) + k * world for k in range(20)]
    return [x.view(-1).view(torch.uint8).numpy().tobytes() for x in found]


@pytest.mark.parametrize(("said", "whole"), [(0, 0), (0, 2**20), (64 * 1024, 0)])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_values_are_right_and_the_same_bits_on_all_ranks(world, said, whole):
    first, *others = run_ranks(world, _values, said, whole, timeout=60)
    assert all(other == first for other in others)


def _what_others_sum(rank, world):
    """Empty, sparse and strided tensors go by the group's own all-reduce."""
    all_reduce = all_reduce_of()
    found = [torch.ones(0), torch.ones(100, 100).to_sparse(), torch.ones(2000)]
    works = [all_reduce(x) for x in found]
    for work in works:
        work.wait()
    return [type(work).__name__ for work in works], float(found[2].sum())


def test_empty_and_sparse_tensors_go_by_the_group():
    kinds, total = run_ranks(2, _what_others_sum, timeout=60)[0]
    assert kinds == ["Work", "Work", "Promise"]
    assert total == 4000


def _subgroups(rank, world):
    """Groups in which ranks have other numbers, side by side with the group of all."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    whole = all_reduce_of()
    x = torch.full((3000,), 1.0 + rank)
    work = whole(x)
    for group in groups:
        if dist.get_rank(group) >= 0:
            y = torch.full((500,), 1.0 + rank)
            all_reduce_of(group)(y).wait()
            assert float(y[0]) == sum(1.0 + r for r in dist.get_process_group_ranks(group))
    work.wait()
    assert float(x[0]) == 6


def test_groups_that_overlap():
    run_ranks(3, _subgroups, timeout=60)


def _unable(rank, world, why):
    from torchshard.comm import lines, summing

    group = dist.group.WORLD
    if rank == 1 and why == "memory":
        by_messages()
    elif rank == 1 and why == "the user":
        os.environ["TORCHSHARD_READ_NEIGHBOURS"] = "0"
    elif why == "sockets":
        lines._TO_CONNECT = 0.5
        if rank == 1:
            lines.Near._address = lambda *args: b"\0torchshard-nowhere-" + os.urandom(8)
    elif why == "a stranger":
        lines._TO_CONNECT = 0.5
        if rank == 0:
            os_pids = summing.process_ids
            summing.process_ids = lambda *a: (os_pids(*a)[0], 1)  # who connects is another process
    elif why == "no name":
        lines._TO_CONNECT = 0.5
        lines._GREETING = struct.Struct("b16s") if rank == 1 else lines._GREETING  # too short to be one
    summing.look_for_neighbours(group, CPU)
    assert summing._known[group] is None
    x = torch.ones(10)
    summing.all_reduce_of(group)(x).wait()
    assert float(x[0]) == world


@pytest.mark.parametrize("why", ["memory", "the user", "sockets", "a stranger", "no name"])
def test_where_one_rank_cannot_all_use_the_group(why):
    run_ranks(2, _unable, why, timeout=60)


def _different(rank, world, said):
    all_reduce = all_reduce_of(said=said)
    with pytest.raises(RankMismatchError) as caught:
        all_reduce(torch.ones(10 + rank)).wait()
    with pytest.raises(RankMismatchError, match="as many for another wrapper"):
        all_reduce_of(dist.new_group(), said, owner=rank)(torch.ones(10)).wait()
    return str(caught.value)


@pytest.mark.parametrize("said", [0, 42, 64 * 1024])
def test_other_tensors_are_named(said):
    first, second = run_ranks(2, _different, said, timeout=60)
    assert "rank 0 and rank 1 sum different tensors" in first
    assert "10 elements of torch.float32, as on rank 0" in first
    assert "got:      11 elements of the same dtype" in first
    assert "sum 1 of this process group" in first
    assert "11 elements of torch.float32, as on rank 1" in second


def _out_of_step(rank, world):
    """A rank that has summed something alone."""
    all_reduce = all_reduce_of()
    if rank == 0:
        all_reduce(torch.ones(4))
        time.sleep(0.2)
    x = torch.full((4,), 1.0 + rank)
    if rank == 1:
        all_reduce(x).wait()  # with the first of rank 0
        assert float(x[0]) == 3
    else:
        work = all_reduce(x)
        with pytest.raises(RuntimeError, match="no result in time"):
            work.wait(timedelta(seconds=0.3))
        assert not work.is_completed()
    dist.barrier()


def test_a_sum_that_nobody_joins_waits():
    run_ranks(2, _out_of_step, timeout=60)


def _dies(rank, world):
    all_reduce = all_reduce_of()
    x = torch.ones(100_000)
    all_reduce(x).wait()
    if rank == 1:
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"sum 2 over 2 ranks: rank 1"):
        all_reduce(x).wait()
    assert time.monotonic() - start < 5
    dist.destroy_process_group()  # without the barrier of the harness


def test_a_rank_that_dies_is_named_at_once():
    run_ranks(2, _dies, timeout=60, expect_dead=(1,))


def _profiled(rank, world):
    """A profiler sees a sum as one of the group, until it is done."""
    all_reduce, x = all_reduce_of(said=100), [torch.ones(10), torch.ones(10_000)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for work in [all_reduce(t) for t in x]:
            work.wait()
    return [event.is_async for event in seen.events() if event.name == "gloo:all_reduce"]


def test_a_profiler_sees_sums():
    assert run_ranks(2, _profiled, timeout=60) == [[True, True]] * 2


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "torchshard sums"]


def _ends(rank, world):
    """With the group go its thread and its sockets, without a warning of Python's."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        sums = [_ends_of(sums) for sums in (0, 1)]
    assert not [w for w in warned if w.category is ResourceWarning]
    return sums


def _ends_of(sums):
    from torchshard.comm import summing

    group = dist.new_group()
    all_reduce = all_reduce_of(group)
    lines = [weakref.ref(line) for line in summing._known[group]._reach._words._lines.values()]
    x = torch.ones(100)
    for _ in range(sums):
        all_reduce(x).wait()
    assert len(_threads()) == sums
    dist.barrier()
    dist.destroy_process_group(group)
    del group, all_reduce
    gc.collect()
    deadline = time.monotonic() + 5
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _threads()
    assert len(summing._known) == 0
    assert [line() for line in lines] == [None]
    return float(x[0])


def test_nothing_is_left_of_a_group_that_is_destroyed():
    assert run_ranks(2, _ends, timeout=60) == [[1, 2]] * 2


def _complex_by_messages(rank, world):
    from torchshard.comm import summing

    terms = _terms((3, 5), torch.complex64, world)
    x = terms[rank].clone()
    assert dist.group.WORLD not in summing._known
    summing.all_reduce(x, dist.group.WORLD).wait()
    return _is_sum(x, terms)


def test_complex_numbers_by_messages():
    assert run_ranks(2, _complex_by_messages) == [True, True]
