"""Splits in runs: what a rank holds, and every way from and to them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.play import play
from tests.layout.strategies import meshes, shardings
from torchshard.errors import ShardingError
from torchshard.layout import Mesh, Partial, R, Shard, format_placements, parse_placements
from torchshard.layout.runs import route, unrolled, unrolled_shape
from torchshard.layout.strided import strided_intervals


def in_runs(sharding, runs):
    placements = [Shard(p.dim, runs.get(p.dim, 1)) if isinstance(p, Shard) else p for p in sharding.placements]
    return sharding.mesh.sharding(placements, dict(sharding.splits))


@st.composite
def changes(draw):
    """(source, target, shape): shardings of one mesh with dims in up to 3 runs, and a shape that they divide."""
    mesh, ndim = draw(meshes(max_size=16)), draw(st.integers(1, 3))
    ends, lengths = [], [1] * ndim
    for partial in (("sum",), ()):
        plain = draw(shardings(mesh, ndim, partial))
        runs = {d: draw(st.integers(1, 3)) for d in plain.splits}
        ends.append(in_runs(plain, runs))
        for d, axes in plain.splits.items():
            lengths[d] = math.lcm(lengths[d], runs[d] * math.prod([mesh.shape[a] for a in axes]))
    return *ends, tuple([n * draw(st.integers(0, 2)) for n in lengths])


def held(full, sharding):
    """What each rank holds, a Partial axis read as Replicate, from torch's definition of a strided split by one axis
    after another.
    """
    parts = []
    for place in sharding.mesh.coordinates():
        part = full.copy()
        for dim, axes in sharding.splits.items():
            runs = sharding.runs.get(dim, 1)
            for a in axes:
                taken = strided_intervals(part.shape[dim], {a: runs}, sharding.mesh.shape, place)
                index = [k for start, n in taken for k in range(start, start + n)]
                part = part.take(np.array(index, int), dim)
        parts.append(part)
    return parts


@settings(max_examples=200, deadline=None)
@given(changes())
def test_every_route_ends_in_the_target_with_the_right_values(change):
    source, target, shape = change
    full = np.arange(float(math.prod(shape))).reshape(shape)
    parts = held(full, source)
    for place, part in zip(source.mesh.coordinates(), parts, strict=True):
        for axis in source.partial:
            part *= place[axis] == 0
        assert part.shape == source.part(shape, place)
    for hop in route(source, target, shape, 8).hops:
        inside = play(hop.transition, [p.reshape(unrolled_shape(p.shape, hop.runs)) for p in parts])
        parts = [_rolled(p, hop.runs) for p in inside]
    for part, wanted in zip(parts, held(full, target), strict=True):
        np.testing.assert_array_equal(part, wanted)


def _rolled(part, runs):
    at = iter(part.shape)
    return part.reshape([next(at) * (next(at) if d in runs else 1) for d in range(part.ndim - len(runs))])


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
    assert unrolled(rows, {0: 3}) is mesh.sharding([R, Shard(1)])


def test_what_cannot_be():
    mesh = Mesh((2, 2), names=("a", "b"), coordinate=(0, 1))
    with pytest.raises(ShardingError, match="same number of runs"):
        mesh.sharding([Shard(0), Shard(0, 2)])
    rows = mesh.sharding([Shard(0, 2), R])
    with pytest.raises(ShardingError, match="equal pieces"):
        rows.layout((6,), (1,), np.dtype("float32"))
    layout = rows.layout((8,), (1,), np.dtype("float32"))
    assert layout.local_shape == (4,)
    for ask in (lambda: layout.box, layout.boxes):
        with pytest.raises(ShardingError, match="in runs is no box"):
            ask()
    with pytest.raises(ShardingError, match="at least one run"):
        Shard(0, 0)


def test_as_text():
    placements = parse_placements("S(0/4),R,S(1)")
    assert placements == (Shard(0, 4), R, Shard(1))
    assert format_placements(placements) == "S(0/4),R,S(1)"
