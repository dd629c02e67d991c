"""A block of a tensor-parallel Llama compiles into one graph, forward and backward, with eager's values."""

import pytest
import torch

from tests.parallel.llama import Block, Config, Llama, loss, plan, rotary
from tests.plain_graphs import assert_plain, collectives, recording
from tests.ranks import run_ranks


def compare(rank, world, kind):
    from torchshard import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.parallel import parallelize_module

    config = Config()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    plain, block = Block(config), Block(config)
    block.load_state_dict(plain.state_dict())
    prefix = "layers.*."
    of_block = {path.removeprefix(prefix): style for path, style in plan(kind).items() if path.startswith(prefix)}
    parallelize_module(block, mesh, of_block)
    graphs = []
    compiled = torch.compile(block, backend=recording(graphs), fullgraph=True)
    turns = rotary(8, config.head)
    g = torch.Generator().manual_seed(3)
    errors = []
    for _ in range(2):
        x = torch.randn(2, 8, config.width, generator=g, requires_grad=True)
        given = x.detach().clone() if kind == "tp" else x.detach().chunk(world, 1)[rank].clone()
        if kind == "dtensor":
            given = distribute_tensor(x.detach(), mesh, [Shard(1)])
        given.requires_grad_()
        block.zero_grad()
        plain.zero_grad()
        want, got = plain(x, turns), compiled(given, turns)
        want.square().sum().backward()
        got.square().sum().backward()
        whole = [Replicate()] if kind == "tp" else [Shard(1)]
        pairs = [(got, want), (given.grad, x.grad)]
        pairs = [(a if isinstance(a, DTensor) else DTensor.from_local(a, mesh, whole), b) for a, b in pairs]
        pairs += [(p.grad, q.grad) for p, q in zip(block.parameters(), plain.parameters(), strict=True)]
        for p, q in pairs:
            full = p.full_tensor() if isinstance(p, DTensor) else p
            errors.append((full - q).abs().max().item() / max(1.0, q.abs().max().item()))
    assert len(graphs) == 2, "one forward and one backward"
    if kind == "tp":
        compiled_first(plain, mesh, of_block, (given.detach(), turns), got, graphs)
    return errors, [collectives(graph) for graph in graphs]


def compiled_first(plain, mesh, of_block, inputs, want, graphs):
    """Compile, then parallelize: the plan finds the modules below the compiled one, and the same graphs come out."""
    from torchshard.parallel import parallelize_module

    again = []
    block = Block(Config())
    block.load_state_dict(plain.state_dict())
    compiled = torch.compile(block, backend=recording(again), fullgraph=True)
    assert parallelize_module(compiled, mesh, of_block) is compiled
    got = compiled(inputs[0].requires_grad_(), inputs[1])
    got.square().sum().backward()
    assert torch.equal(got, want)
    assert [assert_plain(graph) for graph in again] == [assert_plain(graph) for graph in graphs]


GATHER, REDUCE, SCATTER = "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"
SENT = {  # forward, backward; the graphs hold nothing but plain tensors and these
    "tp": [[REDUCE] * 2, [REDUCE] * 5],
    "sp": [[GATHER, SCATTER] * 2, [GATHER, SCATTER] * 2],
    "dtensor": [[GATHER, SCATTER] * 2, [GATHER, SCATTER] * 2],
}


@pytest.mark.parametrize(("kind", "world"), [("tp", 2), ("sp", 4), ("dtensor", 2)])
def test_one_graph_forward_and_backward(kind, world):
    for errors, sent in run_ranks(world, compare, kind, timeout=280):
        assert max(errors) < 1e-5, errors
        assert sent == SENT[kind]


def compare_models(rank, world):
    """A whole model: split vocabulary at both ends, and its loss."""
    from torchshard import Replicate, distribute_tensor, init_device_mesh
    from torchshard.parallel import parallelize_module

    config = Config(layers=1)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    plain, model = Llama(config), Llama(config)
    model.load_state_dict(plain.state_dict())
    parallelize_module(model, mesh, plan("sp"))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(tokens, targets):
        return loss(model(tokens), targets)

    tokens = torch.randint(0, config.vocabulary, (2, 8), generator=torch.Generator().manual_seed(3))
    want = loss(plain(tokens), tokens)
    got = step(tokens, distribute_tensor(tokens, mesh, [Replicate()]))
    want.backward()
    got.backward()
    pairs = [(got, want), *[(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]]
    return [(p.full_tensor() - q).abs().max().item() / max(1.0, q.abs().max().item()) for p, q in pairs]


def test_one_graph_of_a_whole_model():
    for errors in run_ranks(2, compare_models, timeout=280):
        assert max(errors) < 1e-5, errors
