"""Moving the bytes: a few threads read blocks, sum and write them, within a fixed amount of memory.

Blocks are independent of each other: each is read into a buffer, and written to its own offset. So there is no queue
of filled buffers between the threads, and memory is what the threads hold.
"""

import mmap
import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torchshard.checkpoint.checksums import combine
from torchshard.checkpoint.entries import TensorEntry
from torchshard.checkpoint.formats.out import Slot
from torchshard.checkpoint.plan import Block, plan
from torchshard.checkpoint.reading import fill
from torchshard.errors import CheckpointError
from torchshard.layout import whole

MEMORY = 64 * 2**20
LEAST_MEMORY = 2**20
_BLOCK = 2**20  # stays in a core's cache between reading, summing and writing
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """How much memory may be used, and how it is divided.

    Args:
        memory: bytes of all buffers together.
    """

    memory: int = MEMORY

    def __post_init__(self) -> None:
        if self.memory < LEAST_MEMORY:
            raise CheckpointError("max_memory is too little.", expected=f"{LEAST_MEMORY} bytes", got=self.memory)

    @property
    def threads(self) -> int:
        """How many threads share it."""
        return max(1, min(_THREADS, os.cpu_count() or 1, self.memory // (2 * _BLOCK)))

    @property
    def buffer(self) -> int:
        """Bytes of a buffer; each thread has two."""
        return self.memory // (2 * self.threads)

    def block(self, entry: TensorEntry) -> int:
        """Elements of a block of this tensor. Pieces that are not stored in order are gone through once a block."""
        in_order = all(piece.row_major for piece in entry.pieces)
        return (min(_BLOCK, self.buffer) if in_order else self.buffer) // entry.itemsize


@dataclass(frozen=True, slots=True)
class _Job:
    slot: int
    entry: TensorEntry
    block: Block
    offset: int

    @property
    def nbytes(self) -> int:
        return self.block.box.numel * self.entry.itemsize


@dataclass(frozen=True, slots=True)
class _Done:
    job: _Job
    crc: int


def move(
    slots: Sequence[Slot],
    fd: int | None,
    budget: Budget,
    *,
    checksums: bool,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> list[int]:
    """Read the tensors of all slots and write them to a file, or only read them.

    Args:
        slots: what goes where.
        fd: the file, open for writing; None reads only.
        budget: memory for buffers.
        checksums: whether to compute the crc32 of each slot.
        progress: called in this thread with the bytes of each block that is done.

    Returns:
        The crc32 of each slot; zeros without checksums.

    Raises:
        CheckpointError: reading or writing failed; no thread is left running.
    """
    run = _Run(slots, fd, budget, checksums)
    threads = [threading.Thread(target=run.work, daemon=True) for _ in range(budget.threads)]
    sums = _Sums(slots)
    try:
        for thread in threads:
            thread.start()
        running = len(threads)
        while running:
            done = run.results.get()
            if isinstance(done, BaseException):
                raise done
            if done is None:
                running -= 1
                continue
            sums.add(done)
            progress(done.job.nbytes)
    finally:
        run.stopped = True
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return sums.totals


class _Run:
    """What the threads share."""

    def __init__(self, slots: Sequence[Slot], fd: int | None, budget: Budget, checksums: bool) -> None:
        self.fd, self.budget, self.checksums = fd, budget, checksums
        self.jobs = self._plan(slots)
        self.lock = threading.Lock()
        self.results: queue.SimpleQueue[_Done | BaseException | None] = queue.SimpleQueue()
        self.stopped = False

    def _plan(self, slots: Sequence[Slot]) -> Iterator[_Job]:
        for i, slot in enumerate(slots):
            for block in plan(whole(slot.entry.shape), slot.entry.boxes, self.budget.block(slot.entry)):
                yield _Job(i, slot.entry, block, slot.offset + block.at * slot.entry.itemsize)

    def work(self) -> None:
        """A thread's life."""
        try:
            # Anonymous maps: memory is used when it is written to, and given back with the last reference.
            out, scratch = [memoryview(mmap.mmap(-1, self.budget.buffer)) for _ in range(2)]
            self._work(out, scratch)
            self.results.put(None)
        except BaseException as error:
            self.results.put(error)

    def _work(self, out: memoryview, scratch: memoryview) -> None:
        while not self.stopped:
            with self.lock:
                job = next(self.jobs, None)
            if job is None:
                return
            buffer = out[: job.nbytes]
            fill(job.entry, job.block, buffer, scratch)
            crc = zlib.crc32(buffer) if self.checksums else 0
            if self.fd is not None:
                write_all(self.fd, buffer, job.offset)
            self.results.put(_Done(job, crc))


class _Sums:
    """Puts the checksums of blocks, which come in any order, together to those of slots."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.totals = [0] * len(slots)
        self.missing = [slot.entry.nbytes for slot in slots]
        self.parts: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, done: _Done) -> None:
        job = done.job
        parts = self.parts.setdefault(job.slot, [])
        parts.append((job.offset, done.crc, job.nbytes))
        self.missing[job.slot] -= job.nbytes
        if not self.missing[job.slot]:
            total = 0
            for _, crc, nbytes in sorted(self.parts.pop(job.slot)):
                total = combine(total, crc, nbytes)
            self.totals[job.slot] = total


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at an offset.

    Raises:
        CheckpointError: says what the system says, such as that the disk is full.
    """
    view = memoryview(data)
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], offset + done)
        except OSError as error:
            raise CheckpointError(f"The destination cannot be written: {error.strerror or error}.") from error
