"""Results of regions: what they say of mesh and placements in and outside of it, inputs that were written to; refusals."""

import copy
import io
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as mapped
from torch.utils.checkpoint import checkpoint

from tests.compiler.regions import same
from tests.older import require
from tests.ranks import fake_ranks, run_ranks
from torchshard import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    ShardedTensor,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
    layout_of,
)
from torchshard._torch import count_written_parts, expect_gradients_of_written
from torchshard.compiler import support_groups
from torchshard.compiler.advice import way_around
from torchshard.errors import UnsupportedOperatorError
from torchshard.parallel import ColwiseParallel, RowwiseParallel, local_parameters, parallelize_module
from torchshard.state_dict import KeyRules, rename, to_full, to_sharded_tensor


@pytest.fixture(scope="module", autouse=True)
def line():
    global MESH, ROWS
    with fake_ranks(4):
        support_groups()
        MESH = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        ROWS = distribute_tensor(torch.randn(8, 4), MESH, [Shard(0)], src_data_rank=None)  # fake ranks send nothing
        yield


def stored(x):
    kept = {}
    kept["mesh"] = (x * 1).device_mesh
    return [kept["mesh"]]


def across_a_break(x):
    placements, mesh = x.sum(0).placements, x.sum(0).device_mesh
    torch._dynamo.graph_break()
    return placements, mesh


PROGRAMS = {
    "returned": lambda x: (x.sum(0).placements, (x * 1).device_mesh, (x * 1).device_mesh.get_group()),
    "stored": stored,
    "compared": lambda x: (
        x.sum(0).placements == (Partial(),), isinstance(x.sum(0).placements[0], Partial), (x * 1).device_mesh is MESH,
        (x * 1).device_mesh is x.device_mesh, {Shard(0): 1}[(x * 1).placements[0]]),
    "used": lambda x: ((x * 1).redistribute((x * 2).device_mesh, x.sum(0).placements).placements,
                       x.sum(0).redistribute(x.sum(0).device_mesh, [Replicate()]).placements),
    "across a break": across_a_break,
}  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_mesh_and_placements_are_what_they_are(name, backend):
    require("meshes in graphs")
    torch._dynamo.reset()
    function = PROGRAMS[name]
    compiled = torch.compile(function, backend=backend, fullgraph=function is not across_a_break)
    got, wanted = compiled(ROWS), function(ROWS)
    assert same(got, wanted)
    if name == "returned":
        (placement,), mesh, _ = got
        assert DTensor.from_local(torch.ones(4), mesh, [placement]).placements == (Partial(),)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("write", [lambda x, y: x.copy_(y), lambda x, y: x.add_(y * y)])
def test_what_comes_back_for_an_input_that_was_written_to(write, told, monkeypatch):
    """Its gradient from behind the region; a torch that cannot be told to expect one takes one for a copy only."""
    from torch._functorch import aot_autograd

    assert expect_gradients_of_written()
    collect = aot_autograd.run_functionalized_fw_and_collect_metadata
    if not told:
        monkeypatch.setattr(aot_autograd, collect.__name__, collect.__wrapped__)
    grads = []
    for function in (write, lambda x, y: write(x, y).clone()):
        for compiled in (False, True):
            torch._dynamo.reset()
            x, y = ROWS.detach().clone(), ROWS.detach().clone().requires_grad_()
            result = torch.compile(function, backend="aot_eager", fullgraph=True)(x, y) if compiled else function(x, y)
            if compiled and result is x and not told:
                with pytest.raises(UnsupportedOperatorError, match=r"x.copy_\(y\).clone\(\)"):
                    result.sum().backward()
            else:
                result.sum().backward()
                assert not compiled or y.grad.placements == (Shard(0),)
                grads.append(y.grad.redistribute(placements=[Shard(0)]).to_local())
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_through_an_input_that_was_written_to(backend):
    """Parts that a graph returns for it are no tensors that its backward needs, whose strides and lifetimes count."""
    assert count_written_parts()

    def writes(x, y):
        x.relu_()
        return (x * y).sum(1)

    found = []
    for function in (writes, torch.compile(writes, backend=backend, fullgraph=True)):
        y = ROWS.detach().clone().requires_grad_()
        x = y * 2
        with torch._inductor.config.patch(force_disable_caches=True):  # what is kept was compiled by graphs that count
            result = function(x, y)
            (result.sum() + (x * x).sum()).to_local().backward()
        found.append([t.detach().to_local() for t in (result, x, y.grad)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


def stepped(foreach):
    def step(w):
        w.grad = w.detach().clone()
        torch.optim.SGD([w], lr=0.1, foreach=foreach).step()

    return step


@torch.no_grad()
def by_view(w):
    w.t()[1:].mul_(2)


@pytest.mark.parametrize(
    "write",
    [
        stepped(False),
        stepped(True),
        by_view,
        torch.no_grad()(lambda w: w.normal_()),
        torch.no_grad()(lambda w: w.__setitem__((slice(1, 5), 0), 3.0)),  # handled
        torch.no_grad()(lambda w: torch.nn.init.eye_(w)),
        torch.no_grad()(lambda w: torch._foreach_mul_([w[:1], w], 2.0)),
    ],
)
def test_a_write_between_a_compiled_forward_and_its_backward_is_noticed(write):
    """Also where the operator has a plan from before anything was compiled."""
    write(ROWS.detach().clone().requires_grad_())
    w = ROWS.detach().clone().requires_grad_()
    result = torch.compile(lambda x: (x * w).sin(), backend="aot_eager", fullgraph=True)(ROWS)
    write(w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_a_region_that_keeps_what_it_writes_to_does_as_one_of_plain_tensors():
    """That raises; or, as of 2.15, keeps a copy."""

    def gradient(rows):
        y = rows.detach().clone().requires_grad_()
        x = y * 2
        torch.compile(lambda x, y: x.mul_(y), backend="aot_eager", fullgraph=True)(x, y)
        try:
            x.sum().backward()
        except RuntimeError as error:
            return re.search("modified by an inplace operation", str(error))[0]
        return y.grad

    wanted, got = gradient(ROWS.to_local()), gradient(ROWS)
    if isinstance(wanted, str):
        assert got == wanted
    else:
        torch.testing.assert_close(got.to_local(), wanted)


def writes_to_terms(rank, world):
    """A region writes to an input that holds terms of each kind, beside eager torch: the input and the result."""
    mesh, told = init_device_mesh("cpu", (world,)), []
    whole = torch.tensor([[1.0, -2, 3], [-4, float("nan"), 6], [7, -8, 9]])
    writes = [lambda x: x.relu_(), lambda x: x.mul_(2), lambda x: x[1:].zero_(), lambda x: x.copy_(x.flip(0))]
    for kind in ("sum", "avg", "max", "min"):
        for write in writes:
            torch._dynamo.reset()
            plain, x = (
                whole.clone(),
                distribute_tensor(whole, mesh, [Replicate()]).redistribute(placements=[Partial(kind)]),
            )
            write(plain)
            y = torch.compile(lambda x, write=write: (write(x), x.sin())[1], backend="aot_eager", fullgraph=True)(x)
            torch.testing.assert_close(x.full_tensor(), plain, equal_nan=True)
            torch.testing.assert_close(y.full_tensor(), plain.sin(), equal_nan=True)
            told.append(x.placements == (Partial(kind),))
    return told


def test_inputs_that_hold_terms_and_are_written_to():
    require("meshes in graphs")
    assert run_ranks(2, writes_to_terms) == [[True] * 16] * 2


def scaled_by_its_values(rank, world):
    """Numbers that `item()` gives in a region, which does not know whether they are finite: values and gradients."""
    mesh = init_device_mesh("cpu", (world,))
    whole, w = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.ones(3, 2)
    programs = [
        lambda x, w: x * x.sum().item(),
        lambda x, w: x @ w / float(w.max()),
        lambda x, w: (x + 1).mul(w.sum().item()),
    ]
    for placement in (Partial(), Partial("avg"), Shard(0), Replicate()):
        for program in programs:
            torch._dynamo.reset()
            plain = whole.clone().requires_grad_()
            x = (
                distribute_tensor(whole, mesh, [Replicate()])
                .redistribute(placements=[placement])
                .detach()
                .requires_grad_()
            )
            wanted = program(plain, w)
            with torch._dynamo.config.patch(capture_scalar_outputs=True):
                got = torch.compile(program, backend="aot_eager", fullgraph=True)(
                    x, distribute_tensor(w, mesh, [Replicate()])
                )
            torch.testing.assert_close(got.full_tensor(), wanted)
            got.sum().backward()
            wanted.sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def test_numbers_that_follow_from_values():
    require("meshes in graphs")
    run_ranks(2, scaled_by_its_values)


class GivesPlain(torch.autograd.Function):
    """Its gradient is a plain tensor in the shape of the whole."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.gradient = torch.full(x.shape, value)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.gradient, None


@pytest.mark.parametrize("how", ["eager", "compiled autograd", "plain zeros", "plain ones"])
def test_results_without_a_gradient(how):
    """Autograd makes plain zeros in the shape of the whole for them, which AOTAutograd refuses of other subclasses."""
    torch._dynamo.reset()
    x = ROWS.detach().requires_grad_()
    loss, doubled, _ = torch.compile(
        lambda x: (x.square().sum(), x * 2, x.sum(0)), backend="aot_eager", fullgraph=True
    )(x)
    if how == "compiled autograd":
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()
    elif how == "plain ones":  # no zeros, which could stand for no gradient
        words = "Expected a DTensor tangent but got a plain Tensor|runtime type: <class 'torch.Tensor'>"  # newer, older torch
        with pytest.raises(RuntimeError, match=words):
            (loss + GivesPlain.apply(doubled, 1.0)).backward()
        return
    else:
        (loss + GivesPlain.apply(doubled, 0.0) if how == "plain zeros" else loss).backward()
    assert layout_of(x.grad) == layout_of(x)
    torch.testing.assert_close(x.grad.to_local(), 2 * x.detach().to_local())


@pytest.mark.parametrize(
    "draw", [lambda x: torch.normal(1.0, x.abs()), lambda x: torch.nn.functional.rrelu(x, training=True)]
)
def test_random_operators_without_a_handler_are_refused_after_eager_calls_too(draw):
    torch._dynamo.reset()
    assert draw(ROWS).shape == ROWS.shape
    with pytest.raises(Exception, match="as no compiled region can"):
        torch.compile(draw, backend="aot_eager", fullgraph=True)(ROWS)


@pytest.mark.parametrize("eager_first", [True, False])
def test_what_is_left_to_rules_in_traces_alone(eager_first):
    """Eager calls fetch their neighbours' rows, traces move images to a split batch: in either order."""
    torch._dynamo.reset()
    shape = 4, 1, 8, 5 + eager_first  # no plan of this is known yet
    images, kernel = (
        distribute_tensor(torch.ones(shape), MESH, [Shard(2)]),
        distribute_tensor(torch.ones(1, 1, 3, 3), MESH),
    )
    compiled = torch.compile(F.conv2d, backend="aot_eager", fullgraph=True)
    calls = [(F.conv2d, 2), (compiled, 0), (F.conv2d, 2)][0 if eager_first else 1 :]
    assert [call(images, kernel, padding=1).placements for call, _ in calls] == [(Shard(dim),) for _, dim in calls]


def test_distributing_what_is_distributed_already():
    require("meshes in graphs")
    torch._dynamo.reset()
    x = ROWS.detach().requires_grad_()
    result = torch.compile(lambda x: distribute_tensor(x, MESH, [Shard(0)]) * 2, backend="aot_eager", fullgraph=True)(x)
    result.sum().backward()
    assert x.grad.placements == (Shard(0),)


@pytest.mark.parametrize("rows", [8, 7])
def test_dtensors_of_torch_become_ours(rows):
    require("meshes in graphs")
    torch._dynamo.reset()
    x = distribute_tensor(torch.randn(rows, 4), MESH, [Shard(0)])
    given = x.to_torch().detach().requires_grad_()
    result = torch.compile(lambda x: DTensor.from_torch(x.sin()) * 3, backend="aot_eager", fullgraph=True)(given)
    assert isinstance(result, DTensor)
    assert result.placements == (Shard(0),)
    assert result.shape == (rows, 4)
    result.sum().backward()
    torch.testing.assert_close(given.grad.to_local(), 3 * x.to_local().cos())


def test_what_becomes_torchs_ends_a_graph():
    require("meshes in graphs")
    torch._dynamo.reset()
    x = ROWS.detach().requires_grad_()
    compiled = torch.compile(lambda x: x.sin().to_torch() * 3, backend="aot_eager")
    result = compiled(x)
    assert result.device_mesh is MESH
    result.sum().backward()
    torch.testing.assert_close(x.grad.to_local(), 3 * ROWS.to_local().cos())


def in_mesh(x):
    with MESH:
        return x * 2


RULES = KeyRules([rename("a", "b")])
BREAKS = {
    "isinstance(p, Shard)": lambda x: type(x.placements[0]) == Shard,  # noqa: E721
    "outside of the region whether": lambda x: hasattr(MESH, "absent"),
    "give the mesh": in_mesh,
    "of a DTensor take full_tensor() first": lambda x: x[x > 0] * 2,
    "x.full_tensor()[mask.full_tensor()] is traced": lambda x: x[:, : (x.to_local() > 0).sum().item()],
    "storage_offset()": lambda x: x.storage_offset(),
    "ask the tensor": lambda x: layout_of(x * 1).shape,
    "call to_torch() outside": lambda x: x.to_torch(),
    "copy outside of the region": copy.deepcopy,
    "convert outside of the region": lambda x: to_full({"x": x}),
    "full_tensor() and redistribute()": lambda x: RULES({"a": x}),
}


@pytest.mark.parametrize("advice", BREAKS)
def test_what_a_region_does_not_take_is_named_with_a_way_around(advice):
    """Or taken, as the absent member and the offset by torch 2.15."""
    require("meshes in graphs")
    torch._dynamo.reset()
    function = BREAKS[advice]
    try:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
            taken = torch.compile(function, backend="aot_eager", fullgraph=True)(ROWS)
        reason = ""
    except Exception as refused:
        taken, reason = None, str(refused)
    assert advice in way_around(reason) if reason else taken == function(ROWS)


def test_jvp_in_a_region():
    require("meshes in graphs")

    def function(x, w):
        return torch.func.jvp(lambda x: (x @ w) * 2, (x,), (x,))

    w = distribute_tensor(torch.randn(4, 8), MESH, [Shard(1)])
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="Forward AD makes zeros for operands without a tangent") as refused:
        compiled(ROWS, w)
    assert way_around(str(refused.value)).startswith("put torchshard.implicit_replication() around the calls")
    with implicit_replication():
        for got, wanted in zip(compiled(ROWS, w), function(ROWS, w), strict=True):
            assert layout_of(got) == layout_of(wanted)
            torch.testing.assert_close(got.to_local(), wanted.to_local())


@pytest.mark.parametrize(
    ("make", "local"), [(DTensor.detach, DTensor.to_local), (to_sharded_tensor, ShardedTensor.local_tensor)]
)
@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_results_beside_gradients_that_a_region_asks_for(make, local):
    """Those that still have a gradient are results, unless autograd.grad has freed what they need for it."""
    require("meshes in graphs")
    x, w = (distribute_tensor(torch.randn(8, 4), MESH, [Shard(0)]) for _ in range(2))
    x, w = make(x).requires_grad_(), make(w).requires_grad_()

    def apart(x, w):
        y = x * x
        (gradient,) = torch.autograd.grad(y, x, y.detach())
        return gradient * w

    def freed(x, w):
        y = x * w
        return y, *torch.autograd.grad(y, x, y.detach())

    torch._dynamo.reset()
    got, wanted = torch.compile(apart, backend="aot_eager", fullgraph=True)(x, w), apart(x, w)
    for one, other in [(got, wanted), *zip(*[torch.autograd.grad(y, w, y) for y in (got, wanted)], strict=True)]:
        assert type(one) is type(other)
        torch.testing.assert_close(local(one), local(other))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="consumed returned tensor's grad_fn"):
        torch.compile(freed, backend="aot_eager", fullgraph=True)(x, w)


def test_a_deep_copy_is_a_graph_break():
    torch._dynamo.reset()
    w = torch.nn.Parameter(ROWS.clone())
    w.told = ["what a user says of it"]
    copied, doubled = torch.compile(lambda w: (copy.deepcopy(w), w * 2), backend="aot_eager")(w)
    assert type(copied) is type(w)
    assert copied.requires_grad
    assert copied.is_leaf
    assert copied.told == w.told
    assert copied.told is not w.told
    assert layout_of(copied) == layout_of(doubled) == layout_of(w)
    torch.testing.assert_close(2 * copied.detach().to_local(), doubled.detach().to_local())


PREDICATE = torch.tensor(True)
HIGHER = {
    "cond": lambda x: torch.cond(PREDICATE, lambda a: a * 2, lambda a: a * 3, (x,)),
    "while_loop": lambda x: while_loop(lambda k, a: k < 3, lambda k, a: (k + 1, a * 2), (torch.tensor(0), x)),
    "map": lambda x: mapped(lambda a: a * 2, x),
    "scan": lambda x: scan(lambda a, b: (a + b, b * 1), x, torch.ones(2)),
}


@pytest.mark.parametrize("name", HIGHER)
def test_operators_of_functions_refuse_sharded_tensors_with_a_way_around(name):
    torch._dynamo.reset()
    with pytest.raises(Exception) as refused:  # noqa: PT011
        torch.compile(HIGHER[name], backend="aot_eager", fullgraph=True)(to_sharded_tensor(ROWS))
    advice = way_around(str(refused.value))
    assert "to_local()" in advice or "to_dtensor(" in advice


def test_a_checkpoint_around_a_module_whose_parameters_are_lent():
    """The way around is named, and gives eager's values."""
    require("attributes that go in a region")
    layer = torch.nn.Linear(4, 8)
    local_parameters(parallelize_module(layer, MESH, ColwiseParallel()))
    x = torch.randn(3, 4)
    results = []
    for setting in (None, False, True):
        torch._dynamo.reset()
        function = partial(checkpoint, layer, use_reentrant=False)
        if setting is None:
            results.append(function(x))
            continue
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
        with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=setting):
            if not setting:
                with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
                    function(x)
                assert "skip_fwd_side_effects" in way_around(str(refused.value))
            else:
                results.append(function(x))
    grads = [torch.autograd.grad(y.square().sum(), list(layer.parameters())) for y in results]
    torch.testing.assert_close(grads[1], grads[0])


class Checkpointed(torch.nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_a_checkpoint_in_a_module_whose_parameters_are_lent():
    """The module around lends them before it, so nothing changes in it: one graph, and eager's values."""
    require("attributes that go in a region")
    torch._dynamo.reset()
    module = Checkpointed(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    local_parameters(parallelize_module(module, MESH, {"0": ColwiseParallel(), "1": RowwiseParallel()}))
    x, compiled = torch.randn(3, 4), torch.compile(module, backend="aot_eager", fullgraph=True)
    results = [model(x) for model in (module, compiled, compiled)]
    grads = [torch.autograd.grad(y.square().sum(), list(module.parameters())) for y in results]
    for found in grads[1:]:
        torch.testing.assert_close(found, grads[0])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "move", [lambda x: x.flip(0), lambda x: torch.cat([x, x]), lambda x: x.redistribute(placements=[Shard(1)])]
)
def test_one_row_for_each_rank_is_a_fixed_length(move, grad):
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    compiled = torch.compile(move, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (8, 2, 6, 2):
        x = distribute_tensor(torch.randn(length, 4), mesh, [Shard(0)]).requires_grad_(grad)
        y = compiled(x)
        assert layout_of(y) == layout_of(move(x))
        if grad:
            y.sum().backward()
            assert x.grad.shape == x.shape


@pytest.mark.parametrize(("rows", "placement"), [(8, Shard(0)), (7, Shard(0)), (8, Shard(1)), (8, Replicate())])
def test_the_gradient_of_a_split_vocabulary_is_split_as_in_eager(rows, placement):
    torch._dynamo.reset()
    indices = distribute_tensor(torch.tensor([[1, 5], [2, 6]]), MESH, [Replicate()])

    def looked_up(table):
        return torch.nn.functional.embedding(indices, table).redistribute(placements=[Replicate()])

    layouts = []
    for function in (looked_up, torch.compile(looked_up, backend="aot_eager", fullgraph=True)):
        table = distribute_tensor(torch.randn(rows, 4), MESH, [placement]).requires_grad_()
        function(table).sum().backward()
        layouts.append(layout_of(table.grad))
    assert layouts[0] == layouts[1]


def met_first_in_a_region(rank, world):
    """Whether tensors on a mesh that nothing but a region has seen yet are on that mesh, in and out of the region."""
    mesh = init_device_mesh("cpu", (world,))
    y = torch.compile(lambda x: DTensor.from_local(x, mesh, [Shard(0)]) * 2, backend="aot_eager", fullgraph=True)(
        torch.ones(3, 4)
    )
    z = distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])
    torch.save(z, io.BytesIO())
    return [type(x.device_mesh).__name__ for x in (y, z)], z.device_mesh is mesh


def test_a_mesh_that_a_region_has_seen_first_is_no_stand_in_afterwards():
    require("meshes in graphs")
    assert run_ranks(2, met_first_in_a_region, timeout=200) == [(["DeviceMesh"] * 2, True)] * 2


@pytest.mark.parametrize("length", [5, 2])
def test_ranks_without_a_piece_of_a_dynamic_length(length):
    """Of 5 columns the last of 4 ranks has none, of 2 columns two have none."""
    torch._dynamo.reset()
    w = distribute_tensor(torch.randn(4, length), MESH, [Shard(1)])
    x = ROWS.detach().requires_grad_()
    compiled = torch.compile(lambda x, w: x @ w, backend="aot_eager", fullgraph=True, dynamic=True)
    y = compiled(x, w)
    assert layout_of(y) == layout_of(x @ w)
    y.sum().backward()
    assert x.grad.shape == x.shape
