"""Converting a checkpoint into another format, as a stream."""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from torchshard.checkpoint import destination, opening
from torchshard.checkpoint.entries import Extent, Index, Piece, Place, TensorEntry
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats import safetensors, torch_file
from torchshard.checkpoint.formats.out import OutFile, Slot
from torchshard.checkpoint.runner import MEMORY, Budget, move, write_all
from torchshard.checkpoint.text import format_size
from torchshard.errors import CheckpointError
from torchshard.layout import Box

WRITERS: Mapping[str, Callable[[Index], OutFile]] = MappingProxyType(
    {"safetensors": safetensors.write, "torch": torch_file.write}
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was done, or with dry_run would be done.

    Args:
        src: the source.
        dst: the destination.
        to: its format.
        tensors: how many it holds.
        pieces: of how many pieces they were put together.
        nbytes: size of the destination.
        left_out: keys that its format cannot hold.
        seconds: how long it took.
        written: False after a dry run.
    """

    src: Path
    dst: Path
    to: str
    tensors: int
    pieces: int
    nbytes: int
    left_out: tuple[str, ...]
    seconds: float
    written: bool

    def __str__(self) -> str:
        verb = "wrote" if self.written else "would write"
        parts = f"{self.tensors} tensors from {self.pieces} pieces, {format_size(self.nbytes)}"
        speed = f" in {self.seconds:.2f} s" if self.written else ""
        return f"{verb} {self.dst} ({self.to}): {parts}{speed}"


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str,
    max_memory: int = MEMORY,
    verify: bool = False,
    overwrite: bool = False,
    fsync: bool = True,
    dry_run: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Conversion:
    """Write a checkpoint in another format, without torch and without holding it in memory.

    The destination appears complete or not at all; the source is only read.

    Args:
        src: anything that `open` opens.
        dst: the file to be written.
        to: "torch" (nested as it was saved, for torch.load) or "safetensors" (tensors only, flat dotted names).
        max_memory: bytes of the buffers that tensors pass through, at least 1 MiB.
        verify: also check the checksums that the source stores, and read the destination again to compare.
        overwrite: replace an existing destination.
        fsync: have the data on the disk before the destination gets its name; without it a power cut may cost data.
        dry_run: check everything that can be checked without reading tensors, and write nothing.
        progress: called with the bytes done and the bytes in all.

    Raises:
        CheckpointError: whatever is wrong with source or destination; names file and field.

    Warns:
        UserWarning: names the keys that the format of the destination cannot hold.

    Example:
        >>> convert("step_1000", "model.safetensors", to="safetensors")  # doctest: +SKIP
    """
    start = time.perf_counter()
    source, target = Path(src), Path(dst)
    if to not in WRITERS:
        raise CheckpointError("This format is not written.", expected=" or ".join(WRITERS), got=repr(to))
    budget = Budget(max_memory)
    _check_apart(source, target)
    with opening.open(source) as checkpoint:
        out = WRITERS[to](checkpoint.index)
        pieces = [piece for slot in out.slots for piece in slot.entry.pieces]
        extents = _extents(out.slots)
        if not dry_run:
            destination.remove_leftovers(target)
        destination.check(target, out.nbytes, overwrite=overwrite)
        if not dry_run:
            _Work(out, target, budget, progress, verify).run(extents, overwrite=overwrite, fsync=fsync)
    if out.left_out:
        warnings.warn(_left_out(to, out.left_out), stacklevel=2)
    seconds = time.perf_counter() - start
    return Conversion(source, target, to, len(out.slots), len(pieces), out.nbytes, out.left_out, seconds, not dry_run)


def _check_apart(source: Path, target: Path) -> None:
    """The destination must not be the source or lie within it."""
    here, there = os.path.realpath(source), os.path.realpath(target)
    if os.path.commonpath([here, there]) == here:
        raise CheckpointError(
            "The destination is the source or lies in it, and the source is never touched.", got=target, where=source
        )


def _extents(slots: Sequence[Slot]) -> dict[Extent, Files]:
    """Every stretch of file that will be read; finding them also checks the archives of all pieces."""
    found: dict[Extent, Files] = {}
    for slot in slots:
        for piece in slot.entry.pieces:
            found[piece.place().extent] = slot.entry.files
    return found


def _left_out(to: str, keys: Sequence[str]) -> str:
    shown = ", ".join(keys[:20]) + (f" and {len(keys) - 20} more" if len(keys) > 20 else "")
    return f"{to} holds tensors only; left out: {shown}"


@dataclass(slots=True)
class _Work:
    """One conversion, after everything has been planned."""

    out: OutFile
    target: Path
    budget: Budget
    progress: Callable[[int, int], object] | None
    verify: bool
    done: int = 0
    total: int = field(init=False, default=0)

    def run(self, extents: Mapping[Extent, Files], *, overwrite: bool, fsync: bool) -> None:
        summed = {extent: files for extent, files in extents.items() if self.verify and extent.crc32 is not None}
        tensors = sum([slot.entry.nbytes for slot in self.out.slots])
        self.total = tensors * (1 + self.verify) + sum([extent.nbytes for extent in summed])
        self._check_source(summed)
        with destination.Destination(self.target, self.out.nbytes, overwrite=overwrite, fsync=fsync) as file:
            checksums = self.verify or self.out.checksums
            crcs = move(self.out.slots, file.fd, self.budget, checksums=checksums, progress=self._advance)
            for offset, data in self.out.finish(crcs):
                write_all(file.fd, data, offset)
            file.flush()
            if self.verify:
                self._check_written(file.partial, crcs)
            file.commit()

    def _advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _check_source(self, extents: Mapping[Extent, Files]) -> None:
        """Compare the source with the checksums that it stores itself."""
        slots = [Slot(_raw(extent, files), 0) for extent, files in extents.items()]
        crcs = move(slots, None, self.budget, checksums=True, progress=self._advance)
        for extent, crc in zip(extents, crcs, strict=True):
            if crc != extent.crc32:
                raise CheckpointError(
                    "The source is damaged: its data do not match its checksum.",
                    expected=f"crc32 {extent.crc32:08x}",
                    got=f"{crc:08x}",
                    where=f"{extents[extent].root / extent.file}, bytes {extent.offset} to "
                    f"{extent.offset + extent.nbytes}",
                )

    def _check_written(self, partial: Path, crcs: Sequence[int]) -> None:
        """Open what was written as any reader would, and compare type, shape, place and bytes of each tensor."""
        with opening.open(partial) as written:
            found = {_place(entry): entry for entry in written.values() if isinstance(entry, TensorEntry)}
            slots = [Slot(self._written(found, slot), slot.offset) for slot in self.out.slots]
            again = move(slots, None, self.budget, checksums=True, progress=self._advance)
        for slot, before, after in zip(self.out.slots, crcs, again, strict=True):
            if before != after:
                raise CheckpointError(
                    "What was written is not what was read.",
                    expected=f"crc32 {before:08x}",
                    got=f"{after:08x}",
                    where=f"{self.target}: {slot.entry.key}",
                )

    def _written(self, found: Mapping[tuple[object, ...], TensorEntry], slot: Slot) -> TensorEntry:
        entry = slot.entry
        place = (slot.offset if entry.nbytes else None, entry.dtype, entry.shape)
        if place not in found:
            raise CheckpointError("A tensor is not where it was written.", where=f"{self.target}: {entry.key}")
        return found[place]


def _place(entry: TensorEntry) -> tuple[object, ...]:
    return (entry.pieces[0].place().start if entry.pieces else None, entry.dtype, entry.shape)


def _raw(extent: Extent, files: Files) -> TensorEntry:
    """A stretch of file as a tensor of bytes."""
    box = Box((0,), (extent.nbytes,))
    pieces = (Piece(box, lambda: Place(extent, extent.offset, (1,))),) if extent.nbytes else ()
    return TensorEntry("uint8", (extent.nbytes,), pieces, files)
