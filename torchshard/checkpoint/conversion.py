"""Converting a checkpoint into another format, as a stream."""

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from torchshard.checkpoint import opening
from torchshard.checkpoint.arguments import check_types
from torchshard.checkpoint.editing import Edits, Rename, edited, merged
from torchshard.checkpoint.entries import Index, is_all
from torchshard.checkpoint.files import given
from torchshard.checkpoint.formats import dcp_write, safetensors, torch_file
from torchshard.checkpoint.formats.out import Options, Output
from torchshard.checkpoint.moving import destination
from torchshard.checkpoint.moving.runner import MEMORY, Budget
from torchshard.checkpoint.text import format_size, parse_placements, printable, table
from torchshard.checkpoint.writing import Writing, fingerprint
from torchshard.errors import CheckpointError
from torchshard.layout import Mesh

WRITERS: Mapping[str, Callable[[Index, Options], Output]] = MappingProxyType(
    {"safetensors": safetensors.write, "torch": torch_file.write, "dcp": dcp_write.write}
)
Source = str | os.PathLike[str]
_RANKS = 2**20  # of a mesh: each has files of its own
_NAMED = 20  # keys in a warning


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
            what is no tensor, comes on top: 2 to 5 KiB a tensor, and ten times the bytes of pickled values.
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
            hold, the keys whose tensors share memory in the source, but cannot in the destination, and the files of
            state dicts that lie in a source folder and are no part of what was read.

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
        indices = [stack.enter_context(opening.opened(source)).index for source in sources]
        _check_apart(sources, indices, target)
        # Now, as the process may change its folder meanwhile.
        beside = [printable(path.name) for path in opening.beside(sources, indices)]
        index = edited(merged(indices), edits)
        out = WRITERS[to](index, options)
        writing = Writing(out, target, fingerprint(out, to), index.opened, budget, progress, verify=verify)
        if not (resume and destination.begun(target) and os.path.lexists(target)):
            destination.check(target, out.nbytes, overwrite=overwrite, folder=out.is_folder)
        if not dry_run:
            writing.run(overwrite=overwrite, fsync=fsync, resume=resume)
    _warn_of_losses(out, to, beside)
    return _done(sources, target, to, out, time.perf_counter() - start, written=not dry_run)


def _warn_of_losses(out: Output, to: str, beside: Sequence[str]) -> None:
    """Say what the destination does not hold, although the sources do."""
    losses = {
        "the folder holds more, which can be further sources; left out": beside,
        f"{to} holds tensors only; left out": out.left_out,
        f"{to} has no place for metadata of the source; left out": list(map(printable, out.unsaid)),
        "Tensors that share memory in the source are written apart": [
            " and ".join(map(printable, group)) for group in out.apart
        ],
    }
    for what, names in losses.items():
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            warnings.warn(f"{what}: {', '.join(names[:_NAMED])}{more}", stacklevel=3)


def _done(
    sources: tuple[Path, ...], target: Path, to: str, out: Output, seconds: float, *, written: bool
) -> Conversion:
    tensors = len({id(slot.entry) for slot in out.slots})
    pieces = len({id(piece) for slot in out.slots for piece in slot.entry.pieces})
    files = {file.name: file.nbytes for file in out.files}
    return Conversion(
        sources, target, to, tensors, pieces, out.nbytes, files, out.left_out, _rows(out), seconds, written
    )


def _paths(src: Source | Sequence[Source]) -> tuple[Path, ...]:
    if isinstance(src, (str, os.PathLike)):
        return (Path(src),)
    if not src:
        raise CheckpointError("There is nothing to convert.", expected="a path, or several")
    return tuple([Path(one) for one in src])


def _target(dst: Source) -> Path:
    path = given(dst)
    if path.name in ("", ".."):
        raise CheckpointError("The destination has no name of its own.", expected="a file or folder", got=str(path))
    try:
        path.absolute()
    except OSError as error:  # the current folder was removed
        raise destination.refused(path, error) from error
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
    parsed = {glob: parse_placements(text, len(mesh or ()), glob) for glob, text in (placements or {}).items()}
    return Options(shard_size, made, parsed)


def _check_apart(sources: Sequence[Path], indices: Sequence[Index], target: Path) -> None:
    """Neither may lie within the other, nor a source where the destination is written."""
    places = [os.path.realpath(target), os.path.realpath(destination.hidden(target))]
    for source, index in zip(sources, indices, strict=True):
        inner = [] if source.is_dir() else [files.root / name for files in index.opened for name in index.files]
        for path in (source, *inner):
            above, name = os.path.split(os.path.abspath(path))
            # A link, and where it leads.
            for here in (os.path.realpath(path), os.path.join(os.path.realpath(above), name)):
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
            cut = "" if is_all(box, entry) else f"[{', '.join(f'{o}:{o + n}' for o, n in zip(*box, strict=True))}]"
            source = f"{len(entry.pieces)} x {entry.stored_dtype}"
            shape = " x ".join(map(str, box.size)) or "scalar"
            rows.append((printable(entry.key + cut), entry.dtype, shape, source, format_size(slot.nbytes), file.name))
    return tuple(rows)
