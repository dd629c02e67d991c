"""From one mesh to another, played on arrays of all ranks; and the memory that a way may take."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.play import assemble, play, spread
from tests.layout.strategies import OPS, meshes, shapes, shardings, terms
from torchshard.layout import Mesh, Partial, R, Shard
from torchshard.layout.passages import passage, passages
from torchshard.layout.transitions import transition


@st.composite
def two_meshes(draw):
    """Two meshes over some of ten ranks."""
    made = []
    for _ in range(2):
        small = draw(meshes(max_axes=3, max_size=8))
        made.append(Mesh(small.shape, ranks=draw(st.permutations(range(10)))[: small.size]))
    return made


def play_passage(way, source, target, shape, parts):
    """The parts of the target's ranks, and the most elements that one of them took from another."""
    crossing = way.crossing
    held = play(way.before, parts)
    boxes, taken, most = crossing.source.boxes(shape), [], 0
    for to, rank in zip(target.mesh.coordinates(), target.mesh.ranks, strict=True):
        box, got = crossing.target.box(shape, to), 0
        part = np.zeros(box.size)
        for origin, common in crossing.receives(to):
            at = source.mesh.linear(origin)
            part[common.within(box)] = held[at][common.within(boxes[at])]
            got += common.numel if source.mesh.ranks[at] != rank else 0
        taken.append(part)
        most = max(most, got)
    return play(way.after, taken), most


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 2**32 - 1))
def test_a_passage_ends_in_the_target_and_costs_what_it_says(data, seed):
    (one, other), shape = data.draw(two_meshes()), data.draw(shapes)
    op = data.draw(st.sampled_from(OPS))
    source = data.draw(shardings(one, len(shape), (op,)))
    target = data.draw(shardings(other, len(shape), ("sum",)))
    parts, full = terms(np.random.default_rng(seed), source, shape)
    end = target.without_partial()
    for way in passages(source, target, shape, 8):
        found, most = play_passage(way, source, target, shape, parts)
        assert way.lacked == 8 * most
        for at, rank in zip(one.coordinates(), one.ranks, strict=True):
            sent = sum(box.numel for to, box in way.crossing.sends(at) if other.ranks[other.linear(to)] != rank)
            assert 8 * sent <= way.given
        reduced = play(transition(target, end, shape, 8), found)
        np.testing.assert_allclose(assemble(reduced, end, shape), full, rtol=1e-12)


def test_what_is_partial_is_reduced_first_and_into_pieces():
    one, other = Mesh((4,)), Mesh((4,), ranks=range(4, 8))
    way = passage(one.sharding((Partial(),)), other.sharding((R,)), (8, 8), 4)
    assert [step.kind for step in way.before.steps] == ["reduce_scatter"]
    assert way.nbytes == 3 * 64 + 256
    same = passage(one.sharding((Shard(0),)), Mesh((2, 2)).sharding((Shard(0), Shard(0))), (8, 8), 4)
    assert same.nbytes == 0


def test_what_is_replicated_comes_in_pieces_if_that_is_sooner():
    one, other = Mesh((2,)), Mesh((2, 4))
    ends = one.sharding((Shard(0),)), other.sharding((Shard(0), R))
    large, small = passage(*ends, (512, 512), 4), passage(*ends, (8, 8), 4)
    part = 256 * 512 * 4
    assert [step.kind for step in large.after.steps] == ["all_gather"]
    assert (large.given, large.lacked, large.nbytes) == (part, part // 4, part)
    assert not small.after.steps


@pytest.mark.parametrize("other_axis", [R, Partial()])
@pytest.mark.parametrize("turned", [False, True])
def test_dims_in_units_are_split_by_no_other_axis(other_axis, turned):
    placements = (other_axis, Shard(0, 1, 9))[:: -1 if turned else 1]
    units = Mesh((2, 2)).sharding(placements)
    rows, shape = Mesh((2, 2), ranks=range(4, 8)).sharding((R, Shard(0))), (63, 8)
    parts, full = terms(np.random.default_rng(0), units, shape)
    for way in passages(units, rows, shape, 8):
        np.testing.assert_allclose(assemble(play_passage(way, units, rows, shape, parts)[0], rows, shape), full)
    back = units.without_partial()
    for way in passages(rows, back, shape, 8):
        found, _ = play_passage(way, rows, back, shape, spread(full, rows))
        np.testing.assert_allclose(assemble(found, back, shape), full)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_more_than_twice_the_larger_part_beside_the_first(data):
    mesh = data.draw(meshes(max_size=16))
    shape = tuple(n * mesh.size for n in data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)))
    source, target = (data.draw(shardings(mesh, len(shape))) for _ in range(2))
    if not (source.splits and target.splits):
        return
    first = np.prod(source.largest(shape)) * 4
    larger = max(first, np.prod(target.largest(shape)) * 4)
    for k, step in enumerate(transition(source, target, shape, 4).steps):
        assert step.peak - (0 if k else first) <= 2 * larger + larger // 64
