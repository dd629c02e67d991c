"""The file that is being written: a hidden sibling until it is complete, then renamed in one step."""

import fcntl
import glob
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from torchshard.checkpoint.text import format_size
from torchshard.errors import CheckpointError

SUFFIX = ".partial"


class Destination:
    """Use as a context; unless `commit` was reached, leaving it removes what was written.

    A process that is killed leaves `.<name>.<random>.partial` behind, never the destination. The file is locked as long
    as it is written, so that `remove_leftovers` can tell.

    Args:
        path: the file to be.
        nbytes: its size, for which there must be room.
        overwrite: whether an existing file is replaced.
        fsync: whether the data must be on the disk before the file gets its name.

    Raises:
        CheckpointError: exists already, no such folder, no room, or the system refuses.
    """

    def __init__(self, path: Path, nbytes: int, *, overwrite: bool, fsync: bool) -> None:
        self.path, self.overwrite, self.fsync = path, overwrite, fsync
        check(path, nbytes, overwrite=overwrite)
        self.partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{SUFFIX}")
        try:
            self.fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _refused(path, error) from error
        self.done = False
        with suppress(OSError):  # a file system without locks: there, `remove_leftovers` removes nothing
            fcntl.flock(self.fd, fcntl.LOCK_EX)

    def __enter__(self) -> "Destination":
        return self

    def flush(self) -> None:
        """Bring the data to the disk, if that was asked for."""
        try:
            if self.fsync:
                os.fsync(self.fd)
        except OSError as error:
            raise _refused(self.path, error) from error

    def commit(self) -> None:
        """Give the file its name."""
        _check_free(self.path, self.overwrite)
        try:
            os.replace(self.partial, self.path)
            self.done = True
            if self.fsync:
                _sync_folder(self.path.parent)
        except OSError as error:
            raise _refused(self.path, error) from error

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)
        if not self.done:
            self.partial.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove what killed conversions to this destination left behind."""
    for old in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}{SUFFIX}"):
        with suppress(OSError), old.open("rb") as file:  # one that is still written, or is not ours to remove, stays
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            old.unlink()


def check(path: Path, nbytes: int, *, overwrite: bool) -> None:
    """Raise CheckpointError if a file of this size cannot come to be here."""
    _check_free(path, overwrite)
    if not path.parent.is_dir():
        raise CheckpointError("The folder of the destination does not exist.", where=path.parent)
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise _refused(path, error) from error
    if nbytes > free:
        raise CheckpointError(
            "There is not enough room for the destination.",
            expected=f"{format_size(nbytes)} free",
            got=format_size(free),
            where=path.parent,
        )


def _check_free(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise CheckpointError("The destination is a folder; name a file.", where=path)
    if not overwrite and os.path.lexists(path):
        raise CheckpointError(
            "The destination exists.", where=path, fix="Remove it, or overwrite it (overwrite=True, --overwrite)."
        )


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refused(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"The destination cannot be written: {error.strerror or error}.", where=path)
