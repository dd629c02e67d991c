"""Reading values: blocks of a tensor into a buffer, and slices into numpy arrays."""

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.entries import Piece, TensorEntry
from torchshard.checkpoint.moving.casting import cast
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


def fill(entry: TensorEntry, block: Block, out: memoryview, scratch: memoryview) -> None:
    """Read the elements of a block into `out`, the last dim fastest, cast to the entry's type.

    Args:
        entry: the tensor.
        block: planned over the entry's boxes.
        out: bytes, exactly those of the block.
        scratch: bytes that may be overwritten, room for one element or more; used where pieces cut rows.

    Raises:
        CheckpointError: the files do not hold what the index says.
    """
    if entry.stored_dtype == entry.dtype:
        for copy in block.copies:
            _fill_from(entry, entry.pieces[copy.source], block.box, copy, out, scratch)
        return
    import numpy as np

    stored = DTYPES[entry.stored_dtype]
    raw = memoryview(bytearray(block.box.numel * stored.itemsize))
    for copy in block.copies:
        _fill_from(entry, entry.pieces[copy.source], block.box, copy, raw, scratch)
    values = cast(np.frombuffer(raw, stored.numpy), entry.stored_dtype, entry.dtype)
    out[:] = values.view("u1").data


def _fill_from(entry: TensorEntry, piece: Piece, block: Box, copy: Copy, out: memoryview, scratch: memoryview) -> None:
    itemsize, place = entry.itemsize_stored, piece.place()
    files, file = place.extent.files, place.extent.file
    here = run_within(piece.box, copy.box) if piece.row_major else None
    if here is not None:
        parts = _parts(out, block, copy.box, itemsize)
        if parts is not None:
            files.read_scattered(file, place.start + here * itemsize, parts)
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
        files.read_into(file, start, scratch[: window.span * itemsize])
        target[window.box.slices] = as_strided(room, window.box.size, steps)


def _parts(out: memoryview, block: Box, box: Box, itemsize: int) -> list[memoryview] | None:
    """The runs of `out` that hold the rows of `box`, in order; None where they are so short that numpy is faster."""
    there = run_within(block, box)
    if there is not None:
        return [out[there * itemsize : (there + box.numel) * itemsize]]
    runs = _runs(block.size, tuple(map(operator.sub, box.offset, block.offset)), box.size, itemsize)
    return None if runs is None else [out[run] for run in runs]


@functools.lru_cache(maxsize=8)  # most blocks of a tensor are alike
def _runs(outer: Sequence[int], offset: Sequence[int], size: Sequence[int], itemsize: int) -> Sequence[slice] | None:
    """Where the rows of a part of an array lie in its bytes; None where they are shorter than _SHORT."""
    dim = next(d for d in reversed(range(len(size))) if size[d] != outer[d])  # the dims behind are whole
    run = math.prod(size[dim:]) * itemsize
    if run < _SHORT:
        return None
    stride = contiguous_stride(outer)
    starts = [0]
    for d, n in enumerate(size):
        at = offset[d] * stride[d]
        steps = range(n) if d < dim else (0,)
        starts = [start + at + i * stride[d] for start in starts for i in steps]
    return [slice(start * itemsize, start * itemsize + run) for start in starts]


def same_bytes(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether two tensors of one type and shape hold the same bits; read in blocks."""
    scratch = memoryview(bytearray(_scratch_size(a)))
    ours, theirs = [memoryview(bytearray(min(max(1, a.nbytes), _BLOCK))) for _ in range(2)]
    for x, y in zip(_all_blocks(a), _all_blocks(b), strict=True):
        nbytes = x.box.numel * a.itemsize
        fill(a, x, ours[:nbytes], scratch)
        fill(b, y, theirs[:nbytes], scratch)
        if ours[:nbytes] != theirs[:nbytes]:
            return False
    return True


def _all_blocks(entry: TensorEntry) -> Iterator[Block]:
    return plan(whole(entry.shape), entry.boxes, _BLOCK // entry.itemsize)


def arrays(entry: TensorEntry) -> "Iterator[NDArray[Any]]":
    """All values, in flat parts of some MiB, as DType.numpy; each is overwritten by the next."""
    import numpy as np

    scratch = memoryview(bytearray(_scratch_size(entry)))
    room = memoryview(bytearray(min(max(1, entry.nbytes), _BLOCK)))
    for block in _all_blocks(entry):
        out = room[: block.box.numel * entry.itemsize]
        fill(entry, block, out, scratch)
        yield np.frombuffer(out, DTYPES[entry.dtype].numpy)


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


def read_box_into(entry: TensorEntry, box: Box, out: memoryview) -> None:
    """The values of a box into bytes, exactly as many as it has, the last dim fastest."""
    scratch = memoryview(bytearray(_scratch_size(entry)))
    for block in plan(box, entry.boxes, _BLOCK // entry.itemsize):
        start = block.at * entry.itemsize
        fill(entry, block, out[start : start + block.box.numel * entry.itemsize], scratch)


def _scratch_size(entry: TensorEntry) -> int:
    return max(16, min(math.prod(entry.shape) * entry.itemsize_stored, _BLOCK))


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
