import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.strategies import meshes, shapes, shardings
from torchshard.errors import ShardingError
from torchshard.layout import Box, Mesh, R, Shard, check_tiling, overlaps, tiles
from torchshard.layout.grid import holders


@given(st.data())
def test_boxes_tile_the_tensor_once_per_replica(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes)
    sharding = data.draw(shardings(mesh, len(shape)))
    covered = np.zeros(shape, int)
    for box in sharding.boxes(shape):
        covered[box.slices] += 1
    assert (covered == sharding.replicas).all()


@given(st.data())
def test_one_box_and_all_boxes_agree_and_none_is_larger_than_the_largest(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes)
    sharding = data.draw(shardings(mesh, len(shape)))
    boxes = sharding.boxes(shape)
    assert boxes == [sharding.box(shape, c) for c in mesh.coordinates()]
    assert all(n <= m for box in boxes for n, m in zip(box.size, sharding.largest(shape), strict=True))
    assert sharding.largest(shape) == boxes[0].size


@given(st.data())
def test_order_of_axes_nests_from_the_first(data):
    """The pieces of a dim, listed with the first axis slowest, follow one another."""
    mesh, n = data.draw(meshes()), data.draw(st.integers(0, 30))
    order = data.draw(st.permutations(range(mesh.ndim)))
    sharding = mesh.sharding([Shard(0)] * mesh.ndim, {0: order})
    by_nesting = sorted(mesh.coordinates(), key=lambda c: [c[a] for a in order])
    at = 0
    for coordinate in by_nesting:
        box = sharding.box((n,), coordinate)
        assert box.offset[0] == at
        at += box.size[0]
    assert at == n


boxes_2d = st.lists(
    st.builds(
        lambda o, s: Box(o, s),
        st.tuples(st.integers(0, 8), st.integers(0, 8)),
        st.tuples(st.integers(0, 5), st.integers(0, 5)),
    ),
    max_size=12,
)


@given(boxes_2d, boxes_2d)
def test_overlaps_are_all_pairs_that_meet(targets, sources):
    found = sorted(overlaps(targets, sources))
    wanted = [
        (t, s, box) for t, a in enumerate(targets) for s, b in enumerate(sources) if (box := a.meet(b)) is not None
    ]
    assert found == sorted(wanted)


@given(st.data())
def test_holders_are_the_ranks_whose_boxes_meet(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes)
    sharding = data.draw(shardings(mesh, len(shape)))
    other = data.draw(shardings(mesh, len(shape)))
    box = data.draw(st.sampled_from(other.boxes(shape)))
    fixed = data.draw(st.dictionaries(st.integers(0, mesh.ndim - 1), st.just(0)))
    found = sorted(holders(shape, sharding.splits, mesh.shape, box, fixed))
    wanted = [
        (c, part)
        for c in mesh.coordinates()
        if (part := sharding.box(shape, c).meet(box)) is not None and all(c[a] == k for a, k in fixed.items())
    ]
    assert found == sorted(wanted)


@pytest.mark.parametrize(
    ("boxes", "says"),
    [
        ([Box((0, 0), (2, 3)), Box((2, 0), (3, 3))], "lies outside"),
        ([Box((0, 0), (2, 3)), Box((1, 0), (3, 3))], "hold the same"),
        ([Box((0, 0), (2, 3)), Box((3, 0), (1, 3))], "are missing"),
    ],
)
def test_bad_tilings_are_named(boxes, says):
    with pytest.raises(ShardingError, match=says):
        check_tiling((4, 3), boxes)


def test_a_good_tiling_passes():
    check_tiling((4, 3), [Box((0, 0), (4, 1)), Box((0, 1), (2, 2)), Box((2, 1), (2, 2)), Box((4, 0), (0, 3))])


def test_all_boxes_of_a_large_mesh_take_less_than_a_second():
    sharding = Mesh((10, 100, 100)).sharding((Shard(0), Shard(1), Shard(0)))
    took = min(_seconds(lambda: sharding.boxes((1_000_003, 777))) for _ in range(3))
    assert took < 1


def test_one_ranks_share_of_a_large_mesh_takes_milliseconds():
    mesh = Mesh((1000, 100))
    rows, columns = mesh.sharding((Shard(0), R)), mesh.sharding((R, Shard(1)))
    box = rows.box((100_000, 100_000), (7, 3))
    took = min(
        _seconds(lambda: list(holders((100_000, 100_000), columns.splits, mesh.shape, box, {0: 7}))) for _ in range(5)
    )
    assert took < 0.02


def _seconds(work):
    start = time.process_time()
    work()
    return time.process_time() - start


@st.composite
def cuts(draw, box):
    """A tensor cut in two, and each part again, as often as chance will have it."""
    dim = draw(st.integers(0, 4))
    if dim > 2 or box.size[dim] < 2:
        return [box]
    n = draw(st.integers(1, box.size[dim] - 1))
    size = [n if d == dim else s for d, s in enumerate(box.size)]
    rest = [s - n if d == dim else s for d, s in enumerate(box.size)]
    at = [o + n * (d == dim) for d, o in enumerate(box.offset)]
    return [*draw(cuts(Box(box.offset, tuple(size)))), *draw(cuts(Box(tuple(at), tuple(rest))))]


@given(cuts(Box((0, 0, 0), (5, 4, 3))), st.data())
def test_tiles_is_told_by_counting(boxes, data):
    """What is cut from a tensor makes it up; with boxes left out and others put in, whatever counting says."""
    assert tiles((5, 4, 3), boxes)
    others = [*boxes, Box((1, 1, 1), (2, 2, 2)), Box((4, 3, 2), (2, 1, 1)), Box((0, 0, 0), (0, 4, 3))]
    left, more = data.draw(st.integers(0, 2)), data.draw(st.lists(st.sampled_from(others), max_size=3))
    counts = np.zeros((6, 4, 3), int)
    for box in (some := [*boxes[left:], *more]):
        counts[box.slices] += 1
    assert tiles((5, 4, 3), some) == bool((counts[:5] == 1).all() and not counts[5].any())


def test_irregular_boxes_are_told_in_linear_time():
    n = 5000
    rows = [Box((i, 0), (1, n)) for i in range(n)]
    columns = [Box((n, i), (n, 1)) for i in range(n)]
    start = time.process_time()
    check_tiling((2 * n, n), rows + columns)
    assert time.process_time() - start < 2
