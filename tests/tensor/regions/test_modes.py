"""Compiled regions and what users allow for a while; what runs eagerly behind a graph break is not compiled."""

import copy
import pickle
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import torchshard
from tests.older import require
from tests.plain_graphs import compiled_frames
from tests.ranks import fake_ranks
from torchshard import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, layout_of, zeros
from torchshard.compiler.advice import way_around
from torchshard.errors import UnsupportedOperatorError
from torchshard.parallel import loss_parallel
from torchshard.state_dict import to_dtensor, to_full, to_sharded_tensor
from torchshard.tensor.sharded import factories, specs


@pytest.fixture(scope="module", autouse=True)
def line():
    global ROWS, PLAIN
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        ROWS, PLAIN = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]), torch.randn(4)
        yield


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    counters.clear()


def whole(function, backend="aot_eager"):
    return torch.compile(function, backend=backend, fullgraph=True)


def cross_entropy(logits, target):
    return torch.nn.functional.cross_entropy(logits, target)


def test_a_graph_made_where_plain_tensors_are_replicas_is_for_such_calls_only():
    counting = CompileCounter()
    for backend in ("aot_eager", counting):
        compiled = whole(lambda x, y: x + y, backend)
        with torchshard.implicit_replication():
            assert compiled(ROWS, PLAIN).placements == (Shard(0),)
        with pytest.raises(Exception, match="is a plain torch") as refused:
            compiled(ROWS, PLAIN)
        assert "around the calls of the region" in way_around(str(refused.value))
        with torchshard.implicit_replication():
            assert compiled(ROWS, PLAIN).placements == (Shard(0),)
    assert counting.frame_count == 1


def test_graphs_that_other_ranks_are_to_run_are_refused():
    require("graphs for other ranks")
    config = (
        torch.compiler.config if hasattr(torch.compiler.config, "compile_on_one_rank") else torch.distributed.config
    )
    parts = factories.zeros(specs.ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)]), 8, 4)
    with config.patch(compile_on_one_rank=True):
        assert whole(lambda x: x + 1)(PLAIN).shape == (4,)
        for x in ROWS, parts:
            with pytest.raises(Exception, match="compile on every rank"):
                whole(lambda x: x + 1)(x)
        with pytest.raises(Exception, match="compile on every rank"):
            whole(lambda x: x + ROWS.to_local().sum())(PLAIN)
        for inside in made_inside(ROWS.device_mesh):
            with pytest.raises(Exception, match="compile on every rank"):
                whole(inside)(PLAIN)
    assert whole(lambda x: x + 1)(ROWS).placements == (Shard(0),)


def made_inside(mesh):
    """Functions of a plain tensor that make a DTensor of it, or none of it, and give a plain one."""
    yield lambda x: DTensor.from_local(x, mesh, [Shard(0)]).full_tensor()
    yield lambda x: DTensor.from_local(x, mesh, [Shard(0)]).to_local() + 1
    yield lambda x: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None).to_local()
    yield lambda x: x + zeros(8, device_mesh=mesh, placements=[Shard(0)]).to_local().sum()


def test_a_loss_of_plain_targets():
    compiled, target = whole(cross_entropy), torch.zeros(8, dtype=torch.long)
    logits = ROWS.detach().redistribute(placements=[Shard(1)]).requires_grad_()
    with loss_parallel():
        compiled(logits, target).backward()
    assert logits.grad.placements == (Shard(1),)
    with pytest.raises(Exception, match="'target' is a plain torch"):
        compiled(logits, target)


def loss_inside(logits, target):
    with loss_parallel():
        return cross_entropy(logits, target)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_context_in_a_region_leaves_nothing_that_another_graph_would_stumble_over(fullgraph):
    logits = ROWS.detach().requires_grad_()
    target = distribute_tensor(torch.zeros(8, dtype=torch.long), ROWS.device_mesh, [Replicate()])
    for _ in range(2):
        torch._dynamo.reset()
        loss = torch.compile(loss_inside, backend="aot_eager", fullgraph=fullgraph)(logits, target)
        loss.redistribute(placements=[Replicate()]).backward()
    with pytest.raises(UnsupportedOperatorError, match="is a plain torch"):
        ROWS + PLAIN


def test_a_graph_is_not_used_for_calls_that_forbid_what_it_gathers():
    compiled = whole(lambda x: torch.pdist(x[:4]))
    with torchshard.fallback("silent"):
        assert compiled(ROWS).shape == (6,)
    with torchshard.fallback("error"), pytest.raises(Exception, match="has no sharded way to run"):
        compiled(ROWS)


def allowed_inside(x, y):
    with torchshard.implicit_replication():
        return x + y


def forbidden_inside(x, y):
    with torchshard.fallback("error"):
        return torch.pdist(x[:4])


def test_what_a_region_allows_or_forbids_itself():
    for function, advice in ((allowed_inside, "implicit_replication() around"), (forbidden_inside, "fallback around")):
        with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
            whole(function)(ROWS, PLAIN)
        assert advice in way_around(str(refused.value))
    assert torch.compile(allowed_inside, backend="aot_eager")(ROWS, PLAIN).placements == (Shard(0),)
    with pytest.raises(UnsupportedOperatorError, match="has no sharded way to run"):
        torch.compile(forbidden_inside, backend="aot_eager")(ROWS, PLAIN)


def test_what_cannot_be_reduced_ends_a_graph():
    """The error is that of eager code."""
    terms = DTensor.from_local(torch.ones(3, dtype=torch.complex64), ROWS.device_mesh, [Partial("max")])
    reduced = torch.compile(lambda x: (x * 1).redistribute(placements=[Replicate()]), backend="aot_eager")
    with pytest.raises(UnsupportedOperatorError, match="cannot be reduced"):
        reduced(terms)


@contextmanager
def broken():
    torch._dynamo.graph_break()
    yield


def operators(x):
    with broken():
        return torch.nn.functional.dropout(torch.relu(x + x).sum(0))


def redistributed(x):
    with broken():
        return x.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()])


def with_backward(x):
    with broken():
        x = x.detach().requires_grad_()
        scale = torch.tensor(2.0, requires_grad=True)
        (x * scale).relu().redistribute(placements=[Replicate()]).sum().to_local().backward()
    return x.grad


def there_and_back(x):
    with broken():
        on = {"device_mesh": x.device_mesh, "placements": x.placements}
        return DTensor.from_local(x.to_local(), **on) + distribute_tensor(x.full_tensor(), **on) + zeros(8, 4, **on)


def with_data(x):
    with broken():
        copy.copy(x).data.mul_(2)
        x.data = x.data + 1
    return x


def read_and_copied(x):
    with broken():
        repr(x), f"{x.sum()}", x.tolist(), x.numpy(force=True), copy.deepcopy(x), layout_of(x)
        pickle.dumps(x)
        return DTensor.from_torch(x.to_torch())


def of_a_graph(x):
    with broken():
        leaf = x.detach().requires_grad_()
        twice(leaf).sum().backward()
    return leaf.grad


def cut_in_parts(x):
    with broken():
        parts = to_sharded_tensor(x).requires_grad_()
        (parts * 2).backward(parts.detach())
        repr(parts), parts.metadata(), parts.local_shards(), parts.sharding_spec(), copy.copy(parts).data
        return to_dtensor(to_full(parts.grad), x.device_mesh, x.placements)


def converted(x):
    return to_dtensor(to_full({"x": to_sharded_tensor(x)}), x.device_mesh, x.placements)["x"]


@torch.compile(backend="aot_eager")
def twice(x):
    return x * 2


@pytest.mark.parametrize(
    "function",
    [
        operators, redistributed, with_backward, there_and_back,
        with_data, read_and_copied, of_a_graph, cut_in_parts, converted,
    ],
)  # fmt: skip
def test_the_insides_of_eager_operators_are_left_alone(function, monkeypatch):
    graphs = []
    twice(ROWS.detach().requires_grad_()).sum().backward()

    def backend(graph, _inputs):
        graphs.append([node for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    compiled = compiled_frames(monkeypatch)
    assert isinstance(torch.compile(function, backend=backend)(ROWS.clone()), DTensor)
    assert not graphs
    assert not [name for ours, name in compiled if ours]
    assert len(compiled) < 20
