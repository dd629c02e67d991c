"""Where the elements of strided blocks lie in memory, as spans of bytes; pure arithmetic."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]


class Block(NamedTuple):
    """A strided block of memory: the address of its first element, and the steps between elements, in bytes."""

    address: int
    strides: tuple[int, ...]


class Spans(NamedTuple):
    """What is copied from one block to another of the same shape: from each of `there` to the same place in `here`.

    Attributes:
        here, there: addresses, as many as there are spans.
        length: bytes of a span.
    """

    here: Addresses
    there: Addresses
    length: int


def spans(size: Sequence[int], itemsize: int, here: Block, there: Block) -> Spans:
    """The spans of two blocks of this shape: the longest that are dense in both."""
    dims = sorted((d for d, n in enumerate(size) if n != 1), key=lambda d: (-there.strides[d], -here.strides[d]))
    length = itemsize
    while dims and here.strides[dims[-1]] == there.strides[dims[-1]] == length:
        length *= size[dims.pop()]
    return Spans(_addresses(size, here, dims), _addresses(size, there, dims), length)


def _addresses(size: Sequence[int], block: Block, dims: Sequence[int]) -> Addresses:
    at = np.array([block.address], np.uint64)
    for d in dims:
        steps = np.arange(size[d], dtype=np.uint64) * np.uint64(block.strides[d])
        at = (at[:, None] + steps).ravel()
    return at


def extent(size: Sequence[int], itemsize: int, block: Block) -> int:
    """Bytes from the first element of a block to the end of its last one."""
    return sum((n - 1) * step for n, step in zip(size, block.strides, strict=True)) + itemsize


def calls(spans: Sequence[Spans], most: int, longest: int) -> Iterator[tuple[Addresses, Addresses]]:
    """The spans in groups, as rows of (address, bytes) for either side, neighbours of a side joined.

    Args:
        spans: of any number of copies.
        most: rows of a group, at most.
        longest: bytes of a group, at most, if it has more than one span.
    """
    if not spans:
        return
    here = np.concatenate([s.here for s in spans])
    there = np.concatenate([s.there for s in spans])
    lengths = np.concatenate([np.full(len(s.here), s.length, np.uint64) for s in spans])
    ends = np.cumsum(lengths)
    begin = 0
    while begin < len(lengths):
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + longest, "right"))
        end = max(begin + 1, min(end, begin + most))
        yield _joined(here[begin:end], lengths[begin:end]), _joined(there[begin:end], lengths[begin:end])
        begin = end


def _joined(starts: Addresses, lengths: Addresses) -> Addresses:
    """Rows of (address, bytes); those that follow one another are one."""
    first = np.ones(len(starts), bool)
    first[1:] = starts[1:] != starts[:-1] + lengths[:-1]
    rows = np.empty((int(first.sum()), 2), np.uint64)
    rows[:, 0] = starts[first]
    rows[:, 1] = np.add.reduceat(lengths, np.flatnonzero(first))
    return rows
