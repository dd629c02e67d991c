"""Moving the bytes: a few threads read blocks, sum and write them, within a fixed amount of memory.

Blocks are independent of each other: each is read into a buffer, and written to its own offset. So there is no queue
of filled buffers between the threads, and memory is what the threads hold.
"""

import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchshard.checkpoint.entries import TensorEntry
from torchshard.checkpoint.files import Handle
from torchshard.checkpoint.formats.out import Slot
from torchshard.checkpoint.moving.checksums import combine, crc32
from torchshard.checkpoint.moving.plan import Block, plan, run_within
from torchshard.checkpoint.moving.reading import Room, fill
from torchshard.errors import CheckpointError
from torchshard.layout import whole

MEMORY = 64 * 2**20
LEAST_MEMORY = 2**20
_BLOCK = 2**20  # stays in a core's cache between reading, summing and writing
_THREADS = 4
_MODULES = 44 * 2**20  # what Python needs to have imported: 39 MiB measured, and some to spare


@dataclass(frozen=True, slots=True)
class Budget:
    """How much memory may be used, and how it is divided.

    Args:
        memory: bytes over the bare interpreter. Modules (numpy most of all) take _MODULES of it, buffers the rest;
            where that is little, buffers take a quarter, and the whole is more.
    """

    memory: int = MEMORY

    def __post_init__(self) -> None:
        if self.memory < LEAST_MEMORY:
            raise CheckpointError("max_memory is too little.", expected=f"{LEAST_MEMORY} bytes", got=self.memory)

    @property
    def buffers(self) -> int:
        """Bytes of all buffers together."""
        return max(self.memory // 4, self.memory - _MODULES)

    @property
    def threads(self) -> int:
        """How many threads share it."""
        return max(1, min(_THREADS, os.cpu_count() or 1, self.buffers // (2 * _BLOCK)))

    @property
    def buffer(self) -> int:
        """Bytes of a buffer; each thread has two."""
        return self.buffers // (2 * self.threads)

    def block(self, entry: TensorEntry) -> int:
        """Elements of a block of this tensor. Pieces that are not stored in order are gone through once a block."""
        in_order = all(piece.row_major for piece in entry.pieces)
        nbytes = min(_BLOCK, self.buffer) if in_order else self.buffer
        if entry.stored_dtype != entry.dtype:  # a cast needs room for both, and numpy for steps between
            return nbytes // (6 * max(entry.itemsize, entry.itemsize_stored))
        return nbytes // entry.itemsize


class Target(Protocol):
    """Where the bytes go; see destination.Destination."""

    done: Mapping[tuple[int, int, int], int]

    def fd(self, name: str) -> Handle:
        """The open file of this name."""

    def note(self, block: tuple[int, int, int], crc: int) -> None:
        """Take down that a block is written."""


@dataclass(frozen=True, slots=True)
class _Job:
    slot: int
    file: str
    entry: TensorEntry
    block: Block
    offset: int
    known: bool  # whether the checksum of the whole slot is known already

    @property
    def nbytes(self) -> int:
        return self.block.box.numel * self.entry.itemsize

    @property
    def name(self) -> tuple[int, int, int]:
        """What the journal calls it."""
        return self.slot, self.offset, self.nbytes


@dataclass(frozen=True, slots=True)
class _Done:
    job: _Job
    crc: int


def move(
    files: Sequence[tuple[str, Sequence[Slot]]],
    target: Target | None,
    budget: Budget,
    *,
    checksums: bool,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> list[int]:
    """Read the tensors of all slots and write them to files, or only read them.

    Args:
        files: for each file its name and what goes where in it.
        target: where they are written; None reads only.
        budget: memory for buffers.
        checksums: whether the crc32 of each slot is wanted. One that follows from checksums of the source is taken from
            there, unless this is reading only.
        progress: called in this thread with the bytes of each block that is done.

    Returns:
        The crc32 of each slot, of all files in turn; zeros without checksums.

    Raises:
        CheckpointError: reading or writing failed; no thread is left running.
    """
    run = _Run(files, target, budget, checksums)
    threads = [threading.Thread(target=run.work, daemon=True) for _ in range(budget.threads)]
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
            run.sums.add(done.job.slot, done.job.offset, done.job.nbytes, done.crc)
            if target is not None and done.job.name not in target.done:
                target.note(done.job.name, done.crc)
            progress(done.job.nbytes)
    finally:
        run.stopped = True
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return run.sums.totals


class _Run:
    """What the threads share."""

    def __init__(
        self, files: Sequence[tuple[str, Sequence[Slot]]], target: Target | None, budget: Budget, checksums: bool
    ) -> None:
        self.target, self.budget, self.checksums = target, budget, checksums
        slots = [slot for _, its in files for slot in its]
        known = [_known_crc(slot) if checksums and target is not None else None for slot in slots]
        self.sums = _Sums([slot.nbytes for slot in slots], known)
        self.jobs = self._plan(files)
        self.lock = threading.Lock()
        self.results: queue.SimpleQueue[_Done | BaseException | None] = queue.SimpleQueue()
        self.stopped = False

    def _plan(self, files: Sequence[tuple[str, Sequence[Slot]]]) -> Iterator[_Job]:
        i = 0
        for name, slots in files:
            for slot in slots:
                for block in plan(slot.box, slot.entry.boxes, self.budget.block(slot.entry)):
                    offset = slot.offset + block.at * slot.entry.itemsize
                    yield _Job(i, name, slot.entry, block, offset, self.sums.known[i] is not None)
                i += 1

    def work(self) -> None:
        """A thread's life."""
        try:
            # Anonymous maps: memory is used when it is written to, and given back with the last reference.
            room = Room(*[memoryview(mmap.mmap(-1, self.budget.buffer)) for _ in range(2)])
            while not self.stopped:
                with self.lock:
                    job = next(self.jobs, None)
                if job is None:
                    break
                self.results.put(_Done(job, self._do(job, room)))
            self.results.put(None)
        except BaseException as error:
            self.results.put(error)

    def _do(self, job: _Job, room: Room) -> int:
        """Move one block; its crc32 where that is needed."""
        if self.target is not None and (crc := self.target.done.get(job.name)) is not None:
            return crc
        data = fill(job.entry, job.block, room)
        if self.target is not None:
            handle = self.target.fd(job.file)
            write_all(handle.fd, data, job.offset)
        return crc32(data) if self.checksums and not job.known else 0


def _known_crc(slot: Slot) -> int | None:
    """The crc32 of a slot from those that the source stores of its pieces; None where it does not follow from them."""
    entry = slot.entry
    if entry.stored_dtype != entry.dtype or slot.box != whole(entry.shape):
        return None
    runs = []
    for piece in entry.pieces:
        place, start = piece.place(), run_within(slot.box, piece.box)
        extent, nbytes = place.extent, piece.box.numel * entry.itemsize
        covers = place.start == extent.offset and nbytes == extent.nbytes and piece.row_major
        if start is None or not covers or extent.crc32 is None:
            return None
        runs.append((start, extent.crc32, nbytes))
    total = 0
    for _, crc, nbytes in sorted(runs):
        total = combine(total, crc, nbytes)
    return total


class _Sums:
    """Puts the checksums of blocks, which come in any order, together to those of slots."""

    def __init__(self, sizes: Sequence[int], known: Sequence[int | None]) -> None:
        self.known = known
        self.totals = [crc or 0 for crc in known]
        self.missing = list(sizes)
        self.parts: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, slot: int, offset: int, nbytes: int, crc: int) -> None:
        """Take the checksum of a block."""
        if self.known[slot] is not None:
            return
        parts = self.parts.setdefault(slot, [])
        parts.append((offset, crc, nbytes))
        self.missing[slot] -= nbytes
        if not self.missing[slot]:
            total = 0
            for _, part, length in sorted(self.parts.pop(slot)):
                total = combine(total, part, length)
            self.totals[slot] = total


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
