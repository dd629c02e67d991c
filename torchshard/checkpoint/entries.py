"""What a checkpoint holds: tensors as boxes that lie somewhere in a file, objects, and the index of both."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError, ShardingError
from torchshard.layout import Box, check_tiling, contiguous_stride, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

NESTING = 100  # how deep containers may be nested; far more than any state dict, far less than Python's stack

Steps = tuple[str | int, ...]


class Extent(NamedTuple):
    """Some bytes of a file, and the checksum that the format stored for them (None: it stored none)."""

    file: str
    offset: int
    nbytes: int
    crc32: int | None = None


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
    """A box of a tensor and, once asked for, its place. Finding the place may read a little of the file."""

    __slots__ = ("_find", "_place", "box")

    def __init__(self, box: Box, find: Callable[[], Place]) -> None:
        self.box, self._find = box, find
        self._place: Place | None = None

    def place(self) -> Place:
        """Where the elements are; found once."""
        if self._place is None:
            self._place = self._find()
        return self._place

    @property
    def row_major(self) -> bool:
        """Whether the elements lie one after another, the last dim fastest."""
        stride = self.place().stride
        wanted = contiguous_stride(self.box.size)
        return all(s == w for s, w, n in zip(stride, wanted, self.box.size, strict=True) if n > 1)


@dataclass(slots=True, eq=False)
class TensorEntry:
    """A tensor of a checkpoint; its values stay in the file until they are asked for.

    `entry[10:20]` reads only those rows. Values are numpy arrays; see DType.numpy for the types that numpy lacks.

    Args:
        dtype: torch's name, such as "bfloat16".
        shape: of the full tensor.
        pieces: boxes that hold every element exactly once; empty ones are left out.
        files: where they are read from.
        key: name in the checkpoint.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    files: Files = field(repr=False)
    key: str = ""

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes in which the tensor is stored."""
        return tuple([piece.box for piece in self.pieces])

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def cut(self) -> tuple[int, ...]:
        """Into how many intervals each dim is cut: (2, 1) for rows on two ranks."""
        return tuple([len({(b.offset[d], b.size[d]) for b in self.boxes} or {0}) for d in range(len(self.shape))])

    def __getitem__(self, index: Any) -> "NDArray[Any]":
        from torchshard.checkpoint.reading import read_index  # needs numpy, which describing a checkpoint does not

        return read_index(self, index)

    def numpy(self) -> "NDArray[Any]":
        """The full tensor."""
        return self[...]


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
        format: "dcp", "torch" or "safetensors".
        entries: flat name to entry.
        tree: makes the nested state dict that was saved, with entries as leaves.
        files: names and sizes of the files that hold the values.
        metadata: what the format says about itself.
    """

    format: str
    entries: dict[str, Entry]
    tree: Callable[[], object]
    files: dict[str, int]
    metadata: Mapping[str, str]


def check_pieces(shape: tuple[int, ...], pieces: tuple[Piece, ...], where: str) -> None:
    """Raise CheckpointError unless the pieces hold every element of a tensor of `shape` exactly once."""
    boxes = [piece.box for piece in pieces]
    if len(boxes) == 1 and boxes[0] == whole(shape):
        return
    if _is_grid(shape, boxes):
        return
    try:
        check_tiling(shape, boxes)
    except ShardingError as error:
        fix = "Not all ranks' parts are here; save again, or copy the missing files."
        raise CheckpointError(
            f"The pieces of a tensor do not make it up: {error.what}",
            expected=error.expected,
            got=error.got,
            where=where,
            fix=fix if "missing" in error.what else None,
        ) from error


def _is_grid(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether boxes are all combinations of consecutive intervals of each dim; the usual case, told in linear time."""
    cells = 1
    for dim, n in enumerate(shape):
        intervals = sorted({(box.offset[dim], box.size[dim]) for box in boxes})
        end = 0
        for start, length in intervals:
            if start != end or length <= 0:
                return False
            end += length
        if end != n:
            return False
        cells *= len(intervals)
    return cells == len(boxes) == len(set(boxes))


def leaves(tree: object, where: object) -> Iterator[tuple[Steps, object]]:
    """Steps and value of each leaf of nested containers.

    Dicts are gone into; lists and tuples where they hold a tensor or a dict, however deep. An empty dict is a leaf.

    Raises:
        CheckpointError: nested too deep, or the same containers refer to each other so often that there is no end.
    """
    yield from _Walk(where).leaves(tree, ())


class _Walk:
    """Goes through containers that may refer to each other in any way, in time that goes with their number."""

    def __init__(self, where: object) -> None:
        self.where = where
        self.inner: dict[int, bool] = {}  # by id: does it hold a tensor or a dict?
        self.seen: set[int] = set()
        self.again = 10_000  # visits to containers that were visited before

    def leaves(self, value: object, path: Steps) -> Iterator[tuple[Steps, object]]:
        self.check_depth(len(path))
        if isinstance(value, dict) and value:
            self.visit(value)
            for key, item in value.items():
                yield from self.leaves(item, (*path, _step(key)))
        elif isinstance(value, (list, tuple)) and self.holds_more(value, len(path)):
            self.visit(value)
            for i, item in enumerate(value):
                yield from self.leaves(item, (*path, i))
        else:
            yield path, value

    def visit(self, container: object) -> None:
        self.again -= id(container) in self.seen
        self.seen.add(id(container))
        if self.again < 0:
            raise CheckpointError("Containers refer to each other over and over.", where=self.where)

    def holds_more(self, value: object, depth: int) -> bool:
        if isinstance(value, (dict, TensorEntry)):
            return True
        if not isinstance(value, (list, tuple)):
            return False
        self.check_depth(depth)
        if id(value) not in self.inner:
            self.inner[id(value)] = False  # what holds nothing but itself holds nothing more
            self.inner[id(value)] = any(self.holds_more(item, depth + 1) for item in value)
        return self.inner[id(value)]

    def check_depth(self, depth: int) -> None:
        if depth > NESTING:
            raise CheckpointError("Containers are nested too deep.", expected=f"at most {NESTING}", where=self.where)


def _step(key: object) -> str | int:
    if isinstance(key, str) or (isinstance(key, int) and abs(key) < 2**63):
        return key
    return printable(key)


def _itself(value: object) -> object:
    return value


def flatten(tree: object, where: object) -> dict[str, Entry]:
    """Entries by dotted name, as torch.distributed.checkpoint names them.

    Raises:
        CheckpointError: two leaves have the same dotted name, or the tree is not a dict.
    """
    if not isinstance(tree, dict):
        raise CheckpointError("The file holds no state dict.", expected="a dict", got=printable(tree), where=where)
    entries: dict[str, Entry] = {}
    for path, value in leaves(tree, where) if tree else ():
        key = ".".join(map(str, path))
        if key in entries:
            raise CheckpointError("Two entries have the same dotted name.", got=printable(key), where=where)
        entry = value if isinstance(value, TensorEntry) else ObjectEntry(partial(_itself, value))
        entry.key = entry.key or key
        entries[key] = entry
    return entries
