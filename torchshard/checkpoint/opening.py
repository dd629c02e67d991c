"""Opening a checkpoint: telling its format from what is there, and a lazy mapping of what it holds."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple

from torchshard.checkpoint.entries import Entry, Index, TensorEntry
from torchshard.checkpoint.files import Files, given, is_folder, is_there, unreadable
from torchshard.checkpoint.formats import dcp, hugging_face, rank_files, safetensors, torch_file
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError
from torchshard.layout import Box, Sharding

_FORMATS = (
    "a folder of torch.distributed.checkpoint, a torch.save or safetensors file, a folder of safetensors files, "
    "or the torch.save files of all ranks"
)


class Stored(NamedTuple):
    """How a tensor is stored.

    Args:
        dtype: torch's name.
        shape: of the full tensor.
        boxes: in which it is stored.
        files: that hold them.
        sharding: mesh and placements that it was saved with; None where the format does not say.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    files: tuple[str, ...]
    sharding: Sharding | None


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
        """Such as "dcp", "torch" or "safetensors"."""
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

    def layout(self, key: str) -> Stored:
        """How the tensor of this key is stored.

        Raises:
            KeyError: no such key.
            CheckpointError: it is no tensor.
        """
        entry = self.index.entries[key]
        if not isinstance(entry, TensorEntry):
            raise CheckpointError("This key holds no tensor.", got=printable(key), where=self.path)
        files = dict.fromkeys([piece.place().extent.file for piece in entry.pieces])
        return Stored(entry.dtype, entry.shape, entry.boxes, tuple(files), entry.sharding)

    def close(self) -> None:
        """Let go of open files; a later read opens them again."""
        for files in self.index.opened:
            files.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of any format that is read here, without torch, a process group, or running what is pickled.

    Args:
        path: a folder that torch.distributed.checkpoint wrote (its own format or safetensors), a torch.save file, a
            safetensors file, a folder of safetensors files or their index, or the torch.save files of all ranks: a
            folder of `*rank0*.pt`, `*rank1*.pt`, ..., or a pattern such as "folder/model_rank*.pt".

    Raises:
        CheckpointError: missing, damaged, incomplete, of another format, or holding what is not plain data.

    Warns:
        UserWarning: names the safetensors files of a folder, and what its files hold, that its index leaves out.

    Example:
        >>> with open("step_1000") as ck:  # doctest: +SKIP
        ...     ck["model.embed.weight"][:2]
    """
    made = opened(path)
    if any(name.endswith(hugging_face.INDEX_SUFFIX) for name in made.index.files):
        found = [path for path in beside([made.path], [made.index]) if path.suffix == ".safetensors"]
        hugging_face.warn_of_left_out([path.name for path in found])
    return made


def opened(path: str | os.PathLike[str]) -> Checkpoint:
    """As `open`, for those who say themselves which files of a folder they leave out."""
    place = given(path)
    try:
        return Checkpoint(place, _read(place))
    except OSError as error:
        raise unreadable(place, error) from error


def _read(path: Path) -> Index:
    """What the reader of this format finds."""
    if is_folder(path):
        return _read_folder(path)
    if not is_there(path) and "*" in path.name and (matching := sorted(path.parent.glob(path.name))):
        return rank_files.read(rank_files.ordered(matching))
    if dcp.is_part(path) and is_there(path):
        raise CheckpointError(
            "The file is part of a folder of torch.distributed.checkpoint.", where=path, fix="Open the folder."
        )
    files = Files(path.parent, path.name)
    if path.name.endswith(".json"):
        return hugging_face.read_indexed(files, path.name)
    head = files.read(path.name, 0, min(16, files.size(path.name)))
    if head.startswith(b"PK\3\4"):
        return torch_file.read(files, path.name)
    if head[8:9] == b"{":  # before the next: the length of a header may begin with that byte too
        return hugging_face.of_whole_tensors(safetensors.read(files, path.name), path)
    if head.startswith(b"\x80"):
        return torch_file.read(files, path.name)
    raise _not_one(path, f"a file that begins with {printable(head)}" if head else "an empty file")


def _read_folder(path: Path) -> Index:
    if (found := dcp.read(path)) is not None:
        return found
    if (index := hugging_face.find_index(path)) is not None:
        return hugging_face.read_indexed(Files(path, found=[index.name]), index.name)
    if parts := hugging_face.find_parts(path):
        return hugging_face.read_folder(parts)
    if ranks := rank_files.find(path):
        return rank_files.read(ranks)
    names = ", ".join([printable(one.name) for one in _state_files(path)])
    raise _not_one(
        path,
        "a folder without the file .metadata (which is written last), safetensors files or rank files",
        f"Name one of its files: {names}" if names else None,
    )


def beside(sources: Sequence[Path], indices: Sequence[Index]) -> list[Path]:
    """Files of state dicts that lie in a source folder and are no part of what was read."""
    read = {os.path.realpath(files.root / name) for index in indices for files in index.opened for name in index.files}
    found = [path for source in sources if source.is_dir() for path in _state_files(source)]
    return [path for path in found if os.path.realpath(path) not in read]


def _state_files(folder: Path) -> list[Path]:
    """The files of a folder that are state dicts by their names, whether they are read with the folder or not."""
    suffixes = (*rank_files.SUFFIXES, ".pkl", ".safetensors")
    return sorted(path for path in folder.iterdir() if path.suffix in suffixes and path.is_file())


def _not_one(path: Path, got: str, fix: str | None = None) -> CheckpointError:
    return CheckpointError("This is no checkpoint that is read here.", expected=_FORMATS, got=got, where=path, fix=fix)
