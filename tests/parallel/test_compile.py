"""A block of a tensor-parallel Llama compiles into one graph, forward and backward, with eager's values."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.older import known, require
from tests.parallel import fsdp_cases as cases
from tests.parallel.llama import Block, Config, Llama, block_plan, loss, plan, rotary
from tests.plain_graphs import assert_plain, collectives, recording
from tests.ranks import fake_ranks, run_ranks


def compare(rank, world, kind, sizes, dynamic):
    """Worst errors of a block beside a plain one, for each (batch, time); and the collectives of each graph."""
    from torchshard import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.parallel import parallelize_module

    config = Config()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    plain, block = Block(config), Block(config)
    block.load_state_dict(plain.state_dict())
    of_block = block_plan(kind)
    parallelize_module(block, mesh, of_block)
    graphs = []
    compiled = torch.compile(block, backend=recording(graphs), fullgraph=True, dynamic=dynamic)
    g = torch.Generator().manual_seed(3)
    errors = []
    for batch, time in sizes:
        turns = rotary(time, config.head)
        x = torch.randn(batch, time, config.width, generator=g, requires_grad=True)
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
    if kind == "tp" and not dynamic:
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
    for errors, sent in run_ranks(world, compare, kind, [(2, 8)] * 2, None, timeout=280):
        assert max(errors) < 1e-5, errors
        assert sent == SENT[kind] or not known("calls with placements")


def by_redistribute_alone(rank, world):
    from torchshard.parallel import styles

    styles._ANY_CALL_TAKES_PLACEMENTS = False
    return compare(rank, world, "sp", [(2, 8)], None)


def test_where_dynamo_takes_placements_for_redistribute_alone():
    for errors, _ in run_ranks(2, by_redistribute_alone, timeout=280):
        assert max(errors) < 1e-5, errors


@pytest.mark.parametrize(
    "kind", [pytest.param("tp", marks=pytest.mark.full), pytest.param("sp", marks=pytest.mark.full), "dtensor"]
)
def test_one_graph_for_all_batches_and_times(kind):
    sizes = [(6, 10), (4, 8), (3, 12)]  # at first unlike the other sizes there are, which would share their symbols
    for errors, sent in run_ranks(2, compare, kind, sizes, True, timeout=280):
        assert max(errors) < 1e-5, errors
        assert sent == SENT[kind] or not known("calls with placements")


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


@pytest.fixture(scope="module")
def grid():
    """Four ranks, of which this is one; the others are not there."""
    from torchshard import init_device_mesh

    with fake_ranks(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize(
    ("how", "library"), [("local_parameters", "ours"), ("local_parameters", "torch"), ("torch_parameters", "ours")]
)
def test_lent_parameters_are_traced(grid, how, library):
    """Parameters that are DTensors in forward only: one graph of plain tensors, and eager's numbers."""
    from torchshard.parallel import fsdp, local_parameters

    require("attributes that go in a region")
    torch._dynamo.reset()
    lend, graphs = local_parameters if how == "local_parameters" else fsdp.torch_parameters, []
    model = lend(cases.parallel(grid, library, hidden=(10, 7) if library == "ours" else (10, 6)))
    same = copy.deepcopy(model)
    compiled = torch.compile(same, backend=recording(graphs), fullgraph=True)
    x = torch.randn(5, cases.WIDTH, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for run in (model, compiled):
            run(x).square().sum().backward()
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(*[getattr(t.grad, "_local_tensor", t.grad) for t in (p, q)])
    assert [len(collectives(graph)) for graph in graphs] == [2, 2]


def test_alike_modules_share_a_graph(grid):
    """No more graphs than of torch's classes under torch's fully_shard."""
    from torchshard.parallel import local_parameters
    from torchshard.parallel.fsdp import fully_shard

    require("meshes in graphs")

    def graphs(library, prepare, compiled_first):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, counting = cases.parallel(grid, library, hidden=(8, 8, 8)), CompileCounterWithBackend("eager")
        if not compiled_first:
            prepare(model)
        for block in model:
            block.compile(backend=counting)
        if compiled_first:
            prepare(model)
        for _ in range(2):
            model(torch.ones(5, cases.WIDTH)).sum().backward()
        assert not torch._dynamo.utils.counters["graph_break"]
        return counting.frame_count

    def sharded(by):
        return lambda model: [by(module, mesh=grid["dp"]) for module in (*model, model)]

    of_torch = graphs("torch", sharded(torch_fully_shard), False)
    assert of_torch == 2  # with and without a gradient of the input
    for prepare in (sharded(fully_shard), local_parameters):
        for compiled_first in (False, True):
            assert graphs("ours", prepare, compiled_first) == of_torch


@pytest.mark.filterwarnings("error:To construct DTensor")
@pytest.mark.parametrize(
    ("lend", "strict"), [("", False), ("", True), ("local", False), ("torch", False), ("torch", True)]
)
def test_a_parallel_module_is_exported(grid, lend, strict):
    """With any number of rows; numbers and gradients are eager's, and lowered it consists of plain tensors."""
    from torchshard.parallel import fsdp, local_parameters

    require("collectives of a fake group")
    lending = {"": lambda model: model, "local": local_parameters, "torch": fsdp.torch_parameters}
    model = lending[lend](cases.parallel(grid, hidden=(10, 7)))
    x = torch.randn(5, cases.WIDTH, generator=torch.Generator().manual_seed(0))
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=strict)
    lowered, program = exported.run_decompositions(), exported.module()
    for rows in (x, x[:3]):
        results = [run(rows) for run in (model, program, lowered.module())]
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        for result in results[:2]:
            result.square().sum().backward()
    of_program = dict(program.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(*[getattr(t.grad, "_local_tensor", t.grad) for t in (p, of_program[name])])
    assert collectives(lowered.graph) == ["all_reduce"] * 2


def test_styles_are_checked_by_less_than_torchs_own(grid):
    """How much of what the hooks of two linear layers close over is compared at each call."""
    from torch.distributed.tensor import parallel as upstream

    from torchshard import parallel as ours

    def checks(library):
        module = torch.nn.Sequential(OrderedDict(up=torch.nn.Linear(8, 16), down=torch.nn.Linear(16, 8)))
        plan = {"up": library.ColwiseParallel(), "down": library.RowwiseParallel()}
        library.parallelize_module(module, grid["tp"], plan)
        found = []

        def note(entries):
            found.extend(entry.name for entry in entries if "__closure__" in entry.name)
            return [True] * len(entries)

        torch.compile(module, backend="eager", fullgraph=True, options={"guard_filter_fn": note})(torch.randn(2, 8))
        return len(found)

    assert 0 < checks(ours) < 0.5 * checks(upstream)


@pytest.mark.parametrize("lent", [False, True])
def test_no_mesh_goes_into_a_graph_of_styles(grid, lent):
    """Torch checks one at each call, and hands it on: 20 us of a graph."""
    from torchshard import Replicate, Shard
    from torchshard.parallel import (
        ColwiseParallel,
        PrepareModuleInputOutput,
        SequenceParallel,
        local_parameters,
        parallelize_module,
    )

    if lent:
        require("attributes that go in a region")

    module = torch.nn.Sequential(
        OrderedDict(norm=torch.nn.LayerNorm(8), up=torch.nn.Linear(8, 16), end=torch.nn.Identity())
    )
    both = dict.fromkeys(("input_layouts", "output_layouts", "desired_output_layouts"), Shard(-1))
    plan = {
        "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "end": PrepareModuleInputOutput(**both, desired_input_layouts=Replicate()),
    }
    parallelize_module(module, grid["tp"], plan)
    if lent:
        local_parameters(module)
    entered, checked = [], []

    def backend(graph, inputs):
        entered.extend(inputs)
        return graph

    def note(entries):
        checked.extend(str(entry.value) for entry in entries)
        return [True] * len(entries)

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True, options={"guard_filter_fn": note})
    compiled(torch.randn(2, 8))
    assert entered
    assert not [x for x in entered if not isinstance(x, torch.Tensor)]
    assert checked
    assert not [text for text in checked if text.startswith("DeviceMesh")]


@pytest.mark.parametrize("strict", [False, True])
def test_a_layer_whose_result_is_made_whole_is_exported(grid, strict):
    """Of three dims: the tracer has those that cannot change as symbols too."""
    from torchshard import Replicate
    from torchshard.parallel import ColwiseParallel, parallelize_module

    require("collectives of a fake group")
    layer = parallelize_module(torch.nn.Linear(8, 16), grid["tp"], ColwiseParallel(output_layouts=Replicate()))
    batches = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(layer, (torch.ones(4, 6, 8),), dynamic_shapes=batches, strict=strict).module()
    assert torch.equal(program(torch.ones(3, 6, 8)), layer(torch.ones(3, 6, 8)))


def test_hooks_where_torch_has_none_of_the_private_names():
    from torchshard import _torch

    class Module:
        def register_forward_hook(self, hook, always_call):
            self.hooked = hook, always_call
            return torch.utils.hooks.RemovableHandle(OrderedDict())

    module = Module()
    _torch.after_every_forward(module, print)
    assert module.hooked == (print, True)
    with _torch.without_fast_paths():
        assert _torch.skip_alone(grid) is grid
        assert _torch.skip_methods()(Module) is Module
