"""One test of the suite on real ranks, forked from a process that has loaded it."""

import contextlib
import io
import multiprocessing
import os
import tempfile
import time
import traceback
import unittest
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from tests.peer import cpu, suite

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Outcome:
    """What became of a test.

    Attributes:
        verdict: "passes", "skips", "fails" or "hangs".
        text: why, if it does not pass.
        seconds: wall time.
    """

    name: str
    verdict: str
    text: str
    seconds: float


def wrapper_class(torchs: bool) -> type:
    """The class under test."""
    if torchs:
        return torch.nn.parallel.DistributedDataParallel
    from torchshard.ddp import DistributedDataParallel

    return DistributedDataParallel


def run(module: Any, name: str, wrapper: type, limit: float = 120) -> Outcome:
    """Run one test.

    Args:
        module: the suite.
        name: of the test.
        wrapper: the class that takes the place of torch's DistributedDataParallel.
        limit: seconds after which the ranks are killed.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for sub in ("barrier", "test_dir"):
            os.makedirs(os.path.join(folder, sub))
        pipes, ranks = [], []
        for rank in range(suite.WORLD):
            ours, theirs = _fork.Pipe(duplex=False)
            ranks.append(_fork.Process(target=_be_rank, args=(theirs, module, name, wrapper, rank, folder)))
            ranks[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            verdict, text = _collect(pipes, start + limit)
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return Outcome(name, verdict, text, time.monotonic() - start)


def _collect(pipes: list[Any], deadline: float) -> tuple[str, str]:
    answers: dict[int, tuple[str, str]] = {}
    while len(answers) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            rank = waiting[pipe]
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                answers[rank] = "fails", "died"
            if answers[rank][0] == "fails":  # the others wait for it in vain
                deadline = min(deadline, time.monotonic() + 2)
        if not ready:
            break
    for verdict in ("fails", "hangs", "skips"):
        for rank, (found, text) in sorted(answers.items()):
            if found == verdict:
                return verdict, f"rank {rank}: {text}"
        if verdict == "fails" and len(answers) < len(pipes):
            return "hangs", "a rank was still running when the time was over"
    return "passes", ""


def _be_rank(pipe: Any, module: Any, name: str, wrapper: type, rank: int, folder: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        pipe.send(_answer(module, name, wrapper, rank, folder))
    os._exit(0)


def _answer(module: Any, name: str, wrapper: type, rank: int, folder: str) -> tuple[str, str]:
    os.environ.update(TEMP_DIR=folder, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    torch.nn.parallel.DistributedDataParallel = wrapper  # type: ignore[misc]
    module.DistributedDataParallel = wrapper
    module.DDP = wrapper
    cpu.take_over(wrapper)
    try:
        case = suite.case_class(module)(name)
        case.rank, case.file_name = rank, os.path.join(folder, "store")
        dist.init_process_group(
            "gloo", init_method=case.init_method, world_size=suite.WORLD, rank=rank, timeout=timedelta(seconds=60)
        )
        getattr(case, name)()
        case._barrier()
    except unittest.SkipTest as skip:
        return "skips", str(skip)
    except SystemExit as end:
        reasons = {skip.exit_code: skip.message for skip in module.TEST_SKIPS.values()}
        return ("skips", reasons[end.code]) if end.code in reasons else ("fails", f"exits with {end.code}")
    except BaseException:
        return "fails", traceback.format_exc()
    return "passes", ""
