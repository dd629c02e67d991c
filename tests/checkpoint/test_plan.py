"""Laws of the arithmetic that decides what is read from where."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchshard.checkpoint.moving.plan import blocks, plan, run_within, windows
from torchshard.layout import Box, whole

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def box_and_outer(draw):
    size = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    base = [draw(st.integers(0, 3)) for _ in size]
    start = [draw(st.integers(0, n - 1)) for n in size]
    length = [draw(st.integers(1, n - s)) for n, s in zip(size, start, strict=True)]
    inner = Box(tuple(b + s for b, s in zip(base, start, strict=True)), tuple(length))
    return Box(tuple(base), tuple(size)), inner


@st.composite
def grids(draw):
    """A box cut along each dim, as the list of its cells."""
    size = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    intervals = []
    for n in size:
        cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=2))) if n > 1 else []
        intervals.append(list(zip([0, *cuts], [*cuts, n], strict=True)))
    cells = [()]
    for dim in intervals:
        cells = [(*cell, span) for cell in cells for span in dim]
    return tuple(size), [Box(tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in cells]


@given(shapes, st.integers(1, 50))
def test_blocks_follow_one_another_and_are_small(shape, limit):
    numbers = np.arange(math.prod(shape)).reshape(shape)
    parts = [numbers[box.slices].reshape(-1) for box in blocks(whole(shape), limit)]
    assert all(0 < len(part) <= limit for part in parts)
    flat = np.concatenate(parts) if parts else np.empty(0, int)
    assert np.array_equal(flat, numbers.reshape(-1))


@given(box_and_outer())
def test_a_run_is_found_exactly_where_there_is_one(boxes):
    outer, inner = boxes
    numbers = np.arange(outer.numel).reshape(outer.size)[inner.within(outer)].reshape(-1)
    start = run_within(outer, inner)
    consecutive = np.array_equal(numbers, np.arange(numbers[0], numbers[0] + len(numbers)))
    assert (start is not None) == consecutive
    if consecutive:
        assert start == numbers[0]


@given(grids(), st.integers(1, 40), st.data())
def test_copies_make_up_each_block(grid, limit, data):
    shape, sources = grid
    sources = data.draw(st.permutations(sources))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    at = 0
    for block in plan(whole(shape), sources, limit):
        assert block.at == at
        out = np.full(block.box.size, -1)
        for copy in block.copies:
            assert copy.box.meet(sources[copy.source]) == copy.box
            assert (out[copy.box.within(block.box)] == -1).all()
            out[copy.box.within(block.box)] = numbers[copy.box.slices]
        assert np.array_equal(out, numbers[block.box.slices])
        at += block.box.numel
    assert at == math.prod(shape)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20)), max_size=4),
    st.integers(1, 60),
    st.integers(0, 30),
)
def test_windows_cover_a_strided_box_once(dims, limit, gap):
    size, stride = [n for n, _ in dims], [s for _, s in dims]
    seen = np.zeros(size, int)
    where = np.zeros(size, int)
    for d, (n, s) in enumerate(dims):
        where += (np.arange(n) * s).reshape([-1 if i == d else 1 for i in range(len(dims))])
    for window in windows(size, stride, limit, gap):
        assert window.span <= limit
        part = where[window.box.slices]
        assert part.min() == window.start
        assert part.max() == window.start + window.span - 1
        seen[window.box.slices] += 1
    assert (seen == 1).all()


def test_neighbours_are_read_together_and_distant_ones_alone():
    near = list(windows((4, 3), (1, 10), 1000, gap=20))
    assert [w.span for w in near] == [24]
    far = list(windows((4, 3), (1, 1000), 1000, gap=20))
    assert [w.span for w in far] == [4, 4, 4]


def test_a_plan_of_a_huge_tensor_is_made_as_it_is_used():
    steps = plan(whole((10**9, 10**6)), [whole((10**9, 10**6))], 10**6)
    assert [next(steps).at for _ in range(300)] == [i * 10**6 for i in range(300)]
