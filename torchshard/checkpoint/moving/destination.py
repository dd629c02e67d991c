"""The destination while it is written: in a hidden folder beside it, then renamed in one step.

    .NAME.partial/journal    what is done; locked as long as a conversion is at work
    .NAME.partial/data       the file or folder to be
    .NAME.partial/replaced   a folder that was at NAME, until `data` has that name

A process that is killed leaves this folder behind, never a destination. The next conversion to the same place goes on
from there if it is asked to (`resume`), else it begins anew.
"""

import ctypes
import errno
import fcntl
import functools
import os
import shutil
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from torchshard.checkpoint.files import OPEN_FILES, Handle, is_folder, is_there
from torchshard.checkpoint.moving import journal
from torchshard.checkpoint.text import format_size
from torchshard.errors import CheckpointError

SUFFIX = ".partial"
_REPLACED = "replaced"
NOTE_SECONDS = 2.0  # between two entries into the journal


class Destination:
    """Use as a context; unless `commit` was reached, leaving it removes what was written (with `resume`, keeps it).

    Args:
        path: the file or folder to be; a relative one stays what it is now where the process changes its own folder.
        files: name -> bytes, of the files in the folder; the name is "" where `path` is the one file.
        fingerprint: one line that says all that the result follows from.
        overwrite: whether an existing destination is replaced.
        fsync: whether the data must be on the disk before the destination gets its name.
        resume: whether to go on where another left off, and to keep what there is if this one fails.

    Attributes:
        done: blocks that are written already, with their checksums.
        finished: the one before was killed after it had finished, and nothing is left to do.

    Raises:
        CheckpointError: another conversion is at work there, what is left is of something else, or the system refuses.
    """

    def __init__(
        self, path: Path, files: Mapping[str, int], fingerprint: str, *, overwrite: bool, fsync: bool, resume: bool
    ) -> None:
        self.named, self.path = path, path.absolute()  # as the user says it, for messages; and where it is
        self.files, self.overwrite, self.fsync, self.resume = files, overwrite, fsync, resume
        self.is_folder = "" not in files
        self.partial = hidden(self.path)
        self.data = self.partial / "data"
        self.done: Mapping[journal.Block, Sequence[int]] = {}
        self.finished = self.committed = False
        self.notes: list[str] = []
        self.noted = time.monotonic()
        self._opening = threading.Lock()
        self._open_now: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._opened = functools.lru_cache(maxsize=OPEN_FILES)(self._open)
        try:
            self.journal = _locked(self.partial / "journal", path)
        except OSError as error:
            with suppress(OSError):
                self.partial.rmdir()
            raise refused(path, error) from error
        try:
            try:
                self._begin(fingerprint)
            except OSError as error:
                self._leave()
                raise refused(path, error) from error
        except BaseException:
            os.close(self.journal)
            raise

    def _begin(self, fingerprint: str) -> None:
        self._settle()
        state = journal.read(self.journal, fingerprint) if self.resume else None
        if state is None:
            if self.resume and (is_there(self.data) or os.fstat(self.journal).st_size):
                raise CheckpointError(
                    "What is left of an earlier conversion is of another source or other options.",
                    where=self.partial,
                    fix="Convert without resume to begin anew.",
                )
            _remove(self.data)
            os.ftruncate(self.journal, 0)
            journal.write(self.journal, [fingerprint])
        elif state.complete and not is_there(self.data):
            self.finished = os.path.lexists(self.path)
        elif is_there(self.data):
            self.done = state.blocks
        if not self.finished and self.is_folder:
            self.data.mkdir(exist_ok=True)

    def __enter__(self) -> "Destination":
        return self

    def fd(self, name: str) -> Handle:
        """The open file of this name; keep it as long as its `fd` is used. Threads that ask at once get the same."""
        with self._opening:
            return self._opened(name)

    def _open(self, name: str) -> Handle:
        try:
            handle = Handle(self.data / name if name else self.data, os.O_RDWR | os.O_CREAT)
            self._open_now.add(handle)
            _reserve(handle.fd, self.files[name])
            return handle
        except OSError as error:
            raise refused(self.named, error) from error

    def note(self, block: journal.Block, crcs: Sequence[int]) -> None:
        """Say that a block is written, and its checksums; goes to the journal every few seconds."""
        self.notes.append(" ".join(map(str, [*block, *crcs])))
        if time.monotonic() - self.noted > NOTE_SECONDS:
            self.write_notes()

    def write_notes(self) -> None:
        """Bring the data to the disk, if that was asked for, and then the notes into the journal."""
        try:
            if self.fsync:
                self._sync()
            journal.write(self.journal, self.notes)
            if self.fsync:
                os.fsync(self.journal)
        except OSError as error:
            raise refused(self.named, error) from error
        self.notes, self.noted = [], time.monotonic()

    def _sync(self) -> None:
        for name in self.files:
            handle = self.fd(name)
            os.fsync(handle.fd)
        if self.data.is_dir():
            _sync_folder(self.data)

    def commit(self) -> None:
        """Give the destination its name."""
        check_free(self.path, self.overwrite, folder=self.is_folder)
        self._opened.cache_clear()
        try:
            journal.write(self.journal, [*self.notes, journal.COMMIT])
            if self.fsync:
                os.fsync(self.journal)
                _sync_folder(self.partial)
            _take_name(self.data, self.path)
            self.committed = True
            if self.fsync:
                _sync_folder(self.path.parent)
        except OSError as error:
            raise refused(self.named, error) from error

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._opened.cache_clear()
            for handle in list(self._open_now):  # a removed file takes room as long as it is open
                with suppress(OSError):
                    handle.close()
            if kind is not None and self.resume and not self.committed:
                with suppress(CheckpointError, OSError):
                    self.write_notes()
                with suppress(CheckpointError, OSError):
                    self._settle()
            else:
                self._leave()
        finally:  # also if another interrupt comes meanwhile; the lock goes last
            os.close(self.journal)

    def _settle(self) -> None:
        """What stepped aside goes where the new folder has its name, and else gets it back.

        Raises:
            CheckpointError: neither can be, as another program has taken the name; all stays where it is.
        """
        replaced = self.partial / _REPLACED
        if not os.path.lexists(replaced):
            return
        if not os.path.lexists(self.path):
            os.rename(replaced, self.path)
        elif not os.path.lexists(self.data):
            _remove(replaced)
        else:
            raise CheckpointError(
                "A folder stepped aside for an earlier conversion, and its name was taken before that one was there.",
                got=replaced,
                where=self.path,
                fix="Move one of them elsewhere, or remove it.",
            )

    def _leave(self) -> None:
        """Remove the hidden folder, unless what stepped aside must stay there."""
        with suppress(CheckpointError, OSError):
            self._settle()
            _remove(self.data)
            (self.partial / "journal").unlink()
            self.partial.rmdir()


def hidden(path: Path) -> Path:
    """The folder in which the destination of this path is written."""
    return path.with_name(f".{path.name}{SUFFIX}")


def _locked(path: Path, destination: Path) -> int:
    """The journal, open, which no other process has.

    Raises:
        CheckpointError: another has, or its folder is a link.
    """
    while True:
        path.parent.mkdir(exist_ok=True)
        if path.parent.is_symlink():
            raise CheckpointError("There is a link in the place of the hidden folder.", where=path.parent)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # its folder was removed just now, by one that was ready
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BlockingIOError as error:
            os.close(fd)
            raise CheckpointError(
                "Another conversion writes to this destination.", where=destination, fix="Wait for it, or stop it."
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                return fd  # a file system without locks
            os.close(fd)
            raise
        os.close(fd)


_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)  # of Linux


def _reserve(fd: int, nbytes: int) -> None:
    """Have the file system find room for all of a file at once, where it can; writing is then less work.

    Not os.posix_fallocate: where the file system cannot, the C library writes a byte into each block instead.
    """
    if _fallocate is not None and _fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))


def _take_name(data: Path, path: Path) -> None:
    """Rename; a folder that is replaced steps aside first, as the system replaces files only."""
    if not path.is_dir():
        os.replace(data, path)
        return
    os.rename(path, data.with_name(_REPLACED))
    os.rename(data, path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check(path: Path, nbytes: int, *, overwrite: bool, folder: bool) -> None:
    """Raise CheckpointError if a file or folder of this size cannot come to be here."""
    try:
        check_free(path, overwrite, folder=folder)
        if not is_folder(path.parent):
            raise CheckpointError("The folder of the destination does not exist.", where=path.parent)
        _check_writable(path.parent)
        if path.is_dir() and not path.is_symlink():  # steps aside
            _check_writable(path)
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise refused(path, error) from error
    free += _size(hidden(path) / "data")  # goes, or is part of it
    if nbytes > free:
        raise CheckpointError(
            "There is not enough room for the destination.",
            expected=f"{format_size(nbytes)} free",
            got=format_size(free),
            where=path.parent,
        )


def _check_writable(folder: Path) -> None:
    """Raise CheckpointError if the system will say no in the end."""
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise CheckpointError("The folder cannot be written to: it is read-only, or not yours.", where=folder)


def begun(path: Path) -> bool:
    """Whether there is something to go on from."""
    return os.path.lexists(hidden(path))


def _size(path: Path) -> int:
    """Bytes on the disk of a file, or of the files of a folder; 0 where there is nothing."""
    with suppress(OSError):
        files = list(path.iterdir()) if path.is_dir() else [path]
        return sum([file.stat().st_blocks * 512 for file in files])
    return 0


# What a folder of ours or of torch's holds; one with anything else in it is never replaced.
_OURS = (".metadata", ".distcp", ".safetensors", ".bin", ".index.json")


def check_free(path: Path, overwrite: bool, *, folder: bool) -> None:
    """Raise CheckpointError if the destination is there, unless it may be replaced."""
    if path.is_dir() and not folder:
        raise CheckpointError("The destination is a folder; name a file.", where=path)
    if os.path.lexists(path) and not (path.is_dir() or path.is_symlink() or path.is_file()):
        raise CheckpointError("The destination is not a regular file, and is not replaced.", where=path)
    if not overwrite and os.path.lexists(path):
        raise CheckpointError(
            "The destination exists.", where=path, fix="Remove it, or overwrite it (overwrite=True, --overwrite)."
        )
    if folder and os.path.lexists(path):
        if not path.is_dir() or path.is_symlink():
            raise CheckpointError("The destination is a file or a link, and is to be a folder.", where=path)
        if os.path.ismount(path):
            raise CheckpointError(
                "The destination is a mount point, and cannot be replaced.", where=path, fix="Name a folder in it."
            )
        other = [entry.name for entry in os.scandir(path) if entry.is_dir() or not entry.name.endswith(_OURS)]
        if other:
            raise CheckpointError(
                "The folder holds more than a checkpoint, and is not replaced.", got=sorted(other)[0], where=path
            )


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def refused(path: Path, error: OSError) -> CheckpointError:
    """What the system said, as a CheckpointError."""
    return CheckpointError(f"The destination cannot be written: {error.strerror or error}.", where=path)
