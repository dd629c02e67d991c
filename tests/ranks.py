"""Real ranks for tests: processes that talk over gloo, with a time limit, so that nothing can hang a run.

    def body(rank, world, scale):        # a module-level function: it is pickled by name
        ...
        return {"loss": 0.5}

    losses = run_ranks(2, body, 3.0)     # [what rank 0 returned, what rank 1 returned]

Ranks are forked from a server process that has imported all that they need (tests/preloaded.py) and compiled once: one
starts in some 20 ms, and spends a second of a core's time less before its first graph is compiled.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")
os.environ.setdefault("TORCH_WARM_POOL", "0")  # inductor's workers are no good to ranks forked from their owner
_context.set_forkserver_preload(["tests.preloaded"])


class RankFailed(AssertionError):
    """Some rank raised, died or ran past the limit; the message holds every rank's account."""


told_up_to: int | None = None
"""Bytes that ranks to come say rather than have read, and that each reduces whole; None for what the package has."""

written_from: int | None = None
"""Elements from which graphs of ranks to come write gradients to their slots; None for what is set in the package."""

all_are_asked = False
"""Whether tests that compile for one rank after another do so for each, as full runs do, or for the ends alone."""


def many(number: int) -> int:
    """So many samples in full runs, and half of them in others."""
    return number if all_are_asked else (number + 1) // 2


def _rank_main(
    pipe: Connection,
    rank: int,
    world: int,
    backend: str,
    store: str,
    told: int | None,
    written: int | None,
    environment: dict[str, str],
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    faulthandler.enable()  # a rank that crashes says where
    try:
        import torch
        import torch.distributed as dist

        gc.freeze()  # what lives already is never looked at again
        spare_time()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        # What torch finds old is named where users call it, not where this package does.
        warnings.filterwarnings("error", category=FutureWarning, module=r"torchshard\.")
        os.environ.clear()  # that of the server's start
        os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        if backend:
            dist.init_process_group(
                backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
        if told is not None:
            from torchshard.comm import reach

            _set(reach, SAID=told, WHOLE=told)
        if written is not None:
            from torchshard.compiler import rewrite

            _set(rewrite, SMALL=written)
        result = body(rank, world, *args)
        if backend and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        sys.stdout.flush()
        pipe.close()


def _set(module: Any, **values: int) -> None:
    """Other numbers in place of those in the package, under names that it has."""
    for name, value in values.items():
        assert hasattr(module, name), f"{module.__name__} has no {name}"
        setattr(module, name, value)


def spare_time() -> None:
    """Look for garbage less often, and leave out what no test asks for: in tracing, a third of the time.

    Dynamo clears the processor's caches to measure how long guards take, each time that it has compiled; and each new
    group of all ranks has it forget which functions of torch it traces in what way, as they may not all have been there.
    """
    gc.set_threshold(20_000, 20, 50)
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
        sys.modules["torch._dynamo.trace_rules"].clear_lru_cache = lambda: None  # type: ignore[attr-defined]


def by_messages() -> None:
    """From now on this rank's memory cannot be read by others, nor theirs by it, as on two machines."""
    from torchshard.comm import neighbours

    neighbours._process_vm_readv = None


@contextlib.contextmanager
def fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """Within, this process is one rank of a group that computes nothing: for traces, plans, shapes and messages."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()
        dist.destroy_process_group()


def meet(place: str, rank: int, world: int) -> None:
    """Return when all ranks are here, each having left a sign in a file at `place`.

    What ranks do before one of them dies: it ends neither a connection that another still makes nor a barrier's
    messages, as it would after a collective, which ends on one rank while others are in it.
    """
    import torch.distributed as dist

    signs = dist.FileStore(place, world)
    signs.set(f"rank {rank}", "here")
    signs.wait([f"rank {other}" for other in range(world)], timedelta(seconds=60))


def run_ranks(
    world: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    backend: str = "gloo",
    expect_dead: tuple[int, ...] = (),
    imported: bool = True,
) -> list[Any]:
    """Run body(rank, world, *args) on `world` processes and return their results in rank order.

    Args:
        world: number of ranks.
        body: a module-level function.
        args: further arguments, pickled.
        timeout: seconds after which every rank is killed and RankFailed raised.
        backend: process group made for each rank before `body`; "" for none.
        expect_dead: ranks that may die without an answer (fault tests); their result is None.
        imported: whether ranks may have imported the package already; else each is an interpreter of its own, for
            a body that minds what is found at the import.
    """
    context = _context if imported else multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes, store = [], [], os.path.join(folder, "store")
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            given = theirs, rank, world, backend, store, told_up_to, written_from, {**os.environ}, body, args
            process = context.Process(target=_rank_main, args=given, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + timeout, expect_dead)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(pipes: list[Connection], processes: list[Any], deadline: float, expect_dead: tuple[int, ...]) -> list[Any]:
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(answers) + len(failures) < len(pipes):
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers and rank not in failures}
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            rank = open_pipes[pipe]  # type: ignore[index]
            try:
                good, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join(5)
                good, value = rank in expect_dead, f"died with exit code {processes[rank].exitcode}"
                value = None if good else value
            (answers if good else failures)[rank] = value
        if failures and not expect_dead:
            # The others are likely to wait for the one that failed: give them a moment to say so, then stop.
            deadline = min(deadline, time.monotonic() + 3)
        if not ready and time.monotonic() >= deadline:
            for rank in open_pipes.values():
                failures[rank] = "still running when the time was over"
    if failures:
        account = "\n".join(f"--- rank {rank}: {text.rstrip()}" for rank, text in sorted(failures.items()))
        raise RankFailed(f"{len(failures)} of {len(pipes)} ranks failed\n{account}")
    return [answers[rank] for rank in range(len(pipes))]
