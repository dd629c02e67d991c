import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import meet, run_ranks
from torchshard.comm.agreement import Agreement
from torchshard.comm.lost import raise_lost
from torchshard.comm.waiting import wait_for
from torchshard.errors import RankMismatchError

CPU = torch.device("cpu")


def _agreement(group=None):
    return Agreement(group or dist.group.WORLD, CPU)


def _refused(act):
    """The message with which `act` is refused, and whether that took less than ten seconds."""
    start = time.monotonic()
    try:
        act()
    except RankMismatchError as error:
        return str(error), time.monotonic() - start < 10
    return None


def _same_plans(rank, world):
    agreement = _agreement()
    for step in range(3):
        agreement.restart()
        agreement.confirm("a\nb", 2 * step)
        agreement.confirm("c", 2 * step + 1)
    asked = agreement._asked
    agreement.restart()
    agreement.confirm("c", 6)  # known, but not in this place
    return asked, agreement._asked, _keys(agreement)


def _keys(agreement):
    dist.barrier()
    store = agreement._store
    return [
        f"{k}/{name}" for k in range(4) for name in ("first", "text", "count", "left") if store.check([f"{k}/{name}"])
    ]


def test_a_known_plan_is_not_compared_again_and_leaves_no_keys():
    assert run_ranks(3, _same_plans) == [(2, 3, [])] * 3


def _last_differs(rank, world):
    agreement = _agreement()
    return _refused(lambda: agreement.confirm("a\nb 4\nc" if rank == world - 1 else "a\nb 3\nc", 0))


def test_every_rank_raises_when_only_the_last_differs():
    for message, soon in run_ranks(3, _last_differs):
        assert "have different buckets" in message
        assert "line 1 of the plan" in message
        assert "b 3" in message
        assert "b 4" in message
        assert soon


def _one_turns_to_another_plan(rank, world):
    group = dist.new_group(timeout=timedelta(seconds=8))  # of its own, because one of its collectives never ends
    agreement, x = _agreement(group), torch.ones(4)

    def step(text, position):
        agreement.restart()
        agreement.confirm(text, position)
        work = dist.all_reduce(x, async_op=True, group=group)
        wait_for([work], agreement, position + 1, True)

    step("old", 0)
    return _refused(lambda: step("new" if rank == 1 else "old", 1))


def test_ranks_stuck_in_a_collective_learn_why():
    answers = run_ranks(3, _one_turns_to_another_plan)
    assert all("expected: rank 1: new" in message and soon for message, soon in answers)


def _nobody_waits_for_a_rank_that_builds_its_plan_again(rank, world):
    agreement = _agreement()
    agreement.confirm("plan", 0)
    agreement.restart()
    start = time.monotonic()
    if rank == 1:
        time.sleep(1)
    agreement.confirm("".join(["pl", "an"]), 1)  # equal, not the same object
    return time.monotonic() - start


def test_building_the_same_plan_anew_blocks_nobody():
    first, second = run_ranks(2, _nobody_waits_for_a_rank_that_builds_its_plan_again)
    assert first < 0.5
    assert second < 1.5


def _slow_rank(rank, world):
    agreement = _agreement()
    if rank == 1:
        time.sleep(3)
    agreement.confirm("plan", 0)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if rank == 0:
        time.sleep(2.5)
    wait_for([work], agreement, 1, True)


def test_a_slow_rank_is_waited_for():
    run_ranks(2, _slow_rank)


def _subgroups(rank, world):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = _agreement(halves[rank // 2])
    every, other = _agreement(), _agreement()
    mine.confirm(f"half {rank // 2}", 0)
    every.confirm("all", 0)
    answer = _refused(lambda: other.confirm(f"rank {rank == 2}", 0))
    every.confirm("still well", 1)
    return answer


def test_groups_and_users_do_not_meet():
    assert all("rank True" in message for message, _ in run_ranks(4, _subgroups))


def _comes_too_late(rank, world):
    agreement = _agreement()
    agreement.limit = 1.0
    if rank:
        time.sleep(1.2)
    return _refused(lambda: agreement.confirm("plan", 0))


def test_waiting_in_vain_ends_and_who_comes_too_late_is_told():
    for message, soon in run_ranks(2, _comes_too_late):
        assert "rank 0 has new buckets and waits in vain" in message
        assert "2 ranks within 1 s" in message
        assert "1: not rank 1" in message
        assert soon


class _Late:
    """A store of which a rank asks for a verdict, and is answered when there is one."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def check(self, keys):
        if keys == ["verdict"]:
            self.store.set("counted", "")
            self.store.wait(keys)
        return self.store.check(keys)


def _one_is_behind(rank, world):
    """Ranks 1 and 3 agree to a plan and differ in the next while rank 0 still counts who has come to the first."""
    group = dist.new_group([0, 1, 3])
    if rank == 2:
        return None
    agreement = _agreement(group)
    if rank == 0:
        agreement._store = _Late(agreement._store)
    else:
        agreement._store.wait(["counted"])
    agreement.compare("same", 4)
    if rank == 0:
        agreement.check(5, "what all have begun")
        assert _refused(lambda: agreement.check(6, "what others have not begun"))
        assert _refused(lambda: agreement.check(5, "what all had begun", RuntimeError("connection reset")))
    return _refused(lambda: agreement.compare("one" if rank == 3 else "other", 5))


def test_a_rank_that_is_behind_takes_no_later_verdict_for_its_own():
    answers = run_ranks(4, _one_is_behind)
    assert answers.pop(2) is None
    for message, soon in answers:
        assert soon
        assert "ranks 1 and 3 have different buckets" in message


def _the_last_leaves(rank, world, here):
    import os

    meet(here, rank, world)
    if rank == world - 1:
        os._exit(0)
    agreement = _agreement()
    with pytest.raises(RankMismatchError) as caught:
        wait_for([dist.all_reduce(torch.ones(4), async_op=True)], agreement, 1, True, "the sum")
    dist.destroy_process_group()
    return str(caught.value)


def test_a_dead_rank_is_named_by_all_others(tmp_path):
    for message in run_ranks(3, _the_last_leaves, str(tmp_path / "here"), expect_dead=(2,))[:2]:
        assert "waited in vain for" in message
        assert "no answer within 3 s from rank 2" in message


def _fails_twice(rank, world, place):
    """A collective in which all ranks fail, and go on; then one that fails because the last rank is no more."""
    said = []
    for again in (False, True):
        if again:
            meet(place, rank, world)
            if rank == world - 1:
                os._exit(0)
        try:
            raise_lost(dist.group.WORLD, "a collective", RuntimeError("Invalid scalar type"))
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
    return said


def test_a_rank_that_answered_once_is_named_when_it_is_lost(tmp_path):
    for told in run_ranks(3, _fails_twice, str(tmp_path / "place"), expect_dead=(2,), timeout=60)[:2]:
        assert told[0] == "RuntimeError: Invalid scalar type"
        assert told[1].startswith("RankMismatchError")
        assert "from rank 2: lost" in told[1]
