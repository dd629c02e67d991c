"""Opening a checkpoint: telling its format from what is there, and a lazy mapping of what it holds."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

from torchshard.checkpoint.entries import Entry, Index, TensorEntry
from torchshard.checkpoint.files import unreadable
from torchshard.checkpoint.formats import dcp, safetensors, torch_file
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError

READERS: Mapping[str, Callable[[Path], Index]] = MappingProxyType(
    {"dcp": dcp.read, "torch": torch_file.read, "safetensors": safetensors.read}
)
_FORMATS = "a folder of torch.distributed.checkpoint, a torch.save file or a safetensors file"


class Checkpoint(Mapping[str, Entry]):
    """A checkpoint on disk as a mapping of flat names to entries; nothing is read before it is asked for.

    `ck["layers.0.weight"]` has `.dtype`, `.shape` and `.boxes`; `ck["layers.0.weight"][10:20]` reads ten rows. Keys
    that hold no tensor give an ObjectEntry, whose `.value()` is plain data.

    Args:
        path: where it is.
        index: what a reader found there.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self.path, self.index = path, index

    @property
    def format(self) -> str:
        """ "dcp", "torch" or "safetensors"."""
        return self.index.format

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the format says about itself: the metadata of safetensors, the version of a dcp folder."""
        return MappingProxyType(dict(self.index.metadata))

    def __getitem__(self, key: str) -> Entry:
        return self.index.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.entries)

    def __len__(self) -> int:
        return len(self.index.entries)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.format} at {self.path}: {len(self)} keys>"

    def close(self) -> None:
        """Let go of open files; a later read opens them again."""
        for entry in self.index.entries.values():
            if isinstance(entry, TensorEntry):
                entry.files.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of any format that is read here, without torch, a process group, or running what is pickled.

    Args:
        path: a folder that torch.distributed.checkpoint wrote, a torch.save file, or a safetensors file.

    Raises:
        CheckpointError: missing, damaged, incomplete, of another format, or holding what is not plain data.

    Example:
        >>> with open("step_1000") as ck:  # doctest: +SKIP
        ...     ck["model.embed.weight"][:2]
    """
    place = Path(path)
    try:
        kind = _told(place)
        return Checkpoint(place, READERS[kind](place))
    except OSError as error:
        raise unreadable(place, error) from error


def _told(path: Path) -> str:
    """The format of what is at `path`."""
    if path.is_dir():
        if (path / dcp.METADATA).exists():
            return "dcp"
        raise _not_one(path, "a folder without the file .metadata, which is written last")
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith(b"PK\3\4"):
        return "torch"
    if head[8:9] == b"{":
        return "safetensors"
    if head.startswith(b"\x80"):
        raise CheckpointError(
            "This is a bare pickle, perhaps of torch before 1.6, which is not read.",
            where=path,
            fix="Load it where you trust it, and save it again with torch.save.",
        )
    raise _not_one(path, f"a file that begins with {printable(head)}" if head else "an empty file")


def _not_one(path: Path, got: str) -> CheckpointError:
    return CheckpointError("This is no checkpoint that is read here.", expected=_FORMATS, got=got, where=path)
