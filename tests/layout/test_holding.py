"""Conversions as arithmetic, all ranks played in one process: from any holding to any other, every element arrives once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.strategies import meshes, shardings
from torchshard.errors import ShardingError
from torchshard.layout import Box, Mesh, R, Shard
from torchshard.layout.boxes import whole
from torchshard.layout.holding import Holding, lacking, receives, sends
from torchshard.layout.strided import strided_intervals

shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes_of(draw, shape):
    """Boxes that tile a shape: cuts of cuts, as no grid makes them."""
    done, ahead = [], [whole(shape)]
    while ahead and len(done) + len(ahead) < 8:
        box = ahead.pop()
        dims = [d for d, n in enumerate(box.size) if n > 1]
        if not dims or draw(st.booleans()):
            done.append(box)
            continue
        d = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.size[d] - 1))
        low = Box(box.offset, (*box.size[:d], at, *box.size[d + 1 :]))
        offset = (*box.offset[:d], box.offset[d] + at, *box.offset[d + 1 :])
        ahead += [low, Box(offset, (*box.size[:d], box.size[d] - at, *box.size[d + 1 :]))]
    return [*done, *ahead]


@st.composite
def strided(draw, mesh, shape):
    """torch's strided splits of one dim, which need not be intervals."""
    dim = draw(st.integers(0, len(shape) - 1))
    factors = {axis: draw(st.integers(1, 3)) for axis in range(mesh.ndim) if draw(st.booleans())}
    held = []
    for rank, at in zip(mesh.ranks, mesh.coordinates(), strict=True):
        for start, length in strided_intervals(shape[dim], factors, mesh.shape, at):
            offset = [0] * len(shape)
            offset[dim] = start
            held.append((rank, Box(tuple(offset), (*shape[:dim], length, *shape[dim + 1 :]))))
    return Holding.of(shape, held, mesh.ranks)


@st.composite
def holdings(draw, shape):
    """A holding of any kind: on a mesh of up to four axes, in boxes on any ranks, strided, or whole on some ranks."""
    kind = draw(st.sampled_from(["mesh", "mesh", "boxes", "strided", "whole"]))
    if kind == "boxes":
        boxes = draw(boxes_of(shape))
        return Holding.of(shape, [(draw(st.integers(0, 9)), box) for box in boxes])
    if kind == "whole":
        return Holding.everywhere(shape, sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4))))
    mesh = draw(meshes())
    if kind == "strided" and shape:
        return draw(strided(mesh, shape))
    return Holding.of_sharding(draw(shardings(mesh, len(shape))), shape)


def play(full, source, target):
    """Every rank's boxes after the copies that each works out for itself; every message is sent and awaited."""
    sent = {}
    for rank in source.ranks:
        for to, box in sends(source, target, rank):
            assert (rank, to, box) not in sent
            assert any(box.meet(mine) == box for mine in source.parts_of(rank))
            sent[rank, to, box] = full[box.slices]
    made = {}
    for rank in target.ranks:
        room = np.full(full.shape, -1)
        for peer, box in receives(source, target, rank):
            if peer == rank:
                assert any(box.meet(mine) == box for mine in source.parts_of(rank))
                room[box.slices] = full[box.slices]
            else:
                room[box.slices] = sent.pop((peer, rank, box))
        made[rank] = room
    assert not sent
    return made


@settings(max_examples=100, deadline=None)
@given(st.data(), shapes)
def test_every_holding_becomes_every_other(data, shape):
    source, target = data.draw(holdings(shape)), data.draw(holdings(shape))
    source.check()
    target.check()
    full = np.arange(int(np.prod(shape))).reshape(shape)
    moved = False
    for rank, room in play(full, source, target).items():
        expected = np.full(shape, -1)
        for box in target.parts_of(rank):
            expected[box.slices] = full[box.slices]
        assert (room == expected).all()
        moved |= any(copy.peer != rank for copy in receives(source, target, rank))
    assert moved == lacking(source, target)
    back = play(full, target, source)
    for rank in source.ranks:
        for box in source.parts_of(rank):
            assert (back[rank][box.slices] == full[box.slices]).all()


@given(st.data(), shapes)
def test_sharded_to_sharded_moves_no_more_than_lacks(data, shape):
    """No rank receives an element twice, or one that it has."""
    mesh = data.draw(meshes())
    source, target = (Holding.of_sharding(data.draw(shardings(mesh, len(shape))), shape) for _ in range(2))
    for rank in mesh.ranks:
        wanted = sum(box.numel for box in target.parts_of(rank))
        had = sum((a.meet(b) or Box((0,) * len(shape), (0,) * max(1, len(shape)))).numel if shape else 1
                  for a in target.parts_of(rank) for b in source.parts_of(rank))  # fmt: skip
        received = sum(copy.box.numel for copy in receives(source, target, rank) if copy.peer != rank)
        assert received == wanted - had


def test_replicas_share_the_work():
    mesh = Mesh((2, 2))
    for placements in ([R, Shard(0)], [Shard(0), R]):
        source = Holding.of_sharding(mesh.sharding(placements), (4,))
        target = Holding.everywhere((4,), range(4))
        assert [len(sends(source, target, rank)) for rank in range(4)] == [1, 1, 1, 1]


def test_what_nobody_holds_is_told():
    source = Holding.of((4,), [(0, Box((0,), (3,)))])
    with pytest.raises(ShardingError, match="1 elements missing for rank 2"):
        receives(source, Holding.everywhere((4,), [2]), 2)
    with pytest.raises(ShardingError, match="Boxes are missing"):
        source.check()


def test_thousands_of_ranks():
    source = Holding.of_sharding(Mesh((64, 128)).sharding([Shard(0), Shard(1)]), (4096, 8192))
    target = Holding.of_sharding(Mesh((8192,)).sharding([Shard(1)]), (4096, 8192))
    assert sum(copy.box.numel for copy in receives(source, target, 5)) == 4096
