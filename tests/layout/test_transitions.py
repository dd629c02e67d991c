import math

import numpy as np
import pytest
from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.play import assemble, play, spread
from tests.layout.strategies import OPS, meshes, shapes, shardings, terms
from torchshard.errors import ShardingError
from torchshard.layout import Mesh, Partial, R, Shard
from torchshard.layout.copies import Copies, Crossing, most_given
from torchshard.layout.cost import Link, gathered_up_to
from torchshard.layout.reductions import masking
from torchshard.layout.transitions import exchange, transition

ONLY_BYTES = Link(launch=0.0, latency=0.0, bandwidth=1.0)


@st.composite
def changes(draw, ops=()):
    """(source, target, shape): two shardings of one mesh; the source may be Partial in `ops`."""
    mesh, shape = draw(meshes(max_size=16)), draw(shapes)
    partial = (draw(st.sampled_from(ops)),) if ops else ()
    return draw(shardings(mesh, len(shape), partial)), draw(shardings(mesh, len(shape))), shape


@settings(max_examples=300, deadline=None)
@given(changes(OPS), st.integers(0, 2**32 - 1))
def test_every_transition_ends_in_the_target_with_the_right_values(change, seed):
    source, target, shape = change
    parts, full = terms(np.random.default_rng(seed), source, shape)
    played = play(transition(source, target, shape, 8), parts)
    np.testing.assert_allclose(assemble(played, target, shape), full, rtol=1e-12, atol=1e-14)


@settings(max_examples=100, deadline=None)
@given(changes(OPS), st.integers(0, 2**32 - 1))
def test_regular_transitions_have_no_exchange(change, seed):
    source, target, shape = change
    parts, full = terms(np.random.default_rng(seed), source, shape)
    found = transition(source, target, shape, 8, regular=True)
    assert all(step.kind != "exchange" for step in found.steps)
    np.testing.assert_allclose(assemble(play(found, parts), target, shape), full, rtol=1e-12, atol=1e-14)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(["sum", "avg", "max", "min"]), st.integers(0, 2**32 - 1))
def test_transitions_to_partial_keep_the_value(data, op, seed):
    mesh, shape = data.draw(meshes(max_size=16)), data.draw(shapes)
    source = data.draw(shardings(mesh, len(shape), (op,)))
    target = data.draw(shardings(mesh, len(shape), (op,)))
    parts, full = terms(np.random.default_rng(seed), source, shape)
    played = play(transition(source, target, shape, 8), parts)
    for part, box in zip(played, target.boxes(shape), strict=True):
        assert part.shape == box.size
    back = target.without_partial()
    reduced = play(transition(target, back, shape, 8), played)
    np.testing.assert_allclose(assemble(reduced, back, shape), full, rtol=1e-12, atol=1e-14)


@settings(max_examples=200, deadline=None)
@given(changes(OPS))
def test_costs(change):
    source, target, shape = change
    links = (ONLY_BYTES,) * source.mesh.ndim
    found = transition(source, target, shape, 4, links=links)
    assert all(step.nbytes >= 0 and step.rounds >= 0 and step.peak >= 0 for step in found.steps)
    assert transition(source, source, shape, 4).steps == ()
    # Never dearer than to gather everything, inner axes first, and to cut.
    gathered = transition(source, source.mesh.replicated(), shape, 4, links=links)
    assert found.nbytes <= gathered.nbytes
    if not source.partial:
        most = max(_lacked(source, target, shape, c) for c in source.mesh.coordinates())
        assert found.nbytes >= 4 * most


def _lacked(source, target, shape, coordinate):
    """Elements that the rank at `coordinate` will hold and does not hold yet: no path can move less."""
    wanted = target.box(shape, coordinate)
    held = wanted.meet(source.box(shape, coordinate))
    return wanted.numel - (held.numel if held else 0)


@settings(max_examples=100, deadline=None)
@given(changes(OPS))
def test_steps_follow_one_another(change):
    source, target, shape = change
    at = source
    for step in transition(source, target, shape, 4).steps:
        assert step.before is at
        assert step.after is not at
        at = step.after
    assert at is target


@given(changes())
def test_what_is_sent_is_what_is_received(change):
    source, target, shape = change
    copies = Copies(source, target, shape)
    received = {(origin, to, box) for to in source.mesh.coordinates() for origin, box in copies.receives(to)}
    sent = {(origin, to, box) for origin in source.mesh.coordinates() for to, box in copies.sends(origin)}
    assert received == sent
    held, itemsize = math.prod(source.largest(shape)), 4
    planned = exchange(source, target, shape, itemsize).peak
    for at in source.mesh.coordinates():
        given_to_others = sum(box.numel for to, box in copies.sends(at) if to != at)
        assert given_to_others <= most_given(source, target, held)
        taken = sum(box.numel for origin, box in copies.receives(at) if origin != at)
        assert (held + given_to_others + taken) * itemsize <= planned
        assert all(origin == at for origin, box in copies.receives(at) if source.box(shape, at).meet(box) == box)


def test_who_wants_the_same_takes_it_from_one_after_another():
    mesh = Mesh((2, 2, 2))
    copies = Copies(mesh.sharding((Shard(0), R, Shard(1))), mesh.sharding((R, Shard(1), Shard(0))), (4, 4))
    given_to_others = [sum(to != at for to, _ in copies.sends(at)) for at in mesh.coordinates()]
    assert max(given_to_others) == 1
    source, target = Mesh((2, 2)).sharding((Shard(0), R)), Mesh((2, 2), ranks=range(4, 8)).sharding((R, Shard(0)))
    crossing = Crossing(source, target, (4,))
    assert [len(crossing.sends(at)) for at in source.mesh.coordinates()] == [1, 1, 1, 1]


@settings(deadline=None)
@given(st.data())
def test_between_two_meshes(data):
    shape = data.draw(shapes)
    ranks = data.draw(st.permutations(range(10)))
    meshes_ = []
    for _ in range(2):
        small = data.draw(meshes(max_axes=3, max_size=8))
        chosen = sorted(data.draw(st.permutations(ranks))[: small.size])
        meshes_.append(Mesh(small.shape, ranks=chosen))
    source, target = (data.draw(shardings(m, len(shape))) for m in meshes_)
    crossing = Crossing(source, target, shape)
    full = np.arange(math.prod(shape)).reshape(shape)
    held = spread(full, source)
    parts, received = [], set()
    for to in target.mesh.coordinates():
        box = target.box(shape, to)
        part = np.full(box.size, -1)
        for origin, common in crossing.receives(to):
            there = source.box(shape, origin)
            part[common.within(box)] = held[source.mesh.linear(origin)][common.within(there)]
            received.add((origin, to, common))
            own = source.mesh.coordinate_of(target.mesh.ranks[target.mesh.linear(to)])
            if own is not None and source.box(shape, own).meet(common) == common:
                assert origin == own, "a rank that has a part takes it from itself"
        parts.append(part)
    assert (assemble(parts, target, shape) == full).all()
    assert received == {(o, to, box) for o in source.mesh.coordinates() for to, box in crossing.sends(o)}


def test_copies_from_replicas_are_spread():
    source, target = Mesh((4,)).sharding((R,)), Mesh((4,), ranks=range(4, 8)).sharding((R,))
    crossing = Crossing(source, target, (3,))
    assert [crossing.receives((k,))[0][0] for k in range(4)] == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("op", OPS)
def test_only_reductions_with_an_exact_mask_can_be_made_from_replicate(op):
    mesh = Mesh((2,))
    if masking(op):
        assert [s.kind for s in transition(mesh.replicated(), mesh.sharding((Partial(op),)), (4,), 4).steps] == ["mask"]
    else:
        with pytest.raises(ShardingError, match="There is no way"):
            transition(mesh.replicated(), mesh.sharding((Partial(op),)), (4,), 4)


def test_a_memory_limit_is_kept_or_refused():
    mesh = Mesh((4,))
    rows, columns = mesh.sharding((Shard(0),)), mesh.sharding((Shard(1),))
    free = transition(rows, columns, (1024, 1024), 4)
    assert [s.kind for s in free.steps] == ["all_to_all"]
    assert free.peak < 1024 * 1024 * 4 * 2
    with pytest.raises(ShardingError, match="stays within the memory limit"):
        transition(rows, mesh.replicated(), (1024, 1024), 4, limit=free.peak)


class TestPaths(TestCase):
    maxDiff = None

    def path(self, source, target, shape, text):
        steps = transition(source, target, shape, 4).steps
        self.assertExpectedInline("\n".join(map(repr, steps)), text, skip=1)

    def test_known_paths(self):
        mesh = Mesh((2, 4), ("dp", "tp"))
        s = mesh.sharding
        self.path(s((Shard(0), R)), s((Shard(1), R)), (8, 8), """all_to_all(dp) (S(0), R) -> (S(1), R), 64 bytes""")
        self.path(
            s((Partial(), Partial())),
            s((R, R)),
            (8, 8),
            """all_reduce(dp x tp) (P(sum), P(sum)) -> (R, R), 448 bytes""",
        )
        self.path(
            s((Partial(), Partial())),
            s((Shard(0), Shard(0))),
            (8, 8),
            """reduce_scatter(dp x tp) (P(sum), P(sum)) -> (S(0), S(0)), 224 bytes""",
        )
        self.path(
            s((Partial(), Partial())),
            mesh.sharding((Shard(0), Shard(0)), {0: (1, 0)}),
            (8, 8),
            """reduce_scatter(tp x dp) (P(sum), P(sum)) -> (S(0), S(0)), 224 bytes""",
        )
        self.path(
            s((R, Partial())), s((R, Shard(0))), (8, 8), """reduce_scatter(tp) (R, P(sum)) -> (R, S(0)), 192 bytes"""
        )
        self.path(
            s((Shard(0), Shard(0))),
            s((R, Shard(0))),
            (8, 8),
            """exchange(dp x tp) (S(0), S(0)) -> (R, S(0)), 64 bytes""",
        )
        self.path(
            s((Shard(0), Shard(1))),
            s((Shard(1), Shard(0))),
            (8, 8),
            """exchange(dp x tp) (S(0), S(1)) -> (S(1), S(0)), 32 bytes""",
        )
        self.path(
            s((Shard(0), Shard(0))),
            s((R, R)),
            (8, 8),
            """all_gather(dp x tp) (S(0), S(0)) -> (R, R), 224 bytes""",
        )
        # along later dims first, so that the last and largest gather need not rearrange what comes
        self.path(
            s((Shard(0), Shard(1))),
            s((R, R)),
            (64, 64),
            """\
all_gather(tp) (S(0), S(1)) -> (S(0), R), 6144 bytes
all_gather(dp) (S(0), R) -> (R, R), 8192 bytes""",
        )
        self.path(
            s((Shard(1), Shard(0))),
            s((R, R)),
            (64, 64),
            """\
all_gather(dp) (S(1), S(0)) -> (R, S(0)), 2048 bytes
all_gather(tp) (R, S(0)) -> (R, R), 12288 bytes""",
        )


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_tensors_are_gathered_together_up_to_where_that_costs_what_two_reductions_do(ranks, count):
    link = Link(launch=3e-5, latency=1e-6, bandwidth=1e9)
    limit = gathered_up_to(ranks, count, link)
    for nbytes in (1e3, 1e4, 1e5, 1e6, 1e7):
        together = link.seconds(1, ranks - 1, count * nbytes * (ranks - 1))
        apart = 2 * link.seconds(1, 2 * (ranks - 1), 2 * nbytes * (ranks - 1) / ranks)
        assert (together < apart) == (nbytes < limit)
