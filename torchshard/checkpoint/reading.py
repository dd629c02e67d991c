"""Reading values: blocks of a tensor into a buffer, and slices into numpy arrays."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.entries import Piece, TensorEntry
from torchshard.checkpoint.plan import Block, Copy, plan, run_within, windows
from torchshard.checkpoint.text import format_size
from torchshard.errors import CheckpointError
from torchshard.layout import Box

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 4 * 2**20
_GAP = 32 * 2**10  # bytes: about as many are copied in the time that a read of its own takes
# Values are moved as unsigned integers of their size, so that no bit is ever interpreted.
_RAW = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def fill(entry: TensorEntry, block: Block, out: memoryview, scratch: memoryview) -> None:
    """Read the elements of a block into `out`, the last dim fastest.

    Args:
        entry: the tensor.
        block: planned over the entry's boxes.
        out: bytes, exactly those of the block.
        scratch: bytes that may be overwritten, room for one element or more; used where pieces cut rows.

    Raises:
        CheckpointError: the files do not hold what the index says.
    """
    for copy in block.copies:
        _fill_from(entry, entry.pieces[copy.source], block.box, copy, out, scratch)


def _fill_from(entry: TensorEntry, piece: Piece, block: Box, copy: Copy, out: memoryview, scratch: memoryview) -> None:
    itemsize, place = entry.itemsize, piece.place()
    there = run_within(block, copy.box)
    if there is not None and piece.row_major and (here := run_within(piece.box, copy.box)) is not None:
        nbytes = copy.box.numel * itemsize
        buffer = out[there * itemsize : there * itemsize + nbytes]
        entry.files.read_into(place.extent.file, place.start + here * itemsize, buffer)
        return
    import numpy as np
    from numpy.lib.stride_tricks import as_strided

    raw = np.dtype(_RAW[itemsize])
    target = np.frombuffer(out, raw).reshape(block.size)[copy.box.within(block)]
    base = sum([(o - b) * s for o, b, s in zip(copy.box.offset, piece.box.offset, place.stride, strict=True)])
    room = np.frombuffer(scratch, raw, len(scratch) // itemsize)
    steps = [s * itemsize for s in place.stride]
    for window in windows(copy.box.size, place.stride, len(room), _GAP // itemsize):
        start = place.start + (base + window.start) * itemsize
        entry.files.read_into(place.extent.file, start, scratch[: window.span * itemsize])
        target[window.box.slices] = as_strided(room, window.box.size, steps)


def read_index(entry: TensorEntry, index: Any) -> "NDArray[Any]":
    """What numpy's basic indexing of the full tensor gives, reading only the rows and columns concerned.

    Raises:
        CheckpointError: damaged files, or more elements than there is memory for.
        IndexError: as numpy raises.
    """
    import numpy as np

    box, rest = _box_and_rest(entry.shape, index)
    dtype = np.dtype(DTYPES[entry.dtype].numpy)
    try:
        out = np.empty(box.size, dtype)
    except (MemoryError, ValueError) as error:
        size = format_size(box.numel * dtype.itemsize)
        raise CheckpointError(f"There is no memory for {size}.", where=entry.key, fix="Read a slice.") from error
    if box.numel:
        buffer = memoryview(out.reshape(-1).view("u1"))  # type: ignore[arg-type]  # numpy's stubs lack Buffer
        scratch = memoryview(bytearray(_scratch_size(entry)))
        for block in plan(box, entry.boxes, _BLOCK // dtype.itemsize):
            start = block.at * dtype.itemsize
            fill(entry, block, buffer[start : start + block.box.numel * dtype.itemsize], scratch)
    array: NDArray[Any] = out[rest] if rest else out
    return array


def _scratch_size(entry: TensorEntry) -> int:
    return max(entry.itemsize, min(entry.nbytes, _BLOCK))


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


def _spelled_out(index: tuple[Any, ...], ndim: int) -> Sequence[Any]:
    """One integer or slice for each dim."""
    at = [i for i, part in enumerate(index) if part is Ellipsis]
    if len(at) > 1 or len(index) - len(at) > ndim:
        raise IndexError(f"too many indices for a tensor of {ndim} dims")
    if not all(isinstance(part, slice) or part is Ellipsis or hasattr(part, "__index__") for part in index):
        raise IndexError("only integers, slices and ... are read from a file; index the array for more")
    split = at[0] if at else len(index)
    middle = [slice(None)] * (ndim - (len(index) - len(at)))
    return [*index[:split], *middle, *index[split + len(at) :]]
