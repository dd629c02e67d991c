"""Threads that do what is asked of them in turn."""

import atexit
import gc
import subprocess
import sys
import threading
import weakref

import torch
import torch.distributed as dist

from tests.ranks import fake_ranks
from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh
from torchshard.comm.workers import Worker, pause_at_exit
from torchshard.ddp.exchange import Exchange


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "torchshard sums"]


def _ended(event):
    assert event.wait(5)
    for thread in _threads():
        thread.join(5)
    return not _threads()


def test_jobs_are_done_in_turn_and_then_the_last_one():
    done, ended = [], threading.Event()
    worker = Worker(last=ended.set, stop=ended.set)
    for number in range(100):
        worker.do(lambda number=number: done.append((number, ended.is_set())))
    assert len(_threads()) == 1
    del worker
    gc.collect()
    assert _ended(ended)
    assert done == [(number, False) for number in range(100)]


def test_without_a_job_there_is_no_thread_but_the_last_job_is_done():
    ended = threading.Event()
    worker = Worker(last=ended.set, stop=ended.set)
    assert not _threads()
    del worker
    gc.collect()
    assert ended.is_set()


def test_nothing_of_a_job_is_kept():
    class Thing:
        pass

    thing, done, gone = Thing(), threading.Event(), threading.Event()
    weakref.finalize(thing, gone.set)
    worker = Worker(last=done.set, stop=done.set)
    worker.do(lambda thing=thing: None)
    del thing
    assert gone.wait(5)
    assert not done.is_set()
    del worker


def test_threads_end_with_the_interpreter():
    """What can be stopped is; what cannot does not hold it up for long."""
    code = (
        "import threading\n"
        "from torchshard.comm.workers import Worker\n"
        "go, never = threading.Event(), threading.Event()\n"
        "waits, stuck = Worker(last=print, stop=go.set), Worker(last=print, stop=print)\n"
        "waits.do(lambda: (go.wait(), print('done', flush=True)))\n"
        "stuck.do(never.wait)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, sorted(done.stdout.split()), done.stderr) == (0, ["done"], "")


def test_the_interpreter_pauses_for_gloo_where_backwards_communicate():
    """5 in 100 processes that ended right after a backward were aborted by one of gloo's threads (Python 3.11)."""
    with fake_ranks(2):
        uses = (
            lambda: Exchange(dist.group.WORLD, torch.device("cpu")),
            lambda: distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)]).redistribute(
                placements=[Replicate()]
            ),
        )
        for use in uses:
            pause_at_exit.cache_clear()
            before = atexit._ncallbacks()
            use()
            use()
            assert atexit._ncallbacks() == before + 1
