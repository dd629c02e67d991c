"""Reading values: blocks of a tensor into a buffer, and slices into numpy arrays."""

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.entries import Extent, Piece, TensorEntry, flat
from torchshard.checkpoint.moving.casting import cast
from torchshard.checkpoint.moving.checksums import crc32
from torchshard.checkpoint.moving.comparing import Comparison, whole_pieces
from torchshard.checkpoint.moving.plan import Block, Copy, plan, run_within, windows
from torchshard.checkpoint.text import format_size
from torchshard.errors import CheckpointError
from torchshard.layout import Box, contiguous_stride, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 4 * 2**20
_SHORT = 512  # bytes of a run for which a vector of a read is dearer than a copy by numpy
_GAP = 32 * 2**10  # bytes: about as many are copied in the time that a read of its own takes
# Values are moved as unsigned integers of their size, so that no bit is ever interpreted.
_RAW = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Room:
    """Memory that blocks are read into, one after another.

    Args:
        out: a block's elements come to its beginning.
        scratch: may be overwritten, room for one element or more; used where pieces cut rows.
    """

    def __init__(self, out: memoryview, scratch: memoryview) -> None:
        self.out, self.scratch = out, scratch
        # Most blocks of a tensor are alike, and to make the views anew for each is a fifth of the work of reading.
        self.rows = functools.lru_cache(maxsize=16)(functools.partial(_rows, out))


def fill(entry: TensorEntry, block: Block, room: Room, crcs: list[int] | None = None) -> memoryview:
    """Read the elements of a block, the last dim fastest, cast to the entry's type.

    Args:
        entry: the tensor.
        block: planned over the entry's boxes.
        room: with space for the block.
        crcs: takes the crc32 of the stored bytes of each of the block's copies, in their order in the file; 0 where
            these are no one run of it.

    Returns:
        The part of `room.out` that holds them.

    Raises:
        CheckpointError: the files do not hold what the index says.
    """
    out = room.out[: block.box.numel * entry.itemsize]
    if entry.stored_dtype == entry.dtype:
        _fill_stored(entry, block, room, crcs)
        return out
    import numpy as np

    stored = DTYPES[entry.stored_dtype]
    raw = memoryview(bytearray(block.box.numel * stored.itemsize))
    _fill_stored(entry, block, Room(raw, room.scratch), crcs)
    values = cast(np.frombuffer(raw, stored.numpy), entry.stored_dtype, entry.dtype)
    out[:] = values.view("u1").data
    return out


def _fill_stored(entry: TensorEntry, block: Block, room: Room, crcs: list[int] | None) -> None:
    """Read the elements of a block as they are stored."""
    for copy in block.copies:
        piece = entry.pieces[copy.source]
        here = run_within(piece.box, copy.box) if piece.row_major else None
        rows = None
        if here is not None:
            at = tuple(map(operator.sub, copy.box.offset, block.box.offset))
            rows = room.rows(block.box.size, at, copy.box.size, entry.itemsize_stored)
        if here is None or rows is None:
            crc = _fill_strided(entry, piece, block.box, copy, room, summed=crcs is not None and here is not None)
        else:
            place = piece.place()
            place.extent.files.read_scattered(place.extent.file, place.start + here * entry.itemsize_stored, rows)
            crc = 0
            if crcs is not None:
                for row in rows:
                    crc = crc32(row, crc)
        if crcs is not None:
            crcs.append(crc)


def _rows(
    out: memoryview, outer: Sequence[int], offset: Sequence[int], size: Sequence[int], itemsize: int
) -> Sequence[memoryview] | None:
    """The rows of a part of an array that lies in `out`; None where they are so short that numpy is faster.

    Args:
        out: the array's bytes and perhaps more.
        outer: shape of the array.
        offset: where in it the part begins.
        size: shape of the part.
        itemsize: bytes an element.
    """
    cut = [d for d, n in enumerate(size) if n != outer[d]]
    dim = cut[-1] if cut else 0  # the dims behind are whole
    run = math.prod(size[dim:]) * itemsize
    stride = contiguous_stride(outer)
    if math.prod(size[:dim]) > 1 and run < _SHORT:
        return None
    starts = [0]
    for d, n in enumerate(size):
        at = offset[d] * stride[d]
        steps = range(n) if d < dim else (0,)
        starts = [start + at + i * stride[d] for start in starts for i in steps]
    return [out[start * itemsize : start * itemsize + run] for start in starts]


def _fill_strided(entry: TensorEntry, piece: Piece, block: Box, copy: Copy, room: Room, *, summed: bool) -> int:
    """Read a part of a block in large stretches, and put its elements where they belong; the crc32 of all of them."""
    import numpy as np
    from numpy.lib.stride_tricks import as_strided

    itemsize, place = entry.itemsize_stored, piece.place()
    raw = np.dtype(_RAW[itemsize])
    out = np.frombuffer(room.out, raw, block.numel).reshape(block.size)[copy.box.within(block)]
    base = sum([(o - b) * s for o, b, s in zip(copy.box.offset, piece.box.offset, place.stride, strict=True)])
    scratch = np.frombuffer(room.scratch, raw, len(room.scratch) // itemsize)
    steps = [s * itemsize for s in place.stride]
    crc = 0
    for window in windows(copy.box.size, place.stride, len(scratch), _GAP // itemsize):
        start = place.start + (base + window.start) * itemsize
        stretch = room.scratch[: window.span * itemsize]
        place.extent.files.read_into(place.extent.file, start, stretch)
        out[window.box.slices] = as_strided(scratch, window.box.size, steps)
        if summed:
            crc = crc32(stretch, crc)
    return crc


def same_bytes(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether two tensors of one type and shape hold the same bits; read in blocks."""
    return all(x == y for x, y in zip(_all_bytes(a), _all_bytes(b), strict=True))


def _all_bytes(entry: TensorEntry) -> Iterator[memoryview]:
    """All values in blocks, each overwritten by the next, and compared with their checksums in the end."""
    out, scratch = memoryview(bytearray(min(max(1, entry.nbytes), _BLOCK))), _scratch(entry)
    room, box = Room(out, scratch), whole(entry.shape)
    comparison = Comparison(entry, whole_pieces(entry, box))
    for block in plan(box, entry.boxes, _BLOCK // entry.itemsize):
        yield _filled(block, room, comparison)


def _filled(block: Block, room: Room, comparison: Comparison) -> memoryview:
    """As `fill`, and what is read is compared."""
    if not comparison.pieces:
        return fill(comparison.entry, block, room)
    crcs: list[int] = []
    data = fill(comparison.entry, block, room, crcs)
    comparison.take(block.copies, crcs)
    return data


def check_sums(parts: Iterable[tuple[TensorEntry, Box]]) -> None:
    """Read each stretch of file with a stored checksum that holds something of a part: a tensor, and a box of it.

    Raises:
        CheckpointError: one is not what its checksum says.
    """
    compared = set[Extent]()
    for entry, box in parts:
        for extent in [piece.place().extent for piece in entry.pieces if piece.box.meet(box) is not None]:
            if extent.crc32 is not None and extent not in compared:
                compared.add(extent)
                for _ in _all_bytes(flat(extent, key=entry.key)):
                    pass  # what does not match is an error


def arrays(entry: TensorEntry) -> "Iterator[NDArray[Any]]":
    """All values, in flat parts of some MiB, as DType.numpy; each is overwritten by the next.

    Raises:
        CheckpointError: damaged files, which may be told with the last part only.
    """
    import numpy as np

    for data in _all_bytes(entry):
        yield np.frombuffer(data, DTYPES[entry.dtype].numpy)


def read_index(entry: TensorEntry, index: Any) -> "NDArray[Any]":
    """What numpy's basic indexing of the full tensor gives, reading only the rows and columns concerned.

    Raises:
        CheckpointError: damaged files, or more elements than there is memory for.
        IndexError: as numpy raises.
    """
    box, rest = _box_and_rest(entry.shape, index)
    out = read_box(entry, box)
    array: NDArray[Any] = out[rest] if rest else out
    return array


def read_box(entry: TensorEntry, box: Box) -> "NDArray[Any]":
    """The values of a box, as DType.numpy.

    Raises:
        CheckpointError: damaged files, or more elements than there is memory for.
    """
    import numpy as np

    dtype = np.dtype(DTYPES[entry.dtype].numpy)
    try:
        out = np.empty(box.size, dtype)
    except (MemoryError, ValueError) as error:
        size = format_size(box.numel * dtype.itemsize)
        raise CheckpointError(f"There is no memory for {size}.", where=entry.key, fix="Read a slice.") from error
    if box.numel:
        read_box_into(entry, box, memoryview(out.reshape(-1).view("u1")))  # type: ignore[arg-type]  # numpy's stubs
    return out


def read_box_into(entry: TensorEntry, box: Box, out: memoryview, comparison: Comparison | None = None) -> None:
    """The values of a box into bytes, exactly as many as it has, the last dim fastest.

    Args:
        entry: the tensor.
        box: what is wanted.
        out: takes it.
        comparison: takes the checksums, where the box is a run of a larger one that is read; None: all is read here.
    """
    comparison = comparison or Comparison(entry, whole_pieces(entry, box))
    scratch = _scratch(entry)
    for block in plan(box, entry.boxes, _BLOCK // entry.itemsize):
        _filled(block, Room(out[block.at * entry.itemsize :], scratch), comparison)


def _scratch(entry: TensorEntry) -> memoryview:
    return memoryview(bytearray(max(16, min(math.prod(entry.shape) * entry.itemsize_stored, _BLOCK))))


def _box_and_rest(shape: tuple[int, ...], index: Any) -> tuple[Box, tuple[Any, ...]]:
    """The box that holds an index, and the index that is left to do on it."""
    parts = _spelled_out(index if isinstance(index, tuple) else (index,), len(shape))
    offset: list[int] = []
    size: list[int] = []
    rest: list[Any] = []
    for n, part in zip(shape, parts, strict=True):
        if isinstance(part, slice):
            picked = range(n)[part]
            low = min(picked[0], picked[-1]) if picked else 0
            offset.append(low)
            size.append(abs(picked[-1] - picked[0]) + 1 if picked else 0)
            rest.append(slice(None, None, picked.step))
        else:
            offset.append(range(n)[part])
            size.append(1)
            rest.append(0)
    return Box(tuple(offset), tuple(size)), tuple(rest)


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)  # to numpy a mask


def _spelled_out(index: tuple[Any, ...], ndim: int) -> Sequence[Any]:
    """One integer or slice for each dim."""
    at = [i for i, part in enumerate(index) if part is Ellipsis]
    if len(at) > 1 or len(index) - len(at) > ndim:
        raise IndexError(f"too many indices for a tensor of {ndim} dims")
    if not all(isinstance(part, slice) or part is Ellipsis or _is_whole(part) for part in index):
        raise IndexError("only integers, slices and ... are read from a file; index the array for more")
    split = at[0] if at else len(index)
    middle = [slice(None)] * (ndim - (len(index) - len(at)))
    return [*index[:split], *middle, *index[split + len(at) :]]
