import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, run_ranks


def _sum(rank, world, scale):
    x = torch.full((3,), float(rank + 1) * scale)
    dist.all_reduce(x)
    return x.tolist()


def _one_raises(rank, world):
    if rank == 1:
        raise ValueError("rank 1 says no")
    dist.barrier()


def _sleeps(rank, world):
    time.sleep(60)


def test_ranks_talk_and_answer_in_order():
    assert run_ranks(2, _sum, 2.0) == [[6.0] * 3] * 2


def test_a_rank_that_raises_is_quoted():
    with pytest.raises(RankFailed, match="rank 1 says no"):
        run_ranks(2, _one_raises)


def test_the_time_limit_holds():
    start = time.monotonic()
    with pytest.raises(RankFailed, match="still running"):
        run_ranks(2, _sleeps, timeout=2)
    assert time.monotonic() - start < 30
