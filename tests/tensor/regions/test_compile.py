"""A tensor-parallel block compiles into one graph, forward and backward, with eager's values."""

import pytest
import torch
import torch._inductor.config as inductor
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tests.interpreters import run_code
from tests.older import require
from tests.plain_graphs import collectives, recording
from tests.ranks import run_ranks


def compare(rank, world, mesh_shape, backend, batch_placements):
    from torch.distributed.device_mesh import init_device_mesh

    from torchshard import DTensor, Replicate, Shard, distribute_tensor
    from torchshard.demo.model import GPT, Config, tensor_parallel

    mesh = init_device_mesh("cpu", mesh_shape)
    config = Config(layers=1, width=24, heads=6, context=8, vocabulary=29)
    torch.manual_seed(0)
    plain = GPT(config).blocks[0]
    torch.manual_seed(0)
    block = tensor_parallel(GPT(config), mesh, axis=mesh.ndim - 1).blocks[0]
    placements = [{"S": Shard(0), "R": Replicate()}[p] for p in batch_placements]
    g = torch.Generator().manual_seed(3)
    graphs = []
    if backend == "inductor":
        inductor.post_grad_custom_post_pass = graphs.append  # the graphs as they are lowered
    compiled = torch.compile(block, backend=backend or recording(graphs), fullgraph=True)
    errors = []
    for _ in range(2):
        x = torch.randn(5, 7, 24, generator=g)
        placed = distribute_tensor(x, mesh, placements).requires_grad_()
        x.requires_grad_()
        want, got = plain(x), compiled(placed)
        want.square().sum().backward()
        assert isinstance(got, DTensor)
        got.square().sum().backward()
        pairs = [(got, want), (placed.grad, x.grad)]
        pairs += [(p.grad, q.grad) for p, q in zip(block.parameters(), plain.parameters(), strict=True)]
        errors += [(a.full_tensor() - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in pairs]
    sent = [collectives(graph) for graph in graphs]
    assert sum(map(len, sent)), "the block communicates"
    with torch.no_grad():
        errors.append((compiled(placed.detach()).full_tensor() - plain(x)).abs().max().item())
    return errors, sent


@pytest.mark.parametrize(
    ("mesh_shape", "backend", "batch"),
    [((2,), "inductor", "R"), ((2,), None, "S"), ((2, 2), None, "SR")],
    ids=["inductor", "sharded batch", "data and tensor"],
)
def test_one_graph_forward_and_backward(mesh_shape, backend, batch):
    for errors, sent in run_ranks(2 * len(mesh_shape), compare, mesh_shape, backend, batch, timeout=280):
        assert max(errors) < 1e-5, errors
        if backend == "inductor":
            assert sent == [
                ["all_reduce_"] * 2,
                ["reduce_scatter_tensor", "all_gather_into_tensor", "reduce_scatter_tensor"],
            ]
        assert len(sent) == 2, "one graph forward, one backward, with nothing but plain tensors and collectives in them"


def moved_and_made(x, rows, mesh):
    """What a region makes of a plain tensor that differs between ranks, and of a split one of uneven length."""
    import torchshard
    from torchshard import Replicate, Shard, distribute_tensor

    on = {"device_mesh": mesh, "placements": [Shard(0)]}
    return [
        distribute_tensor(x, mesh, [Shard(0)]) * 2,
        torchshard.zeros(7, 4, **on) + torchshard.full((7, 4), 3.0, **on),
        torchshard.linspace(0, 1, 7, **on),
        torchshard.rand(7, 4, **on),
        torchshard.randn(7, 4, **on) + rows,
        torch.dropout(rows, 0.5, True),
        rows.redistribute(placements=[Shard(1)]).sin(),
        rows.redistribute(placements=[Replicate()]).cos(),
        torch.nonzero(rows > 3),
        torch.masked_select(rows, rows > 3),
    ]


def chosen(x):
    return x.full_tensor()[(x > 3).full_tensor()].sum()


def compare_values(rank, world):
    import torchshard
    from torchshard import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    x = torch.randn(7, 4) + rank
    rows = distribute_tensor(torch.arange(28.0).view(7, 4), mesh, [Shard(0)])
    results = []
    for function in (moved_and_made, torch.compile(moved_and_made, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(5 + rank)  # random numbers are those of the first rank
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            made = function(x, rows, mesh)
        results.append([(torchshard.layout_of(y), y.to_local(), y.full_tensor()) for y in made])
    leaf = rows.detach().requires_grad_()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(chosen, backend="aot_eager", fullgraph=True)(leaf).backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), (rows > 3).full_tensor().float())
    return [
        eager[0] is compiled[0] and all(torch.equal(a, b) for a, b in zip(eager[1:], compiled[1:], strict=True))
        for eager, compiled in zip(*results, strict=True)
    ], [whole.tolist() for _, _, whole in results[1]]


def test_values_of_a_region_are_those_of_eager():
    require("meshes in graphs")
    (same, first), (also_same, second) = run_ranks(2, compare_values, timeout=120)
    assert same == also_same == [True] * 10
    assert first == second


def spread(x):
    """What is saved of it for backward is a tensor where a rank has several rows, another where it has one."""
    x = x * 1
    columns = x.split(2, 1)[-1]
    largest = columns.max(1).values
    left = torch.fmod(largest, 1.5)
    return x, columns, columns.clamp(min=x), largest, left, left.std()


def compare_uneven(rank, world):
    from torchshard import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    graphs, values = [], torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
    backend = recording(graphs, partition_fn=min_cut_rematerialization_partition)
    found = []
    for function in (spread, torch.compile(spread, backend=backend, fullgraph=True)):
        for used in (range(6), [4], [0, 5]):  # other results get no gradient
            x = distribute_tensor(values, mesh, [Shard(0)]).requires_grad_()
            made = function(x)
            sum(made[k].square().sum() for k in used).full_tensor().backward()
            found.append([y.full_tensor() for y in (*made, x.grad)])
    torch.testing.assert_close(found[3:], found[:3])
    return [collectives(graph) for graph in graphs]


def test_backward_repeats_no_collectives_of_forward():
    first, second = run_ranks(2, compare_uneven, timeout=120)  # what one sends, the other waits for
    assert first == second
    assert first == [["all_gather_into_tensor"], ["all_reduce"]]


def repeated_by_inductor(rank, world):
    """In the gradient of cumprod the last rank holds no columns of what is gathered, and needs none of the result.

    The zeros that it sends instead were a constant to its graph, which backward then sent once more.
    """
    from torchshard import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    values, given = torch.randn(5, 4), distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)])
    gradients = []
    for run in (lambda x: x.cumprod(0), torch.compile(lambda x: x.cumprod(0), fullgraph=True)):
        x = distribute_tensor(values, mesh, [Shard(0)]).requires_grad_()
        run(x).backward(given)
        gradients.append(x.grad.full_tensor())
    torch.testing.assert_close(*gradients)


def test_a_rank_without_elements_gathers_as_often_as_others():
    run_ranks(3, repeated_by_inductor, timeout=100)


def test_torch_is_told_once_to_repeat_no_collectives():
    script = """
from torch._functorch.partitioners import _extract_graph_with_inputs_outputs as before
from torchshard import _torch
told = _torch.run_collectives_once()
_torch.run_collectives_once.cache_clear()
from torch._functorch.partitioners import _extract_graph_with_inputs_outputs as after
print(told, before is not after, _torch.run_collectives_once())
"""
    assert run_code(script).split() == ["True", "True", "False"]  # where torch needs it no longer: False, False, False


def test_torch_is_told_once_to_take_zeros_for_results_without_gradient(monkeypatch):
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

    from torchshard import _torch

    told, process = _torch.fill_unused_results, AOTDispatchAutograd.process_runtime_tangent
    process = getattr(process, "__wrapped__", process)
    said = []
    with monkeypatch.context() as patch:
        patch.setattr(AOTDispatchAutograd, "process_runtime_tangent", staticmethod(process))
        for _ in range(2):  # the second time, this torch is one that takes zeros by itself
            told.cache_clear()
            said.append((told(), AOTDispatchAutograd.process_runtime_tangent is not process))
    told.cache_clear()
    assert said == [(True, True), (False, True)]  # where torch needs it no longer: (False, False), twice
