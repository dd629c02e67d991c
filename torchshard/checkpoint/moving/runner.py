"""Moving the bytes: a few threads read blocks, sum and write them, within a fixed amount of memory.

Blocks are independent of each other: each is read into a buffer, and written to its own offset. So there is no queue
of filled buffers between the threads, and memory is what the threads hold.
"""

import functools
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torchshard.checkpoint.entries import TensorEntry, is_all
from torchshard.checkpoint.files import Handle
from torchshard.checkpoint.formats.out import Slot
from torchshard.checkpoint.moving.checksums import crc32
from torchshard.checkpoint.moving.comparing import Comparison, Sum, whole_pieces
from torchshard.checkpoint.moving.plan import Block, plan
from torchshard.checkpoint.moving.reading import Room, fill
from torchshard.checkpoint.text import format_size
from torchshard.errors import CheckpointError

MEMORY = 64 * 2**20
LEAST_MEMORY = 2**20
_BLOCK = 2**20  # stays in a core's cache between reading, summing and writing
_THREADS = 4
_TELL_SECONDS = 0.02  # for which a thread collects what it has done: each time it tells, it waits for the interpreter
_MODULES = 44 * 2**20  # what Python needs to have imported: 39 MiB measured, and some to spare


@dataclass(frozen=True)
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

    @functools.cached_property
    def buffers(self) -> int:
        """Bytes of all buffers together."""
        return max(self.memory // 4, self.memory - _MODULES)

    @functools.cached_property
    def threads(self) -> int:
        """How many threads share it."""
        return max(1, min(_THREADS, os.cpu_count() or 1, self.buffers // (2 * _BLOCK)))

    @functools.cached_property
    def buffer(self) -> int:
        """Bytes of a buffer; each thread has two."""
        return self.buffers // (2 * self.threads)

    def room(self) -> Room:
        """The buffers of a thread.

        Raises:
            CheckpointError: the system has no memory for them.
        """
        try:
            # Anonymous maps: memory is used when it is written to, and given back with the last reference.
            return Room(*[memoryview(mmap.mmap(-1, self.buffer)) for _ in range(2)])
        except (OSError, OverflowError) as error:
            raise CheckpointError(
                "The system has no memory for buffers of this size.",
                expected=f"{2 * self.threads} buffers of {format_size(self.buffer)}",
                got=str(error),
                where=f"max_memory of {format_size(self.memory)}",
                fix=f"Give less: max_memory={MEMORY} (--max-memory 64MiB) is enough for any checkpoint.",
            ) from error

    def block(self, entry: TensorEntry) -> int:
        """Elements of a block of this tensor. Pieces that are not stored in order are gone through once a block."""
        in_order = all(piece.row_major for piece in entry.pieces)
        nbytes = min(_BLOCK, self.buffer) if in_order else self.buffer
        if entry.stored_dtype != entry.dtype:  # a cast needs room for both, and numpy for steps between
            return nbytes // (6 * max(entry.itemsize, entry.itemsize_stored))
        return nbytes // entry.itemsize


class Target(Protocol):
    """Where the bytes go; see destination.Destination."""

    done: Mapping[tuple[int, int, int], Sequence[int]]

    def fd(self, name: str) -> Handle:
        """The open file of this name."""

    def note(self, block: tuple[int, int, int], crcs: Sequence[int]) -> None:
        """Take down that a block is written, and its checksums."""


class Move(NamedTuple):
    """A slot to be filled.

    Args:
        file: the name of the file in which it lies; None where it is only read.
        slot: what is read, and its place in that file.
        compared: numbers of the pieces that are compared with the checksums that are stored of them; see `comparable`.
    """

    file: str | None
    slot: Slot
    compared: Collection[int] = ()


class _Job(NamedTuple):
    move: Move
    block: Block
    name: tuple[int, int, int]  # what the journal calls it: number of the slot, first byte in its file, bytes


class _Done(NamedTuple):
    job: _Job
    crcs: Sequence[int]  # of the block, then of each of its copies as stored, where some are compared


def move(
    moves: Sequence[Move],
    target: Target | None,
    budget: Budget,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> list[int]:
    """Read the tensors of all slots and write them to files, or only read them.

    Args:
        moves: the slots.
        target: where they are written; None reads only.
        budget: memory for buffers.
        progress: called in this thread with the bytes of each block that is done.

    Returns:
        The crc32 of each slot.

    Raises:
        CheckpointError: reading or writing failed, or the source is damaged; no thread is left running.
    """
    run = _Run(moves, target, budget)
    threads = [threading.Thread(target=run.work, daemon=True) for _ in range(budget.threads)]
    try:
        for thread in threads:
            thread.start()
        running = len(threads)
        while running:
            some = run.results.get()
            if isinstance(some, BaseException):
                try:
                    raise some
                finally:
                    del some  # else it is in a circle with its traceback, which holds buffers and open files
            if some is None:
                running -= 1
                continue
            for done in some:
                run.take(done)
                name = done.job.name
                if target is not None and name not in target.done:
                    target.note(name, done.crcs)
                progress(name[2])
    finally:
        run.stopped = True
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        while not run.results.empty():
            run.results.get()  # what other threads died of
    return [total.crc for total in run.totals]


def comparable(slot: Slot) -> frozenset[int]:
    """Numbers of the pieces of a tensor that are compared as it fills a slot: of those that are cut none are."""
    return whole_pieces(slot.entry, slot.box) if is_all(slot.box, slot.entry) else frozenset()


class _Run:
    """What the threads share."""

    def __init__(self, moves: Sequence[Move], target: Target | None, budget: Budget) -> None:
        self.target, self.budget = target, budget
        self.totals = [Sum(slot.nbytes) for _, slot, _ in moves]
        self.comparisons: dict[int, Comparison] = {}  # of slots that are filled in part
        self.jobs = self._plan(moves)
        self.lock = threading.Lock()
        self.results: queue.SimpleQueue[list[_Done] | BaseException | None] = queue.SimpleQueue()
        self.stopped = False

    def _plan(self, moves: Sequence[Move]) -> Iterator[_Job]:
        for i, one in enumerate(moves):
            entry, offset, box = one.slot
            itemsize = entry.itemsize
            for block in plan(box, entry.boxes, self.budget.block(entry)):
                yield _Job(one, block, (i, offset + block.at * itemsize, block.box.numel * itemsize))

    def work(self) -> None:
        """A thread's life."""
        some: list[_Done] = []
        try:
            room = self.budget.room()
            told = time.monotonic()
            while not self.stopped:
                with self.lock:
                    job = next(self.jobs, None)
                if job is None:
                    break
                some.append(_Done(job, self._do(job, room)))
                if (now := time.monotonic()) - told > _TELL_SECONDS:
                    self.results.put(some)
                    some, told = [], now
        except BaseException as error:
            self.results.put(some)
            self.results.put(error)
        else:
            self.results.put(some)
            self.results.put(None)

    def _do(self, job: _Job, room: Room) -> Sequence[int]:
        """Move one block; its checksums."""
        if (crcs := self._done(job, room)) is not None:
            return crcs
        entry, compared = job.move.slot.entry, job.move.compared
        stored: list[int] = []
        data = fill(entry, job.block, room, stored if compared else None)
        if self.target is not None and job.move.file is not None:
            handle = self.target.fd(job.move.file)
            write_all(handle, data, job.name[1])
        alone = len(job.block.copies) == 1 and job.block.copies[0].source in compared
        return [stored[0] if alone and entry.stored_dtype == entry.dtype else crc32(data), *stored]

    def _done(self, job: _Job, room: Room) -> Sequence[int] | None:
        """The checksums of a block that was noted as done, if it is on the disk: after a power cut it need not be."""
        crcs = None if self.target is None else self.target.done.get(job.name)
        if self.target is None or crcs is None or job.move.file is None:
            return crcs
        _, offset, nbytes = job.name
        data, handle = room.out[:nbytes], self.target.fd(job.move.file)
        try:
            got = os.preadv(handle.fd, [data], offset)
        except OSError:
            return None
        return crcs if got == len(data) and crc32(data) == crcs[0] else None

    def take(self, done: _Done) -> None:
        """Add the checksums of a block.

        Raises:
            CheckpointError: a piece is not what its checksum says.
        """
        move, block, (number, offset, nbytes) = done.job
        self.totals[number].add(offset, nbytes, done.crcs[0])
        if not move.compared:
            return
        comparison = self.comparisons.setdefault(number, Comparison(move.slot.entry, move.compared))
        comparison.take(block.copies, done.crcs[1:])
        if not comparison.pending:
            del self.comparisons[number]


def write_all(file: Handle, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at an offset.

    Raises:
        CheckpointError: says what the system says, such as that the disk is full.
    """
    view = memoryview(data)
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(file.fd, view[done:], offset + done)
        except OSError as error:
            what = f"The destination cannot be written: {error.strerror or error}."
            raise CheckpointError(what, where=file.path) from error
