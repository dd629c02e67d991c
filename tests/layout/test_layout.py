import copy
import gc
import pickle
import timeit
import weakref

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.strategies import F32, meshes, shardings
from torchshard.errors import ShardingError
from torchshard.layout import (
    Layout,
    Mesh,
    Partial,
    R,
    Replicate,
    Shard,
    contiguous_stride,
    format_placements,
    parse_placements,
)


def test_placements_are_one_object_each():
    assert Shard(1) is Shard(1)
    assert Replicate() is R
    assert Partial() is Partial("sum")
    for p in (Shard(3), R, Partial("max"), Partial("norm(2.0)")):
        assert pickle.loads(pickle.dumps(p)) is p
        assert copy.deepcopy(p) is p


@given(st.data())
def test_placements_and_their_text_are_one_to_one(data):
    mesh = data.draw(meshes())
    placements = data.draw(shardings(mesh, 3, partial=("sum", "avg", "max", "norm(2.0)"))).placements
    assert parse_placements(format_placements(placements)) == placements


def test_layouts_are_interned_and_a_needless_order_is_dropped():
    mesh = Mesh((2, 3))
    sharding = mesh.sharding((Shard(0), Shard(0)))
    assert mesh.sharding([Shard(0), Shard(0)], {0: [0, 1]}) is sharding
    assert mesh.sharding([Shard(0), Shard(0)], {0: [1, 0]}) is not sharding
    assert sharding.layout((4, 5), (5, 1), F32) is sharding.layout([4, 5], [5, 1], F32)
    assert sharding.layout((4, 5), (5, 1), F32) is not sharding.layout((4, 5), (1, 4), F32)


def test_layouts_of_lengths_without_end_are_kept_while_they_are_used(monkeypatch):
    monkeypatch.setattr("torchshard.layout.layout.MAX_LAYOUTS", 4)
    sharding = Mesh((2,)).sharding((Shard(0),))
    used, *unused = [sharding.layout((n,), (1,), F32) for n in range(4)]
    refs = [weakref.ref(layout) for layout in unused]
    del unused
    for n in range(4, 20):
        sharding.layout((n,), (1,), F32)
        assert sharding.layout([0], [1], F32) is used
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
    assert len(sharding._layouts) <= 4


def test_nothing_but_its_users_keeps_a_mesh():
    mesh = Mesh((2, 3))
    layout = mesh.sharding((Shard(0), R)).layout((4,), (1,), F32)
    gone = weakref.ref(mesh), weakref.ref(layout)
    del mesh, layout
    gc.collect()
    assert [r() for r in gone] == [None, None]


def test_a_layout_is_found_in_less_than_a_microsecond():
    sharding = Mesh((2, 4)).sharding((Shard(0), R))
    shape, stride = (1024, 512), (512, 1)
    sharding.layout(shape, stride, F32)
    n = 2_000
    took = min(timeit.repeat(lambda: sharding.layout(shape, stride, F32), number=n, repeat=50)) / n
    assert took < 1e-6


@given(st.data())
def test_replacing_an_axis_appends_it_last(data):
    mesh = data.draw(meshes())
    sharding = data.draw(shardings(mesh, 2))
    axis, dim = data.draw(st.integers(0, mesh.ndim - 1)), data.draw(st.integers(0, 1))
    after = sharding.replace(axis, Shard(dim))
    assert after.splits[dim][-1] == axis
    assert sharding.replace(axis, R).replace(axis, Shard(dim)) is after


def test_local_box_follows_the_coordinate():
    mesh = Mesh((2, 2), ("dp", "tp"), coordinate=(1, 0))
    layout = mesh.sharding((Shard(0), Shard(1))).layout((5, 3), (3, 1), F32)
    assert (layout.local_shape, layout.box.offset) == ((2, 2), (3, 0))
    outside = Mesh((2, 2)).sharding((Shard(0), Shard(1))).layout((5, 3), (3, 1), F32)
    assert (outside.local_shape, outside.box) == ((0,), None)


def test_contiguous_stride():
    assert contiguous_stride((2, 0, 3)) == (3, 3, 1)
    assert contiguous_stride(()) == ()


class Unhashable(int):
    __hash__ = None


def test_symbolic_sizes_are_not_interned():
    sharding = Mesh((2,), coordinate=(1,)).sharding((Shard(0),))
    n = Unhashable(5)
    one, other = sharding.layout((n,), (1,), F32), sharding.layout((n,), (1,), F32)
    assert isinstance(one, Layout)
    assert one is not other
    assert one.local_shape == (2,)


class TestMessages(TestCase):
    maxDiff = None

    def says(self, work, text):
        with pytest.raises(ShardingError) as caught:
            work()
        self.assertExpectedInline(str(caught.value), text, skip=1)

    def test_wrong_number_of_placements(self):
        self.says(
            lambda: Mesh((2, 4), ("dp", "tp")).sharding((R,)),
            """\
A sharding takes one placement an axis.
  expected: 2 placements for the mesh (dp=2, tp=4)
  got:      (R,)
  fix:      placements=[R, R], with Shard(dim) or Partial() where it applies""",
        )

    def test_dim_out_of_range(self):
        self.says(
            lambda: Mesh((2,), ("tp",)).sharding((Shard(2),)).layout((4, 4), (4, 1), F32),
            """\
Shard(2) on a tensor of 2 dims.
  expected: a dim below 2
  got:      (tp=2:S(2))
  where:    axis tp of the mesh, shape (4, 4)""",
        )

    def test_partials_that_do_not_commute(self):
        self.says(
            lambda: Mesh((2, 2)).sharding((Partial("sum"), Partial("max"))),
            """\
One tensor cannot be Partial in two ways that do not commute.
  expected: the same reduction on each axis (sum and avg may be mixed)
  got:      Partial('sum') and Partial('max')
  fix:      reduce one of them first: redistribute that axis to Replicate()""",
        )

    def test_unknown_reduction(self):
        self.says(
            lambda: Partial("median"),
            """\
Partial takes the name of a reduction.
  expected: one of sum, avg, max, min, product, band, bor, bxor or norm(p)
  got:      'median'
  fix:      Partial('sum')""",
        )

    def test_text_that_cannot_be_read(self):
        self.says(
            lambda: parse_placements("S(0),X"),
            """\
The placements 'S(0),X' cannot be read at column 6.
  expected: R, S(dim) or P(op), one an axis of the mesh, with commas between
  got:      'X'
  fix:      S(0),R""",
        )

    def test_order_of_other_axes(self):
        self.says(
            lambda: Mesh((2, 2)).sharding((Shard(0), R), {0: (0, 1)}),
            """\
An order names each axis that splits the dim once.
  expected: dim 0 split by the axes (0,)
  got:      the order (0, 1)
  where:    placements (S(0), R) on the mesh (0=2, 1=2)""",
        )

    def test_empty_axis(self):
        self.says(
            lambda: Mesh((2, 0)),
            """\
A mesh needs at least one rank on each axis, a name for each axis and a rank for each place.
  got:      shape (2, 0), names ('0', '1'), 0 ranks""",
        )
