"""What a checkpoint holds: tensors as boxes that lie somewhere in a file, objects, and the index of both."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError, ShardingError
from torchshard.layout import Box, Sharding, check_tiling, contiguous_stride, tiles, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Extent(NamedTuple):
    """Some bytes of a file, and the checksum that the format stored for them (None: it stored none)."""

    files: Files
    file: str
    offset: int
    nbytes: int
    crc32: int | None = None

    @property
    def where(self) -> str:
        """Path of the file."""
        return f"{self.files.root / self.file}"

    @property
    def version(self) -> tuple[int, int, int]:
        """Of the file; see Files."""
        return self.files.version(self.file)

    def __str__(self) -> str:
        return f"{self.where}, bytes {self.offset} to {self.offset + self.nbytes}"


class Place(NamedTuple):
    """Where the elements of a piece lie.

    Args:
        extent: the stretch of file that holds them; everything that follows was checked to stay within.
        start: byte of the piece's first element, counted from the start of the file.
        stride: steps between neighbours, one a dim, in elements; never negative.
    """

    extent: Extent
    start: int
    stride: tuple[int, ...]


class Piece:
    """A box of a tensor and its place, or what finds it once it is asked for, which may read a little of the file."""

    __slots__ = ("_place", "_row_major", "box")

    def __init__(self, box: Box, place: Place | Callable[[], Place]) -> None:
        self.box, self._place = box, place
        self._row_major: bool | None = None

    def place(self) -> Place:
        """Where the elements are; found once."""
        place = self._place
        if not isinstance(place, Place):  # another thread may find it too
            place = self._place = place()
        return place

    @property
    def row_major(self) -> bool:
        """Whether the elements lie one after another, the last dim fastest; found out once."""
        if self._row_major is None:
            stride = self.place().stride
            wanted = contiguous_stride(self.box.size)
            self._row_major = stride == wanted or all(
                s == w for s, w, n in zip(stride, wanted, self.box.size, strict=True) if n > 1
            )
        return self._row_major


def flat(extent: Extent, dtype: str = "uint8", key: str = "") -> "TensorEntry":
    """A stretch of file as a tensor of one dim."""
    shape = (extent.nbytes // DTYPES[dtype].itemsize,)
    pieces = (Piece(whole(shape), Place(extent, extent.offset, (1,))),) if extent.nbytes else ()
    return TensorEntry(dtype, shape, pieces, key)


def narrowed(piece: Piece, box: Box, at: tuple[int, ...], itemsize: int) -> Piece:
    """The part of a piece that lies in `box` (in the coordinates of the piece's own box), moved to begin at `at`."""

    def find() -> Place:
        place = piece.place()
        steps = [(o - b) * s for o, b, s in zip(box.offset, piece.box.offset, place.stride, strict=True)]
        return Place(place.extent, place.start + sum(steps) * itemsize, place.stride)

    return Piece(Box(at, box.size), find)


@dataclass(slots=True, eq=False)
class TensorEntry:
    """A tensor of a checkpoint; its values stay in the file until they are asked for.

    `entry[10:20]` reads only those rows. Values are numpy arrays; see DType.numpy for the types that numpy lacks.

    Args:
        dtype: torch's name, such as "bfloat16".
        shape: of the full tensor.
        pieces: boxes that hold every element exactly once; empty ones are left out.
        key: name in the checkpoint.
        stored: type of the elements in the files, where values are cast as they are read; "" for `dtype`.
        sharding: the mesh and placements that it was saved with, where the format says them.
        requires_grad: whether it asked for gradients, where the format says so.
        parameter: whether it was an nn.Parameter, where the format says so.
        attributes: names of what else was set on it in Python, which is not kept.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    key: str = ""
    stored: str = ""
    sharding: Sharding | None = None
    requires_grad: bool = False
    parameter: bool = False
    attributes: tuple[str, ...] = ()

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes in which the tensor is stored."""
        return tuple([piece.box for piece in self.pieces])

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def itemsize_stored(self) -> int:
        """Bytes an element in the files."""
        return DTYPES[self.stored_dtype].itemsize

    @property
    def stored_dtype(self) -> str:
        """Type of the elements in the files."""
        return self.stored or self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def cut(self) -> tuple[int, ...]:
        """Into how many intervals each dim is cut: (2, 1) for rows on two ranks."""
        return tuple([len({(b.offset[d], b.size[d]) for b in self.boxes} or {0}) for d in range(len(self.shape))])

    def __getitem__(self, index: Any) -> "NDArray[Any]":
        from torchshard.checkpoint.moving.reading import (
            read_index,
        )  # needs numpy, which describing a checkpoint does not

        return read_index(self, index)

    def numpy(self) -> "NDArray[Any]":
        """The full tensor."""
        return self[...]


def whole_box(entry: TensorEntry) -> Box:
    """The box of all of a tensor; that of its piece if there is one only, as objects of many tensors are alike."""
    return entry.pieces[0].box if len(entry.pieces) == 1 else whole(entry.shape)


def is_all(box: Box, entry: TensorEntry) -> bool:
    """Whether a box of a tensor is all of it."""
    return box.size == entry.shape


@dataclass(slots=True, eq=False)
class ObjectEntry:
    """Anything else that a checkpoint holds under a key; read and checked to be plain data when asked for."""

    read: Callable[[], object] = field(repr=False)
    nbytes: int = 0
    key: str = ""

    def value(self) -> object:
        """The object, made of plain data; tensors inside are TensorEntries.

        Raises:
            CheckpointError: it is not plain data; names what it is.
        """
        return self.read()


Entry = TensorEntry | ObjectEntry


@dataclass(slots=True, eq=False)
class Index:
    """All that a reader finds out about a checkpoint before any values are read.

    Args:
        format: what it is, such as "dcp".
        entries: flat name to entry.
        tree: makes the nested state dict that was saved, with entries as leaves.
        files: names and sizes of the files that hold the values.
        metadata: what the format says about itself.
        opened: what the files are read through.
        notes: what the writer has noted beside the tensors, as the metadata of safetensors files.
    """

    format: str
    entries: dict[str, Entry]
    tree: Callable[[], object]
    files: dict[str, int]
    metadata: Mapping[str, str]
    opened: tuple[Files, ...]
    notes: Mapping[str, str] = field(default_factory=dict)


def common_notes(indices: Iterable[Index]) -> dict[str, str]:
    """The notes of checkpoints that become one; of those that differ none.

    Warns:
        UserWarning: names those that differ.
    """
    found: dict[str, str] = {}
    apart: dict[str, None] = {}
    for index in indices:
        for name, text in index.notes.items():
            if found.setdefault(name, text) != text:
                apart[name] = None
    if apart:
        warnings.warn(f"metadata that differ are left out: {', '.join(map(printable, apart))}", stacklevel=4)
    return {name: text for name, text in found.items() if name not in apart}


_MANY = 2000  # boxes: which of more are wrong would take long to find
_INCOMPLETE = "Not all ranks' parts are here; save again, or copy the missing files."


def check_boxes(shape: tuple[int, ...], boxes: Sequence[Box], where: str, fix: str = _INCOMPLETE) -> None:
    """Raise CheckpointError unless the boxes of its pieces hold every element of a tensor of `shape` exactly once."""
    if list(boxes) == [whole(shape)] or tiles(shape, boxes):
        return
    if len(boxes) > _MANY:
        raise CheckpointError(
            "The pieces of a tensor do not make it up: some are missing, or hold the same elements.",
            expected=f"{math.prod(shape)} elements of shape {shape}",
            got=f"{sum([box.numel for box in boxes])} in {len(boxes)} boxes",
            where=where,
            fix=fix,
        )
    try:
        check_tiling(shape, boxes)
    except ShardingError as error:
        raise CheckpointError(
            f"The pieces of a tensor do not make it up: {error.what}",
            expected=error.expected,
            got=error.got,
            where=where,
            fix=fix if "missing" in error.what else None,
        ) from error
