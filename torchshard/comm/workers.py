"""Threads beside the one that computes: those that do what is asked of them in turn, and how all come to an end."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue

Job = Callable[[], object]

_NAME = "torchshard sums"
_AT_EXIT = 1.0
"""Seconds that a thread is waited for: as long as what it does may take that nobody can stop."""
_MOMENT = 0.01
"""Seconds in which threads of gloo's let go of collectives that are done."""


class Worker:
    """A thread that does jobs one after another. It begins with the first one, and ends when nobody can give another.

    Args:
        last: is done after all jobs, even if there were none.
        stop: called when the interpreter ends, by another thread: jobs that wait shall end.
    """

    def __init__(self, last: Job, stop: Job) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._stop = stop
        self._thread = threading.Thread(target=_work, args=(self._jobs,), daemon=True, name=_NAME)
        weakref.finalize(self, _end, self._thread, self._jobs, last).atexit = False

    def do(self, job: Job) -> None:
        """Have it done after those before; it does not raise."""
        if self._thread.ident is None:
            self._thread.start()
            _working[self._thread] = self._jobs, self._stop
            _rest_at_exit()
        self._jobs.put(job)


_working: "weakref.WeakKeyDictionary[threading.Thread, tuple[SimpleQueue[Job | None], Job]]"
_working = weakref.WeakKeyDictionary()


def rest() -> None:
    """The interpreter ends: stop the threads; one that came out of torch's code later would abort the process."""
    working = [(thread, its) for thread, its in _working.items() if thread.is_alive()]  # none in a forked process
    for _, (jobs, stop) in working:
        stop()
        jobs.put(None)
    for thread, _ in working:
        thread.join(_AT_EXIT)


@cache
def _rest_at_exit() -> None:
    atexit.register(rest)


@cache
def pause_at_exit() -> None:
    """Have the interpreter give gloo's threads a moment before it ends, where collectives are begun in backwards.

    Such a collective holds an object of Python's (torch.autograd.graph puts the backward's context there). Where it is
    the thread that lets go of it last, it has to have the interpreter's lock; and one that asks for the lock while the
    interpreter ends aborts the process (Python 3.11: "terminate called without an active exception").
    """
    atexit.register(time.sleep, _MOMENT)


def _end(thread: threading.Thread, jobs: "SimpleQueue[Job | None]", last: Job) -> None:
    if thread.ident is None:
        last()
    else:
        jobs.put(last)
        jobs.put(None)


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # and the tensor with it
