"""Spans of strided blocks: what they copy, against numpy."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchshard.comm.spans import Block, Spans, calls, extent, spans


def block_of(array):
    return Block(array.ctypes.data, array.strides)


def copied(groups):
    """Play the calls; the sums and numbers of rows."""
    seen = []
    for here, there in groups:
        assert here[:, 1].sum() == there[:, 1].sum()
        data = b"".join(ctypes.string_at(int(at), int(n)) for at, n in there)
        done = 0
        for at, n in here:
            ctypes.memmove(int(at), data[done : done + int(n)], int(n))
            done += int(n)
        seen.append((len(here), len(there)))
    return seen


@st.composite
def pairs(draw):
    """Two views of one shape, of arrays in any order of memory, with gaps."""
    size = draw(st.lists(st.integers(1, 5), max_size=4))
    views = []
    for fill in (False, True):
        order = draw(st.permutations(range(len(size))))
        gaps = [draw(st.integers(0, 2)) for _ in size]
        outer = np.zeros([size[d] + gaps[d] for d in order], np.int16)
        if fill:
            outer[...] = np.arange(outer.size).reshape(outer.shape)
        inner = outer[(..., *(slice(gaps[d] // 2, gaps[d] // 2 + size[d]) for d in order))]
        views.append((outer, inner.transpose([order.index(d) for d in range(len(size))])))
    return views


@given(pairs(), st.integers(1, 7), st.integers(2, 40))
def test_spans_copy_a_block(views, most, longest):
    (_, here), (_, there) = views
    found = spans(here.shape, 2, block_of(here), block_of(there))
    assert found.length * len(found.here) == here.nbytes
    groups = list(calls([found], most, longest))
    for rows, _ in groups:
        assert len(rows) <= most
    copied(groups)
    assert np.array_equal(here, there)


def test_blocks_that_are_dense_alike_are_one_span():
    here, there = (np.zeros((3, 4, 5)).transpose(2, 0, 1) for _ in range(2))
    found = spans(here.shape, 8, block_of(here), block_of(there))
    assert (len(found.here), found.length) == (1, 480)
    assert list(spans((), 8, Block(8, ()), Block(16, ())).here) == [8]


def test_neighbours_are_joined_on_each_side():
    columns, rows = np.zeros((4, 8)), np.arange(16.0).reshape(4, 4)
    found = spans((4, 4), 8, block_of(columns[:, 2:6]), block_of(rows))
    assert copied(calls([found], 100, 1000)) == [(4, 1)]
    assert np.array_equal(columns[:, 2:6], rows)
    assert list(calls([], 100, 1000)) == []


@pytest.mark.parametrize(("most", "longest", "expected"), [(2, 1000, [(2, 1), (2, 1)]), (9, 64, [(2, 1), (2, 1)])])
def test_groups_are_limited(most, longest, expected):
    columns, rows = np.zeros((4, 8)), np.arange(16.0).reshape(4, 4)
    found = spans((4, 4), 8, block_of(columns[:, 2:6]), block_of(rows))
    assert copied(calls([found], most, longest)) == expected


def test_a_span_above_the_limit_goes_alone():
    here, there = np.zeros(100), np.ones(100)
    long = spans((100,), 8, block_of(here), block_of(there))
    short = Spans(long.here[:1], long.there[:1], 8)
    assert copied(calls([short, long, short], 10, 100)) == [(1, 1), (1, 1), (1, 1)]


def test_extent_of_a_block():
    x = np.zeros((4, 6))[1:3, ::2]
    assert extent(x.shape, 8, block_of(x)) == 48 + 32 + 8
