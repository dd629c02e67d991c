"""Ranks kept alive to run many trials; a crash or a hang costs the operator that caused it and a new start."""

import multiprocessing
import os
import tempfile
import warnings
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

_context = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Have the server that ranks are forked from import what takes long; before the first rank starts."""
    _context.set_forkserver_preload(["tests.coverage.preloaded"])


def _serve(pipe: Any, rank: int, mesh_shape: tuple[int, ...], store: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from tests.coverage.sweep import run_operator
    from torchshard.comm import collectives

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    world = 1
    for n in mesh_shape:
        world *= n
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=10)
    )
    mesh = init_device_mesh("cpu", mesh_shape)
    gathered: list[int] = []
    by = collectives._by
    collectives._by = lambda group, x: _Gathers(by(group, x), group.size, gathered)
    while (task := pipe.recv()) is not None:
        run_operator(task, mesh, gathered, pipe.send)
        pipe.send(("end", None))


class _Gathers:
    """What sends tensors; how many elements each all-gather brings together is kept."""

    def __init__(self, sender: Any, ranks: int, gathered: list[int]) -> None:
        self.sender, self.ranks, self.gathered = sender, ranks, gathered

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sender, name)

    def all_gather(self, piece: Any) -> Any:
        self.gathered.append(piece.numel() * self.ranks)
        return self.sender.all_gather(piece)


class Pool:
    """A mesh of ranks."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self.mesh_shape = mesh_shape
        self.world = 1
        for n in mesh_shape:
            self.world *= n
        self.pipes: list[Any] = []
        self.processes: list[Any] = []

    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(self.world):
            ours, theirs = _context.Pipe()
            args = (theirs, rank, self.mesh_shape, os.path.join(self.folder.name, "store"))
            process = _context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes = []

    def run(self, task: Any, limit: float) -> tuple[list[list[Any]], str]:
        """What every rank reports of a task, and "" or how it broke off; `limit` seconds between two reports."""
        if not self.pipes:
            self.start()
        for pipe in self.pipes:
            pipe.send(task)
        reports: list[list[Any]] = [[] for _ in self.pipes]
        open_ = dict(enumerate(self.pipes))
        while open_:
            ready = wait(list(open_.values()), timeout=limit)
            if not ready:
                self.stop()
                return reports, "hangs"
            for rank, pipe in list(open_.items()):
                if pipe not in ready:
                    continue
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(5)
                    code = self.processes[rank].exitcode
                    self.stop()
                    return reports, f"dies with exit code {code}"
                if kind == "end":
                    del open_[rank]
                else:
                    reports[rank].append((kind, value))
        return reports, ""
