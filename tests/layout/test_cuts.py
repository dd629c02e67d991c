"""Splits in runs and in units: what a rank holds, and every way from and to them."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.layout.play import play
from tests.layout.strategies import meshes, shardings
from torchshard.errors import ShardingError
from torchshard.layout import Box, Mesh, Partial, R, Shard, format_placements, parse_placements
from torchshard.layout.cuts import cuts_of, intervals, is_as, rolled_dims, route, unrolled, unrolled_shape
from torchshard.layout.placements import Cut
from torchshard.layout.strided import strided_intervals


def cut_so(sharding, cuts):
    placements = [Shard(p.dim, *cuts.get(p.dim, Cut())) if isinstance(p, Shard) else p for p in sharding.placements]
    return sharding.mesh.sharding(placements, dict(sharding.splits))


@st.composite
def changes(draw):
    """(source, target, shape): shardings of one mesh with dims in up to 3 runs of units of up to 3, and a shape that
    they divide, into pieces that need not be equal.
    """
    mesh, ndim = draw(meshes(max_size=16)), draw(st.integers(1, 3))
    ends, lengths = [], [1] * ndim
    same = draw(st.booleans())
    drawn = {d: Cut(draw(st.integers(1, 3)), draw(st.integers(1, 3))) for d in range(ndim)}
    for partial in (("sum",), ()):
        plain = draw(shardings(mesh, ndim, partial))
        cuts = drawn if same else {d: Cut(draw(st.integers(1, 3)), draw(st.integers(1, 3))) for d in plain.splits}
        ends.append(cut_so(plain, cuts))
        for d in plain.splits:
            lengths[d] = math.lcm(lengths[d], cuts[d].runs * cuts[d].unit)
    return *ends, tuple([n * draw(st.integers(0, 7 if ndim < 3 else 3)) for n in lengths])


def held(full, sharding):
    """What each rank holds, a Partial axis read as Replicate: the rule of torch.chunk, for one axis after another."""
    return [full[np.ix_(*held_at(full.shape, sharding, place))] for place in sharding.mesh.coordinates()]


def held_at(shape, sharding, place):
    """Of each dim, the places that a coordinate holds: those which every cut of it leaves there."""
    found = [np.arange(n) for n in shape]
    for dim, axes in sharding.splits.items():
        left = {}
        for a in axes:
            p = sharding.placements[a]
            units = left.get(p, np.arange(shape[dim] // (p.runs * p.unit)))
            step = -(-len(units) // sharding.mesh.shape[a])
            left[p] = units[place[a] * step : (place[a] + 1) * step]
        for p, units in left.items():
            at = found[dim] % max(shape[dim] // p.runs, 1) // p.unit
            found[dim] = found[dim][np.isin(at, units)]
    return found


@settings(max_examples=300, deadline=None)
@given(changes())
def test_every_route_ends_in_the_target_with_the_right_values(change):
    source, target, shape = change
    full = np.arange(float(math.prod(shape))).reshape(shape)
    parts = held(full, source)
    for place, part in zip(source.mesh.coordinates(), parts, strict=True):
        for axis in source.partial:
            part *= place[axis] == 0
        assert part.shape == source.part(shape, place)
    assert source.largest(shape) == tuple(np.max([p.shape for p in parts], axis=0))
    taken(source, target, shape, parts)


def taken(source, target, shape, parts):
    """Take the way from `source` to `target`, and compare what ranks hold then; return the way."""
    full = np.arange(float(math.prod(shape))).reshape(shape)
    way = route(source, target, shape, 8)
    for hop in way.hops:
        whole, before = unrolled_shape(shape, hop.cuts), hop.transition.source
        places = source.mesh.coordinates()
        inside = [p.reshape(before.part(whole, place)) for p, place in zip(parts, places, strict=True)]
        parts = play(hop.transition, inside)
        for first, last in rolled_dims(hop.cuts):
            parts = [_flat(p, first, last) for p in parts]
    for part, wanted in zip(parts, held(full, target), strict=True):
        np.testing.assert_array_equal(part, wanted)
    return way


def _flat(part, first, last):
    return part.reshape(*part.shape[:first], math.prod(part.shape[first : last + 1]), *part.shape[last + 1 :])


@settings(max_examples=200, deadline=None)
@given(changes())
def test_parts_in_units_are_boxes(change):
    _, sharding, shape = change
    assume(sharding.boxed)
    full = np.arange(float(math.prod(shape))).reshape(shape)
    boxes = sharding.boxes(shape)
    for place, box, wanted in zip(sharding.mesh.coordinates(), boxes, held(full, sharding), strict=True):
        assert sharding.box(shape, place) == box
        np.testing.assert_array_equal(full[box.slices], wanted)
        found = dict(sharding.holders(shape, box, {}))
        assert not box.numel or found[place] == box
    for at in range(len(shape)):  # who holds a slab of all
        slab = Box(
            tuple([1 if d == at and n > 2 else 0 for d, n in enumerate(shape)]),
            tuple([n - 2 if d == at and n > 2 else n for d, n in enumerate(shape)]),
        )
        found = dict(sharding.holders(shape, slab, {}))
        for place, box in zip(sharding.mesh.coordinates(), boxes, strict=True):
            meeting = box.meet(slab)
            assert found.get(place) == (meeting if meeting is not None and meeting.numel else None)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.integers(0, 3))
def test_runs_are_what_torch_calls_a_strided_split(runs, parts, count, k):
    n, k = runs * count, k % parts
    mesh = Mesh((parts,))
    index = held(np.arange(n), mesh.sharding([Shard(0, runs)]))[k]
    taken = strided_intervals(n, {0: runs}, (parts,), (k,))
    assert index.tolist() == [i for start, length in taken for i in range(start, start + length)]


def test_units_even_out():
    mesh = Mesh((2, 4))
    assert is_as(Shard(0), Shard(0, 1, 9), 36, [2])
    assert is_as(Shard(0, 2), Shard(0, 2, 3), 24, [4])
    assert not is_as(Shard(0), Shard(0, 1, 9), 63, [2])
    assert not is_as(Shard(0, 2), Shard(0), 24, [4])
    # 14 rows are even, their 7 units are not.
    assert not is_as(Shard(0), Shard(0, 1, 2), 14, [2])
    heads = mesh.sharding([R, Shard(0, 1, 64)])
    assert [box.size[0] // 64 for box in heads.boxes((14 * 64,))[:4]] == [4, 4, 4, 2]
    assert heads.largest((14 * 64,)) == (256,)


def test_moves_between_equal_runs_are_those_of_the_plain_tensor():
    mesh = Mesh((2, 4), names=("a", "b"))
    rows, columns = mesh.sharding([R, Shard(0, 3)]), mesh.sharding([R, Shard(1)])
    assert [s.kind for s in route(rows, columns, (24, 8), 4).steps] == ["all_to_all"]
    terms = mesh.sharding([R, Partial("sum")])
    assert [s.kind for s in route(terms, rows, (24, 8), 4).steps] == ["reduce_scatter"]
    assert [s.kind for s in route(mesh.replicated(), rows, (24, 8), 4).steps] == ["slice"]
    # Other runs of the same dim: the axis gives it up in between.
    assert [s.kind for s in route(rows, mesh.sharding([R, Shard(0)]), (24, 8), 4).steps] == ["all_gather", "slice"]
    assert route(rows, rows, (24, 8), 4).steps == ()
    # Where parts are boxes, what a rank lacks is copied; a little is sooner gathered.
    units, plain = mesh.sharding([R, Shard(0, 1, 9)]), mesh.sharding([R, Shard(0)])
    assert [s.kind for s in route(units, plain, (63, 4096), 4).steps] == ["exchange"]
    assert [s.kind for s in route(units, plain, (63, 1), 4).steps] == ["all_gather", "slice"]
    assert [s.kind for s in route(units, plain, (63, 4096), 4, regular=True).steps] == ["all_gather", "slice"]
    assert unrolled(rows, cuts_of(rows)) is mesh.sharding([R, Shard(1)])


def test_what_cannot_be():
    mesh = Mesh((2, 2), names=("a", "b"), coordinate=(0, 1))
    with pytest.raises(ShardingError, match="same number of runs"):
        mesh.sharding([Shard(0, 3), Shard(0, 2)])
    with pytest.raises(ShardingError, match="and runs within the units of other axes"):
        mesh.sharding([Shard(0), Shard(0, 2)]).layout((8,), (1,), np.dtype("float32"))
    rows = mesh.sharding([Shard(0, 2), R])
    with pytest.raises(ShardingError, match="runs of equal length, and whole units"):
        rows.layout((7,), (1,), np.dtype("float32"))
    layout = rows.layout((8,), (1,), np.dtype("float32"))
    assert layout.local_shape == (4,)
    for ask in (lambda: layout.box, layout.boxes):
        with pytest.raises(ShardingError, match="in runs is no box"):
            ask()
    with pytest.raises(ShardingError, match="at least one run"):
        Shard(0, 0)


def test_as_text():
    text = "S(0/4),R,S(1),S(2*9),S(3/2*9)"
    placements = parse_placements(text)
    assert placements == (Shard(0, 4), R, Shard(1), Shard(2, 1, 9), Shard(3, 2, 9))
    assert format_placements(placements) == text


@st.composite
def flattened(draw):
    """((source, target), shape) of a tensor whose dim 0 is made of several, of which the source splits two."""
    mesh = draw(meshes(max_axes=3, max_size=12))
    assume(mesh.ndim > 1)
    runs, slow, between, fast, unit = (draw(st.integers(1, n)) for n in (2, 5, 2, 5, 2))
    n = runs * slow * between * fast * unit
    outer, inner = Shard(0, runs, between * fast * unit), Shard(0, runs * slow * between, unit)
    source = [draw(st.sampled_from([outer, inner, R, Shard(1)])) for _ in range(mesh.ndim)]
    assume({outer, inner} <= {*source})
    kinds = draw(st.sampled_from([[outer, inner, R], [outer, R, Shard(1)], [inner, Shard(1)], [Shard(0), Shard(1)]]))
    target = [draw(st.sampled_from(kinds)) for _ in range(mesh.ndim)]
    try:
        made = [
            mesh.sharding(placements).layout((n, 6), (6, 1), np.dtype("float64")) for placements in (source, target)
        ]
    except ShardingError:
        assume(False)
    return [layout.sharding for layout in made], (n, 6)


@settings(max_examples=400, deadline=None)
@given(flattened())
def test_every_route_of_dims_that_are_split_at_several_levels(change):
    (source, target), shape = change
    full = np.arange(float(math.prod(shape))).reshape(shape)
    parts = held(full, source)
    for place, part in zip(source.mesh.coordinates(), parts, strict=True):
        assert part.shape == source.part(shape, place)
        rows = [at + k for at, length in intervals(source, shape, place)[0] for k in range(length)]
        np.testing.assert_array_equal(rows, held_at(shape, source, place)[0])
    assert source.largest(shape) == tuple(np.max([p.shape for p in parts], axis=0))
    taken(source, target, shape, parts)


def test_levels_of_a_batch_and_of_time():
    """8 samples of 16 tokens, flattened: samples split by one axis, tokens by the other."""
    mesh = Mesh((2, 2), ("dp", "cp"))
    tokens, shape = mesh.sharding([Shard(0, 1, 16), Shard(0, 8)]), (128, 4)
    assert intervals(tokens, shape, (1, 1))[0] == [(72, 8), (88, 8), (104, 8), (120, 8)]
    assert not tokens.boxed
    assert mesh.sharding([Shard(0, 8), Shard(0, 1, 16)]).splits == {0: (1, 0)}
    for target in ([R, R], [Shard(0), R], [R, Shard(0, 8)]):
        way = route(tokens, mesh.sharding(target), shape, 4)
        assert {step.kind for step in way.steps} == {"all_gather"}
    assert [s.kind for s in route(tokens, mesh.sharding([Shard(0), Shard(1)]), shape, 4).steps] == ["all_to_all"]


def test_levels_that_do_not_nest_are_told():
    mesh = Mesh((2, 2))
    for placements, said in (
        ([Shard(0), Shard(0, 1, 2)], "neither runs nor units"),
        ([Shard(0, 2), Shard(0, 3)], "in 2 runs"),
    ):
        with pytest.raises(ShardingError, match=f"expected: {said} for all"):
            mesh.sharding(placements)
