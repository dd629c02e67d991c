"""Reading the files of one checkpoint: by name below one folder, with exact lengths, and never outside of it."""

import functools
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError

OPEN_FILES = 64
_AT_ONCE = 2**30  # bytes: descriptions that are read in one go; a file of holes may claim any size
_VECTOR = 1024  # buffers of one read, at most: IOV_MAX


def given(path: str | os.PathLike[str]) -> Path:
    """A path that the user gave; CheckpointError where no file can have such a name."""
    if "\0" in os.fspath(path):
        raise CheckpointError("A path cannot hold a NUL character.", got=printable(os.fspath(path)))
    return Path(path)


def is_there(path: Path) -> bool:
    """Whether there is something of this name.

    Raises:
        OSError: the system does not say; since Python 3.14 there is nothing then for Path.exists().
    """
    return _mode(path) is not None


def is_folder(path: Path) -> bool:
    """Whether there is a folder of this name; OSError as of `is_there`."""
    return stat.S_ISDIR(_mode(path) or 0)


def _mode(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


class Handle:
    """An open file; closed when the last user lets go of it, so that a thread may finish a read during eviction."""

    __slots__ = ("__weakref__", "fd", "path")

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self.path = path
        self.fd = os.open(path, flags | os.O_CLOEXEC, 0o666)

    def close(self) -> None:
        """Close it now, when no thread uses it, whoever holds it: the traceback of an exception may for long."""
        if hasattr(self, "fd"):
            fd = self.fd
            del self.fd  # a number that close() refused may be another file's by the next time
            os.close(fd)

    __del__ = close


class Files:
    """The files below `root`. Names come from the checkpoint itself and are not trusted. Safe for several threads.

    At most OPEN_FILES stay open, so a checkpoint of ten thousand ranks fits any limit on open files.

    Args:
        root: the folder; a relative one stays what it is now where the process changes its own folder.
        named: a file in it that the user named himself: the one that may be a link to anywhere.
        found: files that were seen in the folder. Their names, and the one that the user gave, may be odd.
    """

    def __init__(self, root: Path, named: str | None = None, found: Iterable[str] = ()) -> None:
        self.root, self.named = root, named  # as the user says it, for messages
        self._place = root.absolute()
        self._known = frozenset((named, *found))
        real = os.path.realpath(self._place)
        self._inside = (real, *_blobs(real))
        self._handle = functools.lru_cache(maxsize=OPEN_FILES)(self._open)
        self._found: dict[str, os.stat_result] = {}

    def path(self, name: str) -> Path:
        """Where the file is.

        Raises:
            CheckpointError: the name is absolute, climbs out of the folder, or is a link that leads out of it; or it is
                not text, and comes from inside of the checkpoint.
        """
        parts = name.replace(os.sep, "/").split("/")
        if not name or os.path.isabs(name) or ".." in parts:
            raise self._leaves(name)
        if not name.isprintable() and name not in self._known:
            raise CheckpointError(
                "The checkpoint names a file by what is not text.", got=printable(name), where=self.root
            )
        path = self._place / name
        if name != self.named:
            real = os.path.realpath(path)
            if not any(os.path.commonpath([real, folder]) == folder for folder in self._inside):
                raise self._leaves(name)
        return path

    def _leaves(self, name: str) -> CheckpointError:
        return CheckpointError(
            "The checkpoint names a file outside of its folder.",
            expected=f"a relative path below {self.root}",
            got=printable(name),
            where=self.root,
        )

    def size(self, name: str) -> int:
        """Bytes of the file, which must be a regular one."""
        return self._status(name).st_size

    def version(self, name: str) -> tuple[int, int, int]:
        """Size of the file and its times, as they were when the size was first asked for.

        That of the last write can be set, as copying programs do; that of the last change of any kind cannot.
        """
        status = self._status(name)
        return *_version(status), status.st_ctime_ns

    def _status(self, name: str) -> os.stat_result:
        if name not in self._found:
            path = self.path(name)
            try:
                status = os.stat(path)
            except OSError as error:
                raise unreadable(self.root / name, error) from error
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError("This is not a regular file.", where=self.root / name)
            self._found[name] = status
        return self._found[name]

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file is another, or was written to, since its size was first asked for."""
        for name, before in self._found.items():
            path = self.path(name)
            try:
                now = os.stat(path)
            except OSError as error:
                raise unreadable(self.root / name, error) from error
            if _version(now) != _version(before) or not os.path.samestat(now, before):
                raise CheckpointError(
                    "The file was written to while it was read.",
                    where=self.root / name,
                    fix="Read it when nothing writes to it.",
                )

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes; for the small parts of a file, as they are allocated in one go."""
        self._check_range(name, offset, length)
        if length > _AT_ONCE:
            raise CheckpointError(
                "What describes the tensors is out of all proportion.",
                expected=f"{_AT_ONCE} bytes at most",
                got=f"{length} bytes",
                where=self.root / name,
            )
        data = bytearray(length)
        self.read_into(name, offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on.

        Raises:
            CheckpointError: the file ends before, or the system refuses.
        """
        self._check_range(name, offset, len(buffer))
        handle = self._opened(name)
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(handle.fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise unreadable(self.root / name, error) from error
            if not got:
                raise self._shorter(name, f"{len(buffer)} bytes at {offset}", done)
            done += got

    def read_scattered(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers of one length, one after another, with the bytes from `offset` on; errors as of `read_into`."""
        length = len(buffers[0])
        self._check_range(name, offset, length * len(buffers))
        handle = self._opened(name)
        for first in range(0, len(buffers), _VECTOR):
            some = buffers[first : first + _VECTOR]
            wanted = length * len(some)
            try:
                got = os.preadv(handle.fd, some, offset)
            except OSError as error:
                raise unreadable(self.root / name, error) from error
            if got < wanted:  # seldom: a signal, or the end of a file that shrank
                for buffer in some:
                    self.read_into(name, offset, buffer)
                    offset += len(buffer)
            else:
                offset += wanted

    def _check_range(self, name: str, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size(name):
            raise CheckpointError(
                "The file is shorter than the checkpoint says; it is cut off or its index is damaged.",
                expected=f"bytes {offset} to {offset + length}",
                got=f"{self.size(name)} bytes",
                where=self.root / name,
            )

    def _shorter(self, name: str, expected: str, done: int) -> CheckpointError:
        return CheckpointError(
            "The file became shorter while it was read.",
            expected=expected,
            got=f"{done} bytes",
            where=self.root / name,
        )

    def _opened(self, name: str) -> Handle:
        self.size(name)
        return self._handle(name)

    def _open(self, name: str) -> Handle:
        path = self.path(name)
        try:
            return Handle(path)
        except OSError as error:
            raise unreadable(self.root / name, error) from error

    def close(self) -> None:
        """Let go of all open files; a later read opens them again."""
        self._handle.cache_clear()


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _blobs(snapshot: str) -> tuple[str, ...]:
    """Where the links of a snapshot in the cache of Hugging Face lead: from NAME/snapshots/REVISION to NAME/blobs."""
    above, kind = os.path.split(os.path.dirname(snapshot))
    blobs = os.path.join(above, "blobs")
    return (blobs,) if kind == "snapshots" and os.path.realpath(blobs) == blobs else ()


def unreadable(path: object, error: OSError) -> CheckpointError:
    """What the system said, as a CheckpointError."""
    if isinstance(error, FileNotFoundError):
        return CheckpointError("The file does not exist.", where=path)
    return CheckpointError(f"The file cannot be read: {error.strerror or error}.", where=path)
