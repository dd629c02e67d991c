"""Writing what was planned: the bytes, what surrounds them, a look at the result, and then its name."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchshard.checkpoint import opening
from torchshard.checkpoint.entries import Extent, Index, Piece, TensorEntry, flat
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats.out import Output, Slot, whole_slot
from torchshard.checkpoint.moving import destination
from torchshard.checkpoint.moving.destination import Destination
from torchshard.checkpoint.moving.progress import Progress
from torchshard.checkpoint.moving.runner import Budget, Move, comparable, move, write_all
from torchshard.checkpoint.trees import leaves
from torchshard.errors import CheckpointError
from torchshard.layout import whole


def fingerprint(out: Output, to: str) -> str:
    """A line that differs wherever the result would: sources with their times, what goes where, and how it is cast."""
    digest = hashlib.sha256(to.encode())
    sources: dict[tuple[Files, str], Extent] = {}
    for file in out.files:
        digest.update(repr((file.name, file.nbytes)).encode())
        for entry, offset, box in file.slots:
            digest.update(repr((offset, *box, entry.shape, entry.dtype, entry.stored_dtype)).encode())
            for piece in entry.pieces:
                extent, *place = piece.place()
                digest.update(repr((*piece.box, *place, extent.file)).encode())
                sources.setdefault(extent[:2], extent)
        for data in file.said:
            digest.update(b"%d " % len(data) + data)
    for extent in sources.values():
        digest.update(repr((os.path.realpath(extent.where), *extent.version)).encode())
    return f"torchshard conversion 4 {digest.hexdigest()}"


@dataclass(slots=True)
class Writing:
    """One conversion, after everything has been planned.

    Args:
        out: all that is written.
        target: the file or folder.
        fingerprint: of what is written, see above.
        read: the files that it is read from.
        budget: memory for buffers.
        progress: called with the bytes done and the bytes in all.
        verify: whether what is written is read again and compared.
    """

    out: Output
    target: Path
    fingerprint: str
    read: Sequence[Files]
    budget: Budget
    progress: Callable[[int, int], object] | None
    verify: bool

    def run(self, *, overwrite: bool, fsync: bool, resume: bool) -> None:
        """Write and rename."""
        moves = self._moves()
        again = self.out.slots if self.verify else []
        advance = Progress(self.progress, sum([slot.nbytes for slot in (*(slot for _, slot, _ in moves), *again)]))
        files = {file.name: file.nbytes for file in self.out.files}
        with Destination(
            self.target, files, self.fingerprint, overwrite=overwrite, fsync=fsync, resume=resume
        ) as place:
            if place.finished:
                return
            if resume:
                destination.check(self.target, self.out.nbytes, overwrite=overwrite, folder=self.out.is_folder)
            crcs = self._write(place, moves, advance)
            place.write_notes()
            if self.verify:
                self._check_written(place.data, crcs, advance)
            for source in self.read:
                source.check_unchanged()
            place.commit()

    def _moves(self) -> list[Move]:
        """What goes into the files. Stretches of the source that no slot takes whole and in order go before the first
        slot that needs them, by themselves and without a file, to be compared with their checksums."""
        filling = [Move(file.name, slot, comparable(slot)) for file in self.out.files for slot in file.slots]
        compared = {one.slot.entry.pieces[i].place().extent for one in filling for i in one.compared}
        moves: list[Move] = []
        for one in filling:
            for extent in [piece.place().extent for piece in one.slot.entry.pieces]:
                if extent.crc32 is not None and extent not in compared:
                    compared.add(extent)
                    slot = whole_slot(flat(extent, key=one.slot.entry.key), 0)
                    moves.append(Move(None, slot, comparable(slot)))
            moves.append(one)
        return moves

    def _write(self, place: Destination, moves: Sequence[Move], advance: Progress) -> list[int]:
        """Move the tensors, then put in all that surrounds them; the crc32 of each slot of the destination."""
        every = move(moves, place, self.budget, advance)
        crcs = [crc for (name, _, _), crc in zip(moves, every, strict=True) if name is not None]
        at = 0
        for file in self.out.files:
            its = crcs[at : at + len(file.slots)]
            at += len(file.slots)
            handle = place.fd(file.name)
            for offset, data in file.finish(its):
                write_all(handle, data, offset)
        return crcs

    def _check_written(self, data: Path, crcs: Sequence[int], advance: Progress) -> None:
        """Open what was written as any reader would, and compare type, shape, place and bytes of each tensor."""
        with opening.open(data) as written:
            found = {place: its for entry in _tensors_of(written.index) for place, its in _places(entry)}
            moves = [
                Move(None, self._written(found, file.name or data.name, slot))
                for file in self.out.files
                for slot in file.slots
            ]
            again = move(moves, None, self.budget, advance)
        for slot, before, after in zip(self.out.slots, crcs, again, strict=True):
            if before != after:
                raise CheckpointError(
                    "What was written is not what was read.",
                    expected=f"crc32 {before:08x}",
                    got=f"{after:08x}",
                    where=f"{self.target}: {slot.entry.key}",
                )

    def _written(self, found: "Mapping[_Place, tuple[TensorEntry, Piece]]", file: str, slot: Slot) -> Slot:
        entry = slot.entry
        if not slot.nbytes:
            return Slot(entry, slot.offset, slot.box)
        at = found.get((file, slot.offset, entry.dtype, slot.box.size))
        if at is None or at[1].box not in (slot.box, whole(slot.box.size)):
            raise CheckpointError("A tensor is not where it was written.", where=f"{self.target}: {entry.key}")
        return Slot(at[0], slot.offset, at[1].box)


def _tensors_of(index: Index) -> Iterator[TensorEntry]:
    """All tensors, those inside of objects too."""
    for key, entry in index.entries.items():
        if isinstance(entry, TensorEntry):
            yield entry
        elif index.format == "dcp":
            yield from [value for _, value in leaves(entry.value(), key) if isinstance(value, TensorEntry)]


_Place = tuple[str, int, str, tuple[int, ...]]


def _places(entry: TensorEntry) -> Iterator[tuple[_Place, tuple[TensorEntry, Piece]]]:
    """Each piece, and all that is stored with it (of which it may be a view), by file, first byte, type and shape."""
    for piece in entry.pieces:
        place = piece.place()
        stored = flat(place.extent, entry.dtype)
        yield (place.extent.file, place.extent.offset, entry.dtype, stored.shape), (stored, stored.pieces[0])
        yield (place.extent.file, place.start, entry.dtype, piece.box.size), (entry, piece)
