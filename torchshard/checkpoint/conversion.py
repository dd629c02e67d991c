"""Converting a checkpoint into another format, as a stream."""

import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from torchshard.checkpoint import opening
from torchshard.checkpoint.arguments import check_types
from torchshard.checkpoint.editing import Edits, Rename, edited, merged
from torchshard.checkpoint.entries import Index, Piece, TensorEntry, flat
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats import dcp_write, safetensors, torch_file
from torchshard.checkpoint.formats.out import Options, Output, Slot, whole_slot
from torchshard.checkpoint.moving import destination
from torchshard.checkpoint.moving.destination import Destination
from torchshard.checkpoint.moving.runner import MEMORY, Budget, Move, comparable, move, write_all
from torchshard.checkpoint.text import format_size, parse_placements, printable, table
from torchshard.checkpoint.trees import leaves
from torchshard.errors import CheckpointError
from torchshard.layout import Mesh, whole

WRITERS: Mapping[str, Callable[[Index, Options], Output]] = MappingProxyType(
    {"safetensors": safetensors.write, "torch": torch_file.write, "dcp": dcp_write.write}
)
Source = str | os.PathLike[str]
_RANKS = 2**20  # of a mesh: each has files of its own


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was done, or with dry_run would be done.

    Args:
        src: the sources.
        dst: the destination.
        to: its format.
        tensors: how many it holds.
        pieces: of how many pieces they were put together.
        nbytes: size of the destination.
        files: names and sizes of its files; {"": size} where it is one file.
        left_out: keys that its format cannot hold.
        rows: for `table`.
        seconds: how long it took.
        written: False after a dry run.
    """

    src: tuple[Path, ...]
    dst: Path
    to: str
    tensors: int
    pieces: int
    nbytes: int
    files: Mapping[str, int]
    left_out: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = field(repr=False)
    seconds: float
    written: bool

    def table(self) -> str:
        """What each tensor of the destination is, and where it goes."""
        return table(["key", "dtype", "shape", "from", "size", "to"], self.rows)

    def __str__(self) -> str:
        verb = "wrote" if self.written else "would write"
        parts = f"{self.tensors} tensors from {self.pieces} pieces, {format_size(self.nbytes)}"
        files = f", {len(self.files)} files" if len(self.files) > 1 else ""
        speed = f" in {self.seconds:.2f} s" if self.written else ""
        return f"{verb} {self.dst} ({self.to}): {parts}{files}{speed}"


def convert(
    src: Source | Sequence[Source],
    dst: Source,
    *,
    to: str,
    max_memory: int = MEMORY,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Rename | None = None,
    dtype: str | Mapping[str, str] | None = None,
    shard_size: int | None = None,
    mesh: Sequence[int] | None = None,
    placements: Mapping[str, str] | None = None,
    verify: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    fsync: bool = True,
    dry_run: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Conversion:
    """Write a checkpoint in another format, without torch and without holding it in memory.

    The destination appears complete or not at all; the source is only read. Where it stores checksums, as torch's zip
    files do, all that is read is compared with them.

    Args:
        src: anything that `open` opens; or several, which have no key in common and become one.
        dst: the file or, with `shard_size` or to="dcp", the folder to be written.
        to: "torch" (nested as it was saved, for torch.load), "safetensors" (tensors only, flat dotted names) or "dcp"
            (for torch.distributed.checkpoint.load).
        max_memory: bytes that modules and buffers may take over the bare interpreter. Less than 64 MiB makes buffers
            smaller, down to 1 MiB, but the modules that are needed take about 40 MiB. What describes the tensors, and
            what is no tensor, comes on top: some 1 KiB a tensor, and ten times the bytes of pickled values.
        select: globs of keys; only those that match one are written.
        exclude: globs of keys that are left out.
        rename: gives the new name of each key; or KeyRules, which also join, split and transpose.
        dtype: what floating-point tensors are cast to, such as "bfloat16"; or globs of keys to types, the first that
            matches.
        shard_size: bytes of tensors a file, at most; the destination becomes a folder of parts with an index.
        mesh: shape of the ranks that a dcp folder is cut for, such as (2, 4).
        placements: globs of keys to placements on the axes of the mesh, such as {"layers.*.weight": "S(0),R"}; tensors
            that match none are not cut.
        verify: read the destination again and compare.
        overwrite: replace an existing destination.
        resume: go on where an earlier conversion was interrupted, and leave what is done if this one is.
        fsync: have the data on the disk before the destination gets its name; without it a power cut may cost data.
        dry_run: check everything that can be checked without reading tensors, and write nothing.
        progress: called with the bytes done and the bytes in all.

    Raises:
        CheckpointError: whatever is wrong with source or destination; names file and field.

    Warns:
        UserWarning: names the keys and the metadata of safetensors files that the format of the destination cannot
            hold, and the keys whose tensors share memory in the source, but cannot in the destination.

    Example:
        >>> convert("step_1000", "model.safetensors", to="safetensors")  # doctest: +SKIP
    """
    start = time.perf_counter()
    check_types(max_memory=max_memory, shard_size=shard_size, mesh=mesh, placements=placements)
    check_types(select=select, exclude=exclude, rename=rename, dtype=dtype)
    sources, target = _paths(src), _target(dst)
    options = _options(to, shard_size, mesh, placements)
    dtypes = {"*": dtype} if isinstance(dtype, str) else dict(dtype or {})
    edits = Edits(tuple(select), tuple(exclude), dtypes, rename)
    budget = Budget(max_memory)
    with ExitStack() as stack:
        opened = [stack.enter_context(opening.open(source)) for source in sources]
        for source, checkpoint in zip(sources, opened, strict=True):
            _check_apart(source, checkpoint.index, target)
        out = WRITERS[to](edited(merged([checkpoint.index for checkpoint in opened]), edits), options)
        pieces = {id(piece) for slot in out.slots for piece in slot.entry.pieces}
        read = [files for checkpoint in opened for files in checkpoint.index.opened]
        work = _Work(out, target, budget, progress, verify, _fingerprint(out, to), read)
        if not (resume and destination.begun(target) and os.path.lexists(target)):
            destination.check(target, out.nbytes, overwrite=overwrite, folder=out.is_folder)
        if not dry_run:
            work.run(overwrite=overwrite, fsync=fsync, resume=resume)
    if out.left_out:
        warnings.warn(f"{to} holds tensors only; left out: {_some(out.left_out)}", stacklevel=2)
    if out.unsaid:
        names = _some(list(map(printable, out.unsaid)))
        warnings.warn(f"{to} has no place for metadata of the source; left out: {names}", stacklevel=2)
    if out.apart:
        groups = [" and ".join(map(printable, group)) for group in out.apart]
        warnings.warn(f"Tensors that share memory in the source are written apart: {_some(groups)}", stacklevel=2)
    files = {file.name: file.nbytes for file in out.files}
    seconds = time.perf_counter() - start
    tensors = len({id(slot.entry) for slot in out.slots})
    return Conversion(
        sources, target, to, tensors, len(pieces), out.nbytes, files, out.left_out, _rows(out), seconds, not dry_run
    )


def _paths(src: Source | Sequence[Source]) -> tuple[Path, ...]:
    if isinstance(src, (str, os.PathLike)):
        return (Path(src),)
    if not src:
        raise CheckpointError("There is nothing to convert.", expected="a path, or several")
    return tuple([Path(one) for one in src])


def _target(dst: Source) -> Path:
    path = Path(dst)
    if path.name in ("", ".."):
        raise CheckpointError("The destination has no name of its own.", expected="a file or folder", got=str(path))
    return path


def _options(
    to: str, shard_size: int | None, mesh: Sequence[int] | None, placements: Mapping[str, str] | None
) -> Options:
    if to not in WRITERS:
        raise CheckpointError("This format is not written.", expected=" or ".join(WRITERS), got=repr(to))
    if (mesh is not None or placements) and to != "dcp":
        raise CheckpointError("Only a dcp folder is cut for a mesh.", got=f"to={to!r}", fix="to='dcp'")
    if placements and mesh is None:
        raise CheckpointError("Placements are of tensors on a mesh.", fix="Give the mesh too: mesh=(2, 4), --mesh 2x4")
    if shard_size is not None and shard_size < 1:
        raise CheckpointError("The size of a part is too little.", expected="a byte at least", got=shard_size)
    if math.prod(mesh or ()) > _RANKS:
        raise CheckpointError(
            "The mesh is out of all proportion.", expected=f"at most {_RANKS} ranks", got=tuple(mesh or ())
        )
    made = None if mesh is None else Mesh(mesh)
    parsed = {pattern: parse_placements(text, len(mesh or ())) for pattern, text in (placements or {}).items()}
    return Options(shard_size, made, parsed)


def _check_apart(source: Path, index: Index, target: Path) -> None:
    """Neither may lie within the other, nor the source where the destination is written."""
    places = [os.path.realpath(target), os.path.realpath(destination.hidden(target))]
    inner = [] if source.is_dir() else [files.root / name for files in index.opened for name in index.files]
    for path in (source, *inner):
        above, name = os.path.split(os.path.abspath(path))
        for here in (os.path.realpath(path), os.path.join(os.path.realpath(above), name)):  # a link, and where it leads
            if any(os.path.commonpath([here, there]) in (here, there) for there in places):
                raise CheckpointError(
                    "The destination is the source, lies in it or around it, and the source is never touched.",
                    got=target,
                    where=source,
                )


def _rows(out: Output) -> tuple[tuple[str, ...], ...]:
    """Key, type, shape, source type and pieces, size and file of each slot."""
    rows = []
    for file in out.files:
        for slot in file.slots:
            entry, box = slot.entry, slot.box
            cut = (
                "" if box == whole(entry.shape) else f"[{', '.join(f'{o}:{o + n}' for o, n in zip(*box, strict=True))}]"
            )
            source = f"{len(entry.pieces)} x {entry.stored_dtype}"
            shape = " x ".join(map(str, box.size)) or "scalar"
            rows.append((printable(entry.key + cut), entry.dtype, shape, source, format_size(slot.nbytes), file.name))
    return tuple(rows)


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:20]) + (f" and {len(texts) - 20} more" if len(texts) > 20 else "")


def _fingerprint(out: Output, to: str) -> str:
    """A line that differs wherever the result would: sources with their times, what goes where, and how it is cast."""
    digest = hashlib.sha256(to.encode())
    sources: dict[str, None] = {}
    for file in out.files:
        digest.update(repr((file.name, file.nbytes)).encode())
        for entry, offset, box in file.slots:
            digest.update(repr((offset, box, entry.shape, entry.dtype, entry.stored_dtype)).encode())
            for piece in entry.pieces:
                place = piece.place()
                digest.update(repr((piece.box, place.start, place.stride, place.extent.file)).encode())
                sources[str(place.extent.files.root / place.extent.file)] = None
        for offset, data in file.finish([0] * len(file.slots)):  # names, and all that is no tensor
            digest.update(repr((offset, len(data))).encode() + data)
    for name in sources:
        status = os.stat(name)
        digest.update(repr((os.path.realpath(name), status.st_size, status.st_mtime_ns)).encode())
    return f"torchshard conversion 3 {digest.hexdigest()}"


@dataclass(slots=True)
class _Work:
    """One conversion, after everything has been planned."""

    out: Output
    target: Path
    budget: Budget
    progress: Callable[[int, int], object] | None
    verify: bool
    fingerprint: str
    read: Sequence[Files]
    done: int = 0
    total: int = field(init=False, default=0)

    def run(self, *, overwrite: bool, fsync: bool, resume: bool) -> None:
        """Write and rename."""
        moves = self._moves()
        self.total = sum([slot.nbytes for _, slot, _ in moves]) + self.verify * sum(
            [slot.nbytes for slot in self.out.slots]
        )
        files = {file.name: file.nbytes for file in self.out.files}
        with Destination(
            self.target, files, self.fingerprint, overwrite=overwrite, fsync=fsync, resume=resume
        ) as place:
            if place.finished:
                return
            if resume:
                destination.check(self.target, self.out.nbytes, overwrite=overwrite, folder=self.out.is_folder)
            crcs = self._write(place, moves)
            place.write_notes()
            if self.verify:
                self._check_written(place.data, crcs)
            for source in self.read:
                source.check_unchanged()
            place.commit()

    def _advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)

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

    def _write(self, place: Destination, moves: Sequence[Move]) -> list[int]:
        """Move the tensors, then put in all that surrounds them; the crc32 of each slot of the destination."""
        every = move(moves, place, self.budget, self._advance)
        crcs = [crc for (name, _, _), crc in zip(moves, every, strict=True) if name is not None]
        at = 0
        for file in self.out.files:
            its = crcs[at : at + len(file.slots)]
            at += len(file.slots)
            handle = place.fd(file.name)
            for offset, data in file.finish(its):
                write_all(handle.fd, data, offset)
        return crcs

    def _check_written(self, data: Path, crcs: Sequence[int]) -> None:
        """Open what was written as any reader would, and compare type, shape, place and bytes of each tensor."""
        with opening.open(data) as written:
            found = {place: its for entry in _tensors_of(written.index) for place, its in _places(entry)}
            moves = [
                Move(None, self._written(found, file.name or data.name, slot))
                for file in self.out.files
                for slot in file.slots
            ]
            again = move(moves, None, self.budget, self._advance)
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
