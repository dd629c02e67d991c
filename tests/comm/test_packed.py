"""Sums over a slow link, of packed numbers."""

import gc
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from torchshard.errors import RankMismatchError

CPU = torch.device("cpu")
MANY = 40_000


def all_reduce_of(group=None, chunk=5000, owner=0):
    """What packs tensors of whatever size, in chunks of which the larger ones have several."""
    from torchshard.comm import packed

    packed.SMALLEST, packed.CHUNK = 1, chunk
    group = group or dist.group.WORLD
    assert packed.look_for_lines(group, CPU) is not None
    return packed.packed_all_reduce_of(group, owner)


def told_in_memory():
    from torchshard.comm import summing

    summing.look_for_neighbours(dist.group.WORLD, CPU)
    assert summing._known[dist.group.WORLD] is not None
    return summing.all_reduce_of(dist.group.WORLD)


def _values(rank, world):
    """Of packed tensors exactly what eager torch has when it adds the ranks' up in order, the owner's first."""
    from torchshard.comm.terms import segments

    all_reduce = all_reduce_of()
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for shape in ((1,), (2,), (7,), (1000,), (3, 5), (MANY * world + 1,)):
            generator = torch.Generator().manual_seed(0)
            terms = [torch.randn(shape, generator=generator).to(dtype) for _ in range(world)]
            x = terms[rank].clone()
            before = x._version
            all_reduce(x).wait()
            assert x._version == before  # as after any collective
            for owner, (begin, end) in enumerate(segments(x.numel(), world)):
                parts = [term.view(-1)[begin:end] for term in terms]
                own = parts.pop(owner).clone()
                for part in parts:
                    own += part
                assert torch.equal(x.view(-1)[begin:end], own)
            found.append(x)
    many = [torch.full((5000,), float(rank + k)) for k in range(20)]
    for work in [all_reduce(x) for x in many][::-1]:  # all on their way at once
        work.wait()
    assert [float(x[-1]) for x in many] == [sum(range(world)) + k * world for k in range(20)]
    return [x.view(-1).view(torch.uint8).numpy().tobytes() for x in found]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_values_are_right_and_the_same_bits_on_all_ranks(world):
    first, *others = run_ranks(world, _values, timeout=60)
    assert all(other == first for other in others)


def _slow_readers(rank, world):
    """Nobody waits for ever where connections hold less than a chunk, and ranks come late."""
    from torchshard.comm import lines, packed

    reach = lines.Far.reach

    def late(*args):
        time.sleep(0.1 * (world - rank))  # the last ranks come first
        return reach(*args)

    lines.Far.reach = late
    sums = packed.look_for_lines(dist.group.WORLD, CPU)
    assert [*sums._peers.terms] == [*sums._peers.sums] == [r for r in range(world) if r != rank]
    for line in (*sums._peers.terms.values(), *sums._peers.sums.values()):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    all_reduce = all_reduce_of(chunk=20_000)
    time.sleep(0.1 * rank)
    many = [torch.full((n,), 1.0) for n in (5000, 100_000, 1, 50_000, 7)]
    works = [all_reduce(x) for x in many]
    for work in works:
        assert work.wait(timedelta(seconds=50))
    return [float(x.min()) for x in many]


def test_a_full_connection_stops_nobody():
    assert run_ranks(4, _slow_readers, timeout=90) == [[4.0] * 5] * 4


def _what_others_sum(rank, world):
    """Small, whole, sparse and strided tensors go by the group's own all-reduce."""
    from torchshard.comm import packed

    packed.look_for_lines(dist.group.WORLD, CPU)
    all_reduce = packed.packed_all_reduce_of(dist.group.WORLD)
    found = [torch.ones(100), torch.ones(MANY, dtype=torch.int64), torch.ones(200, 200).to_sparse(), torch.ones(MANY)]
    works = [all_reduce(x) for x in found]
    for work in works:
        work.wait()
    return [type(work).__name__ for work in works], float(found[3].sum())


def test_what_cannot_be_packed_goes_by_the_group():
    assert run_ranks(2, _what_others_sum, timeout=60)[0] == (["Work", "Work", "Work", "Promise"], 2.0 * MANY)


def _subgroups(rank, world):
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    whole = all_reduce_of()
    x = torch.full((MANY,), 1.0 + rank)
    work = whole(x)
    for group in groups:
        if dist.get_rank(group) >= 0:
            y = torch.full((500,), 1.0 + rank)
            all_reduce_of(group)(y).wait()
            assert float(y[0]) == sum(1.0 + r for r in dist.get_process_group_ranks(group))
    work.wait()
    return float(x[0])


def test_groups_that_overlap():
    assert run_ranks(3, _subgroups, timeout=60) == [6.0] * 3


def _unable(rank, world, why):
    from torchshard.comm import lines, packed

    lines._TO_CONNECT, limit = 1.0, timedelta(seconds=60)
    if rank == 1 and why == "the user":
        os.environ[packed.SWITCH] = "0"
    elif rank == 1 and why == "elsewhere":
        lines.Far.reach = lambda *args: (_ for _ in ()).throw(ConnectionRefusedError())
    elif why == "a short limit":
        lines._TO_CONNECT = 30.0
        limit = timedelta(seconds=3)
        if rank == 1:
            lines.Far.reach = _unanswered
    elif rank == 1 and why == "another word":
        lines._GREETING = _Lying(lines._GREETING)
    group, start = dist.new_group(timeout=limit), time.monotonic()
    if rank == 1 and why == "no interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    assert packed.look_for_lines(group, CPU) is None
    passed = time.monotonic() - start
    dist.all_reduce(torch.ones(3), group=group)  # which still works
    return passed


def _unanswered(self, word, place, within):
    """As by a firewall that drops what comes."""
    time.sleep(within)
    raise TimeoutError


class _Lying:
    def __init__(self, greeting):
        self.size, self.unpack, self._greeting = greeting.size, greeting.unpack, greeting

    def pack(self, rank, word):
        return self._greeting.pack(rank, bytes(16))


@pytest.mark.parametrize("why", ["the user", "no interface", "elsewhere", "another word", "a short limit"])
def test_where_one_rank_cannot_nobody_packs(why):
    assert max(run_ranks(3, _unable, why, timeout=60)) < 10


def _strangers(rank, world):
    """Who connects without the word is left outside, whatever he says or does not say."""
    from torchshard.comm import lines

    own, doors = lines.Far.open, []

    def opened(self, word):
        door, place = own(self, word)
        if rank == 0:
            for said in (b"", None, b"x" * 24, b"GET / HTTP/1.1\r\n\r\n" * 9):
                stranger = socket.create_connection(door.getsockname())
                stranger.sendall(said or b"")
                doors.append(stranger)
                if said is not None:
                    stranger.shutdown(socket.SHUT_WR)
        return door, place

    lines.Far.open, lines._TO_GREET = opened, 0.5
    x = torch.ones(MANY)
    all_reduce_of()(x).wait()
    for stranger in doors:
        stranger.close()
    return float(x.sum())


def test_strangers_are_left_outside():
    assert run_ranks(2, _strangers, timeout=60) == [2.0 * MANY] * 2


def _different(rank, world):
    all_reduce = all_reduce_of()
    with pytest.raises(RankMismatchError) as caught:
        all_reduce(torch.ones(10 + rank)).wait()
    with pytest.raises(RankMismatchError):  # nothing can be summed any more
        all_reduce(torch.ones(10)).wait()
    with pytest.raises(RankMismatchError, match="as many for another wrapper"):
        all_reduce_of(dist.new_group(), owner=rank)(torch.ones(10)).wait()
    dist.barrier()
    return str(caught.value)


def test_other_tensors_are_named():
    first, second = run_ranks(2, _different, timeout=60)
    assert "rank 0 and rank 1 sum different tensors" in first
    assert "10 elements of torch.float32, as on rank 0" in first
    assert "got:      11 elements of the same dtype" in first
    assert "sum 1 of this process group" in first
    assert "11 elements of torch.float32, as on rank 1" in second


def _fails_later(rank, world, what):
    """A sum that fails breaks those under way: they are right, or they raise."""
    from torchshard.comm import packed

    all_reduce = all_reduce_of()
    if rank == 0:  # sends slowly
        own = packed._Sum.send

        def send(job, lines, *args):
            if lines is job.peers.sums:
                time.sleep(0.15)
            own(job, lines, *args)

        packed._Sum.send = send
    x = torch.full((100_000,), 1.0 + rank)
    slow = all_reduce(x)
    if what == "a rank dies" and rank == 1:
        time.sleep(0.3)
        os._exit(0)
    later = all_reduce(torch.ones(MANY + rank))
    found = []
    for work in (slow, later):
        try:
            work.wait()
            found.append("right" if work is slow and bool((x == 3.0).all()) else "wrong")
        except RuntimeError as error:
            found.append(type(error).__name__)
    if what == "a rank dies":
        dist.destroy_process_group()  # without the barrier of the harness
    return found


@pytest.mark.parametrize("what", ["a rank dies", "tensors differ"])
def test_a_failure_is_no_earlier_sums_success(what):
    dead = (1,) if what == "a rank dies" else ()
    found = run_ranks(2, _fails_later, what, timeout=60, expect_dead=dead)[: 2 - len(dead)]
    assert all(slow in ("right", "RuntimeError") for slow, _ in found)
    assert all(later in ("RankMismatchError", "RuntimeError") for _, later in found)
    assert dead or any(later == "RankMismatchError" for _, later in found)


def _kept(rank, world, way):
    """Of a tensor whose sum has failed nothing is kept."""
    all_reduce = all_reduce_of() if way == "packed" else told_in_memory()
    x = torch.ones(MANY + rank)
    with pytest.raises(RankMismatchError):
        all_reduce(x).wait()
    seen = weakref.ref(x)
    del x
    deadline = time.monotonic() + 5
    while seen() is not None and time.monotonic() < deadline:  # the thread that told of it may still hold it
        gc.collect()
        time.sleep(0.01)
    return seen() is None


@pytest.mark.parametrize("way", ["packed", "in memory"])
def test_a_tensor_whose_sum_has_failed_is_not_kept(way):
    assert run_ranks(2, _kept, way, timeout=60) == [True, True]


_ENDS = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from torchshard.comm import packed
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
packed.look_for_lines(dist.group.WORLD, torch.device("cpu"))
all_reduce = packed.packed_all_reduce_of(dist.group.WORLD)
works = [all_reduce(torch.ones(1 << 20)) for _ in range(30 if sys.argv[2] == "0" else 3)]
works[2].wait(timedelta(seconds=20))
print("ends", flush=True)
dist.barrier()
"""


def test_a_process_ends_while_sums_are_under_way(tmp_path):
    """Its threads are stopped, and do not abort it."""
    for turn in range(2):
        place = str(tmp_path / f"store{turn}")
        command = [sys.executable, "-c", _ENDS, place]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=60) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], said
        assert all(out == "ends\n" and "terminate" not in err for out, err in said)


def _alone(rank, world):
    """A sum that nobody joins waits."""
    all_reduce, x = all_reduce_of(), torch.full((MANY,), 1.0 + rank)
    if rank == 0:
        work = all_reduce(x)
        with pytest.raises(RuntimeError, match="no result in time"):
            work.wait(timedelta(seconds=0.3))
        assert not work.is_completed()
        dist.barrier()
    else:
        dist.barrier()
        work = all_reduce(x)
    work.wait()
    return float(x[0])


def test_a_sum_that_nobody_joins_waits():
    assert run_ranks(2, _alone, timeout=60) == [3.0, 3.0]


def _dies(rank, world):
    all_reduce, x = all_reduce_of(), torch.ones(MANY)
    all_reduce(x).wait()
    if rank == 1:
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"sum 2 over 2 ranks: rank 1"):
        all_reduce(x).wait()
    with pytest.raises(RuntimeError, match=r"sum 2 over 2 ranks: rank 1"):
        all_reduce(x).wait()
    assert time.monotonic() - start < 5
    dist.destroy_process_group()  # without the barrier of the harness


def test_a_rank_that_dies_is_named_at_once():
    run_ranks(2, _dies, timeout=60, expect_dead=(1,))


def _late(rank, world):
    """As long as the group's collectives may take."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    all_reduce = all_reduce_of(group)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 does not answer: timed out"):
            all_reduce(torch.ones(MANY)).wait()
        assert 0.5 < time.monotonic() - start < 8
    dist.barrier()


def test_a_rank_that_does_not_come_is_named_in_time():
    run_ranks(2, _late, timeout=60)


def _profiled(rank, world):
    all_reduce, x = all_reduce_of(), torch.ones(MANY)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        all_reduce(x).wait()
    return [event.is_async for event in seen.events() if event.name == "gloo:all_reduce"]


def test_a_profiler_sees_sums():
    assert run_ranks(2, _profiled, timeout=60) == [[True]] * 2


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "torchshard sums"]


def _ends(rank, world):
    """With the group go its threads and its connections."""
    from torchshard.comm import packed

    group = dist.new_group()
    all_reduce, x = all_reduce_of(group), torch.ones(MANY)
    peers = packed._known[group]._peers
    lines = [*peers.terms.values(), *peers.sums.values()]
    all_reduce(x).wait()
    assert len(_threads()) == 3
    dist.barrier()
    dist.destroy_process_group(group)
    del group, all_reduce
    gc.collect()
    deadline = time.monotonic() + 5
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _threads()
    assert len(packed._known) == 0
    return [line.fileno() for line in lines]


def test_nothing_is_left_of_a_group_that_is_destroyed():
    assert run_ranks(2, _ends, timeout=60) == [[-1, -1]] * 2


def _forked(rank, world, way):
    """A forked process that ends in order, as it does here, takes nothing from its parent."""
    from torchshard.comm import workers

    all_reduce = all_reduce_of() if way == "packed" else told_in_memory()
    x = torch.ones(MANY)
    all_reduce(x).wait()
    if not (pid := os.fork()):
        workers.rest()
        os._exit(0)
    os.waitpid(pid, 0)
    all_reduce(x).wait()
    return float(x[0])


@pytest.mark.parametrize("way", ["packed", "in memory"])
def test_a_forked_process_leaves_the_connections(way):
    assert run_ranks(2, _forked, way, timeout=60) == [4.0, 4.0]
