"""Meshes and placements in compiled regions: all that can be asked of them, from wherever they come."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import torchshard
from tests.compiler.regions import X, agree, follows, same, ways
from tests.older import require
from tests.ranks import fake_ranks
from torchshard.compiler import support_groups

PAIR = Shard(1), Replicate()


@pytest.fixture(scope="module", autouse=True)
def meshes():
    """Rank 1 of 4, on two meshes."""
    support_groups()
    global SQUARE, LINE
    with fake_ranks(4, 1):
        SQUARE, LINE = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), init_device_mesh("cpu", (4,))
        yield


OF_A_MESH = {
    "ndim, shape, names": lambda x, m: (x + m.ndim, m.shape, m.mesh_dim_names, m.device_type),
    "size": lambda x, m: x + 100 * m.size() + 10 * m.size(1) + m.size(mesh_dim=0),
    "coordinate": lambda x, m: (x + m.get_rank(), m.get_coordinate()),
    "local rank": lambda x, m: x + 100 * m.get_local_rank(0) + 10 * m.get_local_rank("tp") + m.get_local_rank(mesh_dim=1),
    "group": lambda x, m: x + m.get_group(0).size() + m.get_group("tp").rank() + m.get_group(mesh_dim=1).size(),
    "all groups": lambda x, m: (x + m.get_all_groups()[1].rank(), len(m.get_all_groups())),
    "slice": lambda x, m: (x + m["tp"].size(), m["tp"].get_group().group_name, m["dp", "tp"].ndim),
    "flatten": lambda x, m: x + m._flatten("both").size(),
    "equal": lambda x, m: (x + 1, m == SQUARE, m != SQUARE, m == LINE, m is SQUARE),
    "hash": lambda x, m: (x + {m: 3, LINE: 4}[SQUARE], hash(m) == hash(SQUARE), m in {SQUARE}),
    "ranks of a mesh": lambda x, m: (x[0] + m.mesh, m.mesh.tolist()),
    "kind": lambda x, m: (x + 1, isinstance(m, DeviceMesh)),
    "returned mesh": lambda x, m: (x + 1, [m], {"tp": m["tp"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_A_MESH)
def test_a_mesh_given_closed_over_or_held(name):
    require(name)
    assert all(agree(function, *args) for function, args in ways(OF_A_MESH[name], SQUARE))


def test_another_mesh_is_noticed():
    assert follows(lambda x, m: x + 10 * m.size() + m.ndim, SQUARE, LINE)
    mesh = SQUARE

    def function(x):
        return x + mesh.ndim

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert same(compiled(X), function(X))
    mesh = LINE
    assert same(compiled(X), function(X))


OF_A_PLACEMENT = {
    "predicates": lambda x, p: (x + 1, p.is_shard(), p.is_shard(0), p.is_shard(dim=1), p.is_replicate(), p.is_partial()),
    "equal": lambda x, p: (x + 1, p == Shard(0), p != Replicate(), (p, p) == (Shard(0), Shard(0))),
    "hash": lambda x, p: (x + 1, hash(p) == hash(Shard(0)), {p: 3}.get(Shard(0), 4), p in {Shard(0), Replicate()}),
    "attributes": lambda x, p: (x + getattr(p, "dim", 7), hasattr(p, "reduce_op"), getattr(p, "reduce_op", None)),
    "kind of a placement": lambda x, p: (x + 1, isinstance(p, Shard), type(p) is Replicate, isinstance(p, Placement)),
    "text": lambda x, p: (x + 1, str(p), f"{p}"),
    "returned placement": lambda x, p: (x + 1, [p], Shard(2), Replicate(), Partial("max")),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_A_PLACEMENT)
def test_a_placement_given_closed_over_or_held(name):
    require(name)
    use = OF_A_PLACEMENT[name]
    assert all(agree(function, *args) for function, args in ways(use, Shard(0)))
    assert follows(use, Shard(0), Replicate(), Shard(1), Partial("avg"))


def test_met_twice():
    """As a global and as an argument, in both orders; Dynamo tracks an object by where it met it first."""
    assert follows(lambda x, m: x + SQUARE.size() + m.ndim, SQUARE, LINE)
    assert follows(lambda x, m: x + m.ndim + SQUARE.ndim, SQUARE, LINE)
    assert follows(lambda x, m: x + {SQUARE: 7, LINE: 8}[m], SQUARE, LINE)
    assert follows(lambda x, p: x + PAIR[0].dim + getattr(p, "dim", 5), *PAIR)
    assert follows(lambda x, p: x + getattr(p, "dim", 5) + PAIR[0].dim, *PAIR)
    assert follows(lambda x, p: x + {PAIR[0]: 7, PAIR[1]: 8}[p], *PAIR)
    global HELD
    HELD = torchshard.DTensor.from_local(torch.arange(4.0), LINE, [Replicate()])
    assert follows(lambda x, y: (10 * HELD + y).to_local(), HELD, HELD + 5)
    assert follows(lambda x, y: (y + 10 * HELD).to_local(), HELD, HELD + 5)


def test_placements_constructed_and_in_containers():
    assert agree(lambda x: x + Shard(1).dim + [Shard(i) for i in range(3)][2].dim, X)
    assert agree(lambda x, p=PAIR: x + p[0].dim, X)
    assert agree(lambda x, cls: x + cls(1).dim, X, Shard)
    assert agree(lambda x, by: x + by[Shard(0)], X, {Shard(0): 3})
    for container in (tuple, list):
        assert follows(
            lambda x, p: (x + any(q.is_shard() for q in p), p, len(p)),
            container([Shard(0), Replicate()]),
            container([Replicate(), Partial()]),
        )


def test_meshes_and_placements_cross_graph_breaks():
    require("graph breaks")

    def function(x, mesh, placement):
        part, moved = mesh["tp"], Shard(placement.dim + 1)
        y = x + part.size()
        torch._dynamo.graph_break()
        return y + part.size() + moved.dim, part, mesh, moved, placement

    args = X, SQUARE, Shard(0)
    assert same(torch.compile(function, backend="eager")(*args), function(*args))
