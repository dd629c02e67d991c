"""Waiting for works that torch makes of futures, as groups made in Python give: they take no time to wait for."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from tests.ranks import run_ranks
from torchshard.comm.agreement import Agreement
from torchshard.comm.waiting import wait_for
from torchshard.errors import RankMismatchError


def of_a_future(end, at_once):
    future = torch.futures.Future()
    timer = threading.Timer(0 if at_once else 0.3, end, (future,))
    timer.start()
    if at_once:
        timer.join()
    return _create_work_from_future(future), future


def fail(future):
    future.set_exception(ValueError("the line is cut"))


def waits(rank, world):
    agreement = Agreement(dist.group.WORLD, torch.device("cpu"))
    for at_once in (True, False):
        work, future = of_a_future(lambda f: f.set_result([]), at_once)
        wait_for([work], agreement, 0, True)
        assert future.done()
    work, _ = of_a_future(fail, at_once=False)
    with pytest.raises(RankMismatchError, match="the line is cut"):
        wait_for([work], agreement, 0, True, "a sum")


def test_works_of_futures():
    run_ranks(2, waits)
