import gc
import os
import sys
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from tests.ranks import meet, run_ranks
from torchshard.comm import lines, words
from torchshard.comm.comparing import differing, known_alike
from torchshard.comm.group import Group
from torchshard.errors import RankMismatchError

CPU = torch.device("cpu")


def _group(limit=60):
    group = dist.new_group(timeout=timedelta(seconds=limit))
    return Group(group.group_name, group.size(), group.rank()), group


def _compares(rank, world, elsewhere):
    if elsewhere:
        words.machine = lambda: rank // 2
    group, process_group = _group()
    first = differing("a", CPU, group, process_group)
    with CommDebugMode() as sent:
        found = [first, *(differing(text, CPU, group, process_group) for text in ("a", "b" * (rank + 1), "c"))]
        alike = [known_alike(said, CPU, process_group) for said in (b"x", bytes([rank]))]
    return found, alike, sent.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_ranks_compare_by_words_on_one_machine_and_by_a_collective_elsewhere(elsewhere):
    others = [(rank, "b" * (rank + 1)) for rank in range(3)]
    alike = [None, None] if elsewhere else [True, False]
    assert run_ranks(3, _compares, elsewhere) == [([None, None, others, None], alike, 3 if elsewhere else 0)] * 3


def _closed(near, word):
    raise OSError("no sockets here")


def _no_sockets(rank, world):
    if rank == 1:
        words.Near.open = _closed
    group, process_group = _group()
    return words.words_of(process_group, CPU), differing("a", CPU, group, process_group)


def test_a_rank_without_sockets_has_all_compare_by_a_collective():
    assert run_ranks(2, _no_sockets) == [(None, None)] * 2


def _dies(rank, world, place):
    _, process_group = _group()
    said = words.words_of(process_group, CPU)
    assert said.same(1)
    meet(place, rank, world)
    if rank == 1:
        if os.fork():
            os._exit(1)
        time.sleep(30)  # a worker of a loader, say, that outlives it
        os._exit(0)
    start, messages = time.monotonic(), []
    for _ in range(2):
        with pytest.raises(RankMismatchError) as caught:
            said.same(2)
        messages.append(str(caught.value))
    dist.destroy_process_group()  # without the barrier of the harness
    return messages, time.monotonic() - start < 30


def test_a_rank_that_is_lost_is_named_at_once_and_again(tmp_path):
    found = run_ranks(3, _dies, str(tmp_path / "signs"), expect_dead=(1,))
    for messages, soon in (found[0], found[2]):
        assert all("no answer within 3 s from rank 1" in message for message in messages)
        assert soon


def _late(rank, world):
    _, process_group = _group(limit=2)
    said = words.words_of(process_group, CPU)
    if rank == 1:
        time.sleep(3)
    try:
        said.same(1)
    except RuntimeError as error:
        return str(error)
    return None


def test_one_that_comes_too_late_is_an_error_on_all():
    for message in run_ranks(2, _late):
        assert "word 1 of 2 ranks" in message


def _draws(rank, world):
    from torchshard import DTensor, Shard, init_device_mesh
    from torchshard.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (world,))
    x = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)])
    torch.manual_seed(rank)
    made, counts = [], []
    for _ in range(3):
        with CommDebugMode() as sent:
            made.append(torch.nn.functional.dropout(x).to_local())
        counts.append(sent.get_total_counts())
    return torch.stack(made).tolist(), counts


def test_generators_that_are_alike_are_not_sent():
    found = run_ranks(2, _draws)
    assert [counts for _, counts in found] == [[1, 0, 0]] * 2
    torch.manual_seed(0)
    whole = torch.stack([torch.nn.functional.dropout(torch.ones(8, 3)) for _ in range(3)])
    assert torch.equal(torch.cat([torch.tensor(made) for made, _ in found], 1), whole)


def test_a_container_with_a_network_of_its_own_is_a_machine_of_its_own(monkeypatch):
    here = lines.machine()
    assert here == lines.machine() != 0
    for namespace in lines._SHARED:
        with monkeypatch.context() as patched:
            patched.setattr(lines, "_SHARED", [at for at in lines._SHARED if at != namespace])
            assert lines.machine() not in (0, here)
    monkeypatch.setattr(lines, "_SHARED", ["/proc/nowhere"])
    assert lines.machine() == 0


def _unclosed(rank, world):
    pids, complaints = [None] * world, []
    dist.all_gather_object(pids, os.getpid())
    sys.unraisablehook = lambda told: complaints.append(str(told.exc_value))
    warnings.simplefilter("error", ResourceWarning)
    ways = (lines.Near(pids), lines.Far())
    found = [len(lines.connect(dist.group.WORLD, places, timedelta(seconds=20))) for places in ways]
    gc.collect()
    return found, complaints


def test_lines_that_nobody_has_any_more_end_without_a_warning():
    """As those of a group that was destroyed, in a program under python -W error."""
    assert run_ranks(2, _unclosed) == [([1, 1], [])] * 2
