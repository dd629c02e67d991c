"""DTensors in regions compiled as one graph: what is done with them there, against eager.

On a fake group, so layouts and local shapes are compared here; values are compared in test_compile.py.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torchshard
from tests.older import known, require
from tests.plain_graphs import collectives, recording
from tests.ranks import fake_ranks
from torchshard import DTensor, Partial, Replicate, Shard, ShardedTensor, distribute_tensor, init_device_mesh
from torchshard.compiler import support_groups
from torchshard.compiler.advice import way_around
from torchshard.tensor.sharded import factories, specs


@pytest.fixture(scope="module", autouse=True)
def line():
    global MESH, ROWS, UNEVEN, WHOLE, PIECE
    with fake_ranks(4):
        support_groups()
        MESH = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        ROWS = distribute_tensor(torch.randn(8, 4), MESH, [Shard(0)], src_data_rank=None)
        UNEVEN = distribute_tensor(torch.randn(7, 4), MESH, [Shard(0)], src_data_rank=None)
        WHOLE = distribute_tensor(torch.randn(8, 4), MESH, [Replicate()], src_data_rank=None)
        PIECE = torch.randn(2, 4)
        yield


def described(x):
    if isinstance(x, DTensor):
        return str(torchshard.layout_of(x)), tuple(x.to_local().shape)
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.dtype
    return type(x)(map(described, x)) if isinstance(x, (tuple, list)) else x


def one_graph(function, *args, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)(*args)


from_local = DTensor.from_local
PROGRAMS = {
    "from_local": lambda: (lambda x: from_local(x, MESH, [Shard(0)]) * 2, PIECE),
    "from_local, mesh and placements given": lambda: (lambda x, m, p: from_local(x, m, p), PIECE, MESH, [Shard(0)]),
    "from_local of a shape": lambda: (
        lambda x: from_local(x, MESH, [Shard(0)], shape=(7, 4), stride=(4, 1)).full_tensor(), PIECE),
    "from_local, checked": lambda: (lambda x: from_local(x, MESH, [Replicate()], run_check=True) + 1, PIECE),
    "from_local of a shape, checked": lambda: (
        lambda x: from_local(x, MESH, [Shard(0)], run_check=True, shape=(8, 4), stride=(4, 1)), PIECE),
    "from_local, grad_placements": lambda: (
        lambda x: from_local(x, MESH, [Replicate()], grad_placements=[Replicate()]) * 2, PIECE),
    "from_local of terms": lambda: (lambda x: from_local(x, MESH, [Partial()]).full_tensor(), PIECE),
    "to_local": lambda: (lambda x: (x * 2).to_local() + 1, ROWS),
    "to_local, grad_placements": lambda: (lambda x: x.to_local(grad_placements=[Partial()]) + 1, WHOLE),
    "full_tensor": lambda: (lambda x: x.full_tensor(grad_placements=[Replicate()]) + 1, UNEVEN),
    "redistribute": lambda: (lambda x: x.redistribute(placements=[Shard(1)]) + 1, UNEVEN),
    "redistribute, async, dtypes": lambda: (
        lambda x: x.redistribute(MESH, [Replicate()], async_op=True, forward_dtype=torch.bfloat16) + 1, ROWS),
    "distribute_tensor": lambda: (lambda x: distribute_tensor(x, MESH, [Shard(0)]) + 1, torch.ones(7, 4)),
    "distribute_tensor, own values": lambda: (
        lambda x: distribute_tensor(x, MESH, [Partial()], src_data_rank=None).full_tensor(), torch.ones(7, 4)),
    "attributes": lambda: (
        lambda x: ((x + 1).sum(0).placements, x.device_mesh, x.shape, x.stride(), x.dtype, isinstance(x, DTensor)), ROWS),
    "rebuilt": lambda: (lambda x: from_local(x.to_local(), x.device_mesh, x.placements) + x, ROWS),
    "zeros, ones, full, empty": lambda: (
        lambda x: [f(8, 4, device_mesh=MESH, placements=[Shard(0)]) + x
                   for f in (torchshard.zeros, torchshard.ones, torchshard.empty, lambda *n, **o: torchshard.full(n, 3, **o))],
        ROWS),
    "rand, randn, linspace": lambda: (
        lambda x: [torchshard.rand(x.shape, device_mesh=x.device_mesh, placements=x.placements), x,
                   torchshard.randn(8, 4, device_mesh=MESH, placements=[Shard(1)]) + x,
                   torchshard.linspace(0, 1, 7, device_mesh=MESH, placements=[Shard(0)])], ROWS),
    "dropout, bernoulli, normal_, rand_like": lambda: (
        lambda x: [torch.dropout(x, 0.5, True), torch.bernoulli(torch.sigmoid(x)), (x + 1).normal_(), torch.rand_like(x)],
        UNEVEN),
    "nested": lambda: (lambda x: [x[0] @ x[1].t(), (x[1], 3)], [ROWS, WHOLE]),
    "in place": lambda: (lambda x: (x * 2).mul_(3), ROWS),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_in_one_graph(name):
    if any(word in name for word in ("from_local", "full_tensor", "distribute_tensor", "rebuilt", "zeros", "rand")):
        require("meshes in graphs")
    function, *args = PROGRAMS[name]()
    assert described(one_graph(function, *args)) == described(function(*args))


OF_ALL_LENGTHS = {
    "pointwise": lambda x: torch.relu(x * 2 + 1),
    "made whole": lambda x: x.redistribute(placements=[Replicate()]).sin(),
    "to columns and back": lambda x: x.redistribute(placements=[Shard(1)]).sin().redistribute(placements=[Shard(0)]),
    "product": lambda x: x @ x.t(),
    "product by letters": lambda x: torch.einsum("ij,kj->ik", x, x),
    "sum": lambda x: (x.sum(0) + 1).full_tensor(),
    "softmax": lambda x: torch.softmax(x, 0),
    "columns, all rows of each": lambda x: torch.outer(x[:, 0], x[:, 1]),
    "views": lambda x: x.view(-1, 2, 2).flatten(1).view(-1).sin(),
    "from_local": lambda x: from_local(x.to_local() * 1, MESH, x.placements).redistribute(placements=[Replicate()]),
}


def lengths_compared(function, compiled, placement, lengths):
    for length in lengths:
        x = distribute_tensor(torch.randn(length, 4), MESH, [placement]).requires_grad_()
        result = compiled(x)
        assert described(result) == described(function(x))
        result.sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize(
    ("name", "placement", "n"),
    [(name, Shard(0), 8) for name in OF_ALL_LENGTHS]
    + [("pointwise", Shard(0), 7), ("to columns and back", Shard(0), 7), ("made whole", Shard(0), 7)]
    + [("pointwise", Replicate(), 7), ("product", Replicate(), 8)],
)
def test_one_graph_for_all_lengths(name, placement, n):
    from torch._dynamo.testing import CompileCounterWithBackend

    if name == "from_local":
        require("meshes in graphs")
    torch._dynamo.reset()
    counting = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(OF_ALL_LENGTHS[name], backend=counting, fullgraph=True, dynamic=True)
    lengths_compared(OF_ALL_LENGTHS[name], compiled, placement, (n, n + 4, n + 8))
    assert counting.frame_count <= (1 if n == 8 else 2)  # parts that come to be even, or cease to, look different


@pytest.mark.parametrize("write", [False, True])
def test_slices_of_all_send_nothing(write):
    """Whether `x[:, None]` is recorded as a slice depends on what is known of the length, which ranks may differ in."""

    def function(x, y):
        x = x * y
        if write:
            x[:, 1] = y[:, 0]
        return x[:, None] * y[:, None]

    torch._dynamo.reset()
    graphs, y = [], ROWS.detach()
    compiled = torch.compile(function, backend=recording(graphs), fullgraph=True, dynamic=True)
    result = compiled(ROWS.detach().requires_grad_(), y)
    assert described(result) == described(function(ROWS, y))
    result.sum().backward()
    assert [collectives(graph) for graph in graphs] == [[], []]


@pytest.mark.parametrize("shape", [(7, 4), (7, 4, 3, 3)])
def test_batch_norm_of_any_length(shape):
    """The gradient asks for no number of channels, which the forward pass has told as a symbol."""
    torch._dynamo.reset()
    graphs, x = [], distribute_tensor(torch.randn(shape), MESH, [Shard(0)])

    def function(x):
        return torch.nn.functional.batch_norm(x, None, None, training=True)

    compiled = torch.compile(function, backend=recording(graphs), fullgraph=True, dynamic=True)
    result = compiled(x.detach().requires_grad_())
    assert described(result) == described(function(x))
    result.sum().backward()
    assert [collectives(graph) for graph in graphs] == [["all_gather_into_tensor"], ["all_reduce"]]


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp"])
def test_the_first_rank_takes_part_in_what_runs_along_a_dim(name):
    """It needs nothing of the others, who would wait for it if its graph left the collective out.

    Collectives that nothing reads go where a graph is parted into forward and backward, so the tensor has a gradient.
    """
    torch._dynamo.reset()
    graphs, x = [], UNEVEN.detach().requires_grad_()
    compiled = torch.compile(lambda x: getattr(x, name)(0), backend=recording(graphs), fullgraph=True)
    assert described(compiled(x)) == described(getattr(x, name)(0))
    assert collectives(graphs[0])[0] == "all_gather_into_tensor"


def test_dims_flattened_before_a_split_one_have_a_graph_for_each_length():
    """How many runs there are is a number. A batch of split sequences stays where it lies, as in eager mode."""
    torch._dynamo.reset()
    counting = CompileCounterWithBackend("aot_eager")
    rows = torch.compile(lambda x: x.flatten(0, 1) * 2, backend=counting, fullgraph=True)
    for batch, time in ((3, 8), (6, 8), (5, 12), (5, 16)):
        x = distribute_tensor(torch.randn(batch, time, 2), MESH, [Shard(1)])
        result = rows(x)
        assert described(result) == described(x.flatten(0, 1) * 2)
        assert str(result._spec.sharding) == f"(tp=4:S(0/{batch}))"
    assert counting.frame_count == 3
    module = Around(lambda x: (from_local(x, MESH, [Shard(1)]).flatten(0, 1) * 2).full_tensor())
    exported = torch.export.export(module, (torch.ones(3, 2, 2),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert exported.module()(torch.ones(5, 2, 2)).shape == (40, 2)


def test_rows_of_an_uneven_batch_are_in_one_graph_for_all_lengths():
    """A product flattens them. To split them along time would tie the graph to the number of sequences."""
    torch._dynamo.reset()
    counting = CompileCounterWithBackend("aot_eager")
    product = torch.compile(torch.matmul, backend=counting, fullgraph=True)
    for batch, time in ((11, 5), (15, 6), (19, 8)):
        x = distribute_tensor(torch.randn(batch, time, 6), MESH, [Shard(0)]).requires_grad_()
        for dim in (0, 1):
            torch._dynamo.maybe_mark_dynamic(x, dim)
        result = product(x, distribute_tensor(torch.ones(6, 4), MESH, [Replicate()]))
        assert result.shape == (batch, time, 4)
        result.sum().backward()
        assert x.grad.shape == x.shape
    assert counting.frame_count == 1


@pytest.mark.parametrize(
    ("placement", "view"),
    [(Shard(0), lambda x: x.flatten(0, 1)), (Shard(1), lambda x: x.flatten(1, 2)), (Shard(1), lambda x: x[0].t())],
)
def test_views_of_any_length_come_in(placement, view):
    compiled = torch.compile(lambda x: x * 2, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    for length in (4, 8, 12):
        shape = (length, 6, 2) if placement.dim == 0 else (6, length, 2)
        x = view(distribute_tensor(torch.randn(shape), MESH, [placement]))
        assert described(compiled(x)) == described(x * 2)


def test_parts_of_tensors_of_known_sizes_have_known_sizes():
    """Dynamo takes the sizes of a part that has changed for any numbers; that of the tensor has not."""
    torch._dynamo.reset()
    whole, graphs = torch.randn(8, 12), []
    compiled = torch.compile(lambda x: x.to_local().exp(), backend=recording(graphs), fullgraph=True)
    for placement in (Replicate(), Shard(0), Shard(1)):
        x = distribute_tensor(whole, MESH, [placement])
        assert torch.equal(compiled(x), x.to_local().exp())
    inputs = [node.meta["val"] for graph in graphs for node in graph.find_nodes(op="placeholder")]
    assert [list(x.shape) for x in inputs] == [[8, 12], [2, 12], [8, 3]]
    assert all(type(n) is int for x in inputs for n in x.shape)


def test_another_length_for_which_another_way_is_cheaper_has_a_graph_of_its_own():
    torch._dynamo.reset()
    weight = distribute_tensor(torch.randn(4, 64), MESH, [Shard(1)])
    counting = CompileCounterWithBackend("aot_eager")

    def product(x):  # few rows are made whole, beside many the weight is
        return x @ weight

    compiled = torch.compile(product, backend=counting, fullgraph=True, dynamic=True)
    lengths_compared(product, compiled, Shard(0), (800, 16, 8, 1200, 12))
    assert counting.frame_count == 2
    module = Around(lambda x: (from_local(x, MESH, [Shard(0)]) @ module.weight).full_tensor())
    module.weight = torch.nn.Parameter(weight)
    rows = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(module, (torch.randn(200, 4),), dynamic_shapes=rows)
    assert exported.module()(torch.randn(2, 4)).shape == (8, 64)


def test_traces_of_this_torch_need_mending(monkeypatch):
    """If this fails, torch needs `mend_trace` for its tracer no longer: leave that out from this version on."""
    monkeypatch.setattr("torchshard.tensor.layout.mend_trace", lambda n: None)
    torch._dynamo.reset()
    function = OF_ALL_LENGTHS["product by letters"]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    with pytest.raises(Exception, match="maximum recursion depth"):
        lengths_compared(function, compiled, Replicate(), (8,))


def test_strides_of_results_are_mended_where_torch_needs_it():
    from torch._functorch._aot_autograd.schemas import SubclassCreationMeta

    from torchshard._torch import mend_strides_of_results

    of_torch = SubclassCreationMeta.compute_outer_size_and_stride
    if mend_strides_of_results():
        assert not known("strides of results")
    else:
        assert SubclassCreationMeta.compute_outer_size_and_stride is of_torch
    assert not mend_strides_of_results()


def test_graphs_of_all_lengths_and_the_cache_of_inductor():
    def function(x):
        return x.full_tensor()

    for _ in range(2):  # the second time, the cache has graphs whose guards name a size of the local tensor
        torch._dynamo.reset()
        lengths_compared(function, torch.compile(function, fullgraph=True, dynamic=True), Shard(0), (8, 12))


def test_guards_of_cached_graphs_that_name_other_inputs_fail():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from torchshard._torch import mend_trace

    class Length:
        node = type("Node", (), {"shape_env": ShapeEnv()})

    for _ in range(2):
        mend_trace(Length())
    evaluate = Length.node.shape_env.evaluate_guards_expression
    assert evaluate("L['t0'] == 3", [3])
    assert not evaluate("L['t0'] == 3", [4])
    assert not evaluate("L['t0'] == L['x']._local_tensor.size()[0]", [3])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: distribute_tensor(x, MESH, [Shard(0)]), "cannot make a leaf"),
        (lambda x: from_local(x, MESH, [Shard(0)], run_check=True), "cannot ask the other ranks"),
        (
            lambda x: from_local(x, MESH).redistribute(OTHER, [Shard(0), Replicate()]),
            "between two meshes cannot be compiled",
        ),
    ],
)
def test_what_a_region_cannot_do_is_said(function, words):
    require("meshes in graphs")
    global OTHER
    OTHER = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(Exception, match=words):
        one_graph(function, torch.ones(8, 4, requires_grad=True))


@pytest.mark.parametrize("view", [lambda x: x.view(-1), lambda x: x.t(), lambda x: x.detach(), lambda x: x[:, 0]])
def test_inputs_in_the_same_memory_of_which_one_is_written_are_refused(view):
    """As torch does for its own: the other would keep its old values. Where none is written, nothing is wrong."""
    x = ROWS.detach().clone()
    expected = described(view(x) * 2)
    assert described(one_graph(lambda x, y: (x + 1, y * 2), x, view(x))[1]) == expected
    with pytest.raises(Exception, match=r"Encountered aliased inputs that are mutated|set the storage"):
        one_graph(lambda x, y: (x.add_(1), y * 2)[1], x, view(x))


def test_the_gradient_of_a_checked_local_tensor():
    require("meshes in graphs")
    for compile in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        torch._dynamo.reset()
        local = torch.ones(2, requires_grad=True)
        function = compile(lambda x: (from_local(x, MESH, [Replicate()], run_check=True) * 2).to_local() + x)
        function(local).sum().backward()
        assert local.grad.tolist() == [3, 3]


def test_complex_parts_of_a_distributed_tensor():
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        x = distribute_tensor(torch.randn(8, 4, dtype=torch.complex64), MESH, placements)
        assert described(one_graph(lambda x: x * 2, x)) == described(x * 2)


def test_views_keep_the_strides_that_they_have_in_eager():
    for x in (ROWS, WHOLE):
        assert one_graph(lambda x: (x * 2)[:, :2], x).stride() == (x * 2)[:, :2].stride() == (4, 1)


def test_truth_values_that_travel_are_compiled_by_inductor():
    torch._dynamo.reset()
    function = torch.compile(lambda x: torch.dropout(x, 0.5, True) + (x > 0).redistribute(placements=[Replicate()]) * x)
    result = function(ROWS)
    assert result.shape == ROWS.shape


def test_a_module_with_dtensor_parameters_is_exported():
    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(distribute_tensor(torch.randn(4, 8), MESH, [Shard(1)]))

        def forward(self, x):
            return distribute_tensor(x, MESH, [Replicate()]) @ self.weight

    module = Wide()
    for x in (WHOLE, PIECE):
        exported = torch.export.export(module, (x,))
        assert described(exported.module()(x)) == described(module(x))


class Around(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_rows_of_an_example_that_is_a_dtensor(placement, strict):
    if strict:
        require("meshes in graphs")
    example, other = [distribute_tensor(torch.ones(n, 4), MESH, [placement]) for n in (8, 12)]
    dim = torch.export.Dim
    for varying in (dim.DYNAMIC, dim.AUTO, dim.DYNAMIC(min=2, max=64)):
        program = torch.export.export(Around(lambda x: -x), (example,), dynamic_shapes=({0: varying},), strict=strict)
        assert described(program.module()(other)) == described(-other)
    fresh = distribute_tensor(torch.ones(8, 4), MESH, [placement])  # torch leaves its marks on examples
    with pytest.raises(Exception, match="varies dim 0 of a DTensor, and not that of its part") as caught:
        torch.export.export(Around(lambda x: -x), (fresh,), dynamic_shapes=({0: dim("rows")},), strict=strict)
    assert "dynamic_shapes={0: torch.export.Dim.DYNAMIC}" in str(caught.value)


@pytest.mark.parametrize("strict", [False, True])
def test_rows_of_an_example_beside_a_split_parameter(strict):
    """For which the rows are gathered: that ties those of the whole to those of the part."""
    if strict:
        require("meshes in graphs")
    module = Around(lambda x: (x @ module.weight).relu() @ module.weight.mT)
    module.weight = torch.nn.Parameter(distribute_tensor(torch.randn(4, 64), MESH, [Shard(1)]))
    for varying in (torch.export.Dim.DYNAMIC, torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC(min=8, max=64)):
        example, other, few = [distribute_tensor(torch.ones(n, 4), MESH, [Shard(0)]) for n in (8, 12, 4)]
        program = torch.export.export(module, (example,), dynamic_shapes=({0: varying},), strict=strict).module()
        assert described(program(other)) == described(module(other))
    with pytest.raises(AssertionError, match=">= 8"):
        program(few)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (from_local(x, MESH, [Shard(0)]) * 2).redistribute(placements=[Shard(1)]).sin().to_local(),
        lambda x: (distribute_tensor(x, MESH, [Shard(0)]) + 1).sum().full_tensor(),
        lambda x: torchshard.ones(8, 4, device_mesh=MESH, placements=[Shard(0)]).to_local() * x,
    ],
)
def test_dtensors_made_in_a_module_are_exported(function, strict):
    if strict:
        require("meshes in graphs")
    exported = torch.export.export(Around(function), (PIECE,), strict=strict)
    for program in (exported, exported.run_decompositions()):
        assert described(program.module()(PIECE)) == described(function(PIECE))


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_batch_norm_in_training_that_is_exported_runs_where_gradients_are_asked_for(placement):
    """Its kernel takes no statistics with a history, as those are that a graph of plain tensors computes."""

    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.before = torch.nn.Linear(4, 4)
            self.norm = torchshard.distribute_module(
                torch.nn.BatchNorm1d(4 * MESH.size() if placement == Shard(1) else 4), MESH
            )

        def forward(self, x):
            return self.norm(from_local(self.before(x), MESH, [placement])).to_local()

    module = Normed()
    exported = torch.export.export(module, (PIECE,))
    for program in (exported, exported.run_decompositions()):
        assert program.module()(PIECE).shape == module(PIECE).shape


@pytest.mark.parametrize("view", [lambda x: x[:1], lambda x: x.t(), lambda x: x[:]], ids=["rows", "turned", "whole"])
def test_an_example_that_is_a_view_is_exported(view):
    piece = view(PIECE)

    def function(x):
        return (from_local(x, MESH, [Shard(0)]) * 2).full_tensor() + distribute_tensor(x.relu(), MESH).to_local().sum()

    exported = torch.export.export(Around(function), (piece,))
    assert described(exported.module()(piece)) == described(function(piece))


@pytest.mark.parametrize(("rows", "alike", "other"), [(7, 10, 8), (8, 12, 7)])
def test_a_dynamic_dim_that_an_exported_program_cuts(rows, alike, other):
    module = Around(lambda x: distribute_tensor(x, MESH, [Shard(0)]).full_tensor() * 2)
    exported = torch.export.export(module, (torch.ones(rows, 4),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert exported.module()(torch.ones(alike, 4)).shape == (alike, 4)
    with pytest.raises(AssertionError, match="Guard failed"):
        exported.module()(torch.ones(other, 4))


def test_exported_programs_are_compiled_after_run_decompositions():
    program = torch.export.export(Around(lambda x: from_local(x, MESH).to_local() + 1), (PIECE,))
    with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
        one_graph(program.module(), PIECE)
    assert "program.run_decompositions()" in way_around(str(refused.value))
    assert torch.equal(one_graph(program.run_decompositions().module(), PIECE), PIECE + 1)


def test_an_exported_function_is_traced_through_where_torch_has_no_way_to_record_it(monkeypatch):
    monkeypatch.delattr(torch._export.wrappers, "_emit_flat_apply_call")
    exported = torch.export.export(Around(lambda x: from_local(x, MESH).to_local() + 1), (PIECE,))
    assert torch.equal(exported.module()(PIECE), PIECE + 1)


def written_and_returned(x):
    view = (x * 1).reshape(4, 7)  # rows of which pieces are no whole ones: a view that had to be moved
    view.mul_(2)
    return view


def test_a_moved_view_that_was_written_to_is_returned_as_a_copy_only():
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"(?s)moved, after a write.*view.clone\(\)"):
        one_graph(written_and_returned, UNEVEN)
    copied = one_graph(lambda x: written_and_returned(x).clone(), UNEVEN)
    assert described(copied) == described(written_and_returned(UNEVEN).clone())


def test_the_same_of_a_view_of_what_lies_in_memory_by_columns():
    def written(x):
        view = (x * 1)[:, 1:]
        view.mul_(2)
        return view

    columns = UNEVEN.t()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"(?s)moved, after a write.*view.clone\(\)"):
        one_graph(written, columns)
    assert one_graph(lambda x: written(x).clone(), columns).shape == (4, 6)


def test_a_sharded_tensor_passes_through_and_its_part_has_a_gradient():
    x = sharded()
    part = x.local_tensor().requires_grad_()
    same, squares = one_graph(lambda x: (x, x.local_tensor().square()), x)
    assert same is x
    assert torch.equal(squares, part.square())
    assert squares.shape == (2, 4)
    squares.sum().backward()
    assert torch.equal(part.grad, 2 * part)
    for operator in (lambda x: x + 1, torch.relu, lambda x: x.mul_(2)):
        with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
            one_graph(operator, x)
        assert "x.local_tensor()" in way_around(str(refused.value))


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (lambda x: x @ x, "make it a DTensor"),
        (lambda x: x.sum(), "make it a DTensor"),
        (lambda x: torch.rand_like(x), "make it a DTensor"),
        (lambda x: x.gather(), "outside of the region"),
        (lambda x: ShardedTensor.from_local(x.local_tensor(), 0), "call from_local() outside of the region"),
        (lambda x: (x * 2).sharding_spec().dim, "ask a ShardedTensor that came into the region"),
    ],
)
def test_what_regions_refuse_of_sharded_tensors(function, advice):
    with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
        one_graph(function, sharded())
    assert advice in way_around(str(refused.value))


def sharded(dim=0):
    return factories.rand(specs.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in range(4)]), 8, 4)


def test_a_graph_of_a_sharded_tensor_is_for_one_cut():
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda x: x.local_tensor() * 2, fullgraph=True, backend=graphs)
    x, other, with_gradient = sharded(), sharded(1), sharded()
    with_gradient.local_tensor().requires_grad_()
    for graph, tensors in enumerate([(x, sharded()), (other,), (with_gradient,)], 1):
        for y in tensors:
            assert torch.equal(function(y), y.local_tensor() * 2)
        assert graphs.frame_count == graph
    x.data = other
    assert torch.equal(function(x), other.local_tensor() * 2)
    assert graphs.frame_count == 3


def test_what_describes_a_sharded_tensor_is_known_in_regions():
    def asked(x):
        x.add_(1)
        (part,) = x.local_shards()
        return part.tensor * 2, part.metadata.shard_offsets, x.metadata().size, x.sharding_spec().dim, x.shape

    x, y = [sharded().clone() for _ in range(2)]
    y.local_tensor().copy_(x.local_tensor())
    (got, *rest), (wanted, *others) = one_graph(asked, x), asked(y)
    assert torch.equal(got, wanted)
    assert rest == others
    assert torch.equal(x.local_tensor(), y.local_tensor())


def test_a_gradient_that_is_cut_in_another_way():
    x = sharded().requires_grad_()
    result = one_graph(lambda x: x * x, x)
    with pytest.raises(ValueError, match=r"(?s)cut in another way.*gradient.reshard\(x.sharding_spec\(\)\)"):
        torch.autograd.backward(result, sharded(1))


def test_a_gradient_whose_parts_lie_otherwise_in_memory():
    x = sharded().requires_grad_()
    result = one_graph(lambda x: x * 2, x)
    gradient = torch.ones_like(result.detach())
    gradient.local_shards()[0].tensor = torch.ones(4, 2).t()
    result.backward(gradient)
    assert torch.equal(x.grad.local_tensor(), torch.full((2, 4), 2.0))
