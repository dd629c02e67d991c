"""torch.cond, while_loop, scan and map of DTensors: eager's values and gradients, the same collectives on every rank."""

import pytest
import torch
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from tests.every_rank import sent_by_ranks
from tests.older import known, require
from tests.ranks import fake_ranks, run_ranks
from torchshard import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh

WORLD = 3


def several(x, w):
    def true(x, w):
        return (x @ w).relu(), x.sum(0)

    def false(x, w):
        return (x @ w).sin() * 2, x.sum(0) * 3

    a, b = torch.cond(x.sum() > 0, true, false, (x, w))
    return a.sum() + b.square().sum()


def layouts(x, w):
    def false(x, w):
        return ((w.t() @ x.t()).t() * 2 + x.sum()).contiguous()

    return torch.cond(x.sum() > 0, lambda x, w: x @ w, false, (x, w)).sin()


def closure(x, w):
    y = w * 2

    def false(x):
        return (x @ y).sum(0, keepdim=True) + x @ y

    return torch.cond(x.mean() < 0, lambda x: (x @ y).cos(), false, (x,))


def nested(x, _):
    def inner(x):
        return torch.cond(x.max() > 1, lambda x: x * 2, lambda x: x.exp(), (x,))

    return torch.cond(x.sum() > 0, lambda x: inner(x) + 1, lambda x: inner(-x), (x,)).sum(1)


def terms(x, _):
    terms = x.sum(0)
    return torch.cond(x.sum() > 0, lambda x, t: x.sum(0) + t, lambda x, t: x.sum(0).sin(), (x, terms)) * 2


def unused(x, w):
    return torch.cond(x.sum() > 0, lambda x, w: x * 2, lambda x, w: x @ w @ w.t(), (x, w))


def counted(x, w):
    first = x.detach().sum() * 0
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.tanh(x @ w @ w.t()) * 0.5), (first, x))[1]


def until(x, _):
    with torch.no_grad():
        n, y = while_loop(lambda n, y: y.square().sum() < 1000, lambda n, y: (n + 1, y * 1.5), (x.sum() * 0, x))
    return y.sum() * x + n


def recurrent(x, w):
    steps = torch.stack([x, x * 2, x.sin()])
    h, ys = scan(lambda h, t: ((h @ w @ w.t() + t).tanh(), (h * t).sum(1)), x * 0.1, steps)
    return h.sum() + ys.square().sum()


def along_rows(x, _):
    h, ys = scan(lambda h, t: ((h + t).sin(), h * t), x.sum(0) * 0, x)
    return h.sum() + ys


def mapped(x, w):
    return map_(lambda t, w: (t @ w).sin(), torch.stack([x, x * 2]), w)


SPLITS = ([Shard(0)], [Replicate()]), ([Replicate()], [Shard(1)]), ([Shard(1)], [Shard(0)])


def given(rows, sign):
    torch.manual_seed(rows)
    return [torch.rand(rows, 4) * sign, torch.randn(4, 6) * 0.3]


def compare(rank, world, rows, backend, programs):
    mesh, errors = init_device_mesh("cpu", (world,)), {}
    for number, name in enumerate(programs):
        for sign in (1, -1) if name == "several" else (-1,):
            torch._dynamo.reset()
            program, split = globals()[name], SPLITS[(number + (sign > 0)) % len(SPLITS)]
            values = [x.requires_grad_() for x in given(rows, sign)]
            parts = [
                distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in zip(values, split, strict=True)
            ]
            want = program(*values)
            run = program if backend is None else torch.compile(program, backend=backend, fullgraph=True)
            got, gradient = run(*parts), torch.randn(want.shape)
            pairs = [(got, want)]
            wanted = torch.autograd.grad(want, values, gradient, allow_unused=True)
            made = distribute_tensor(gradient, mesh, [Replicate()])
            for x, y in zip(torch.autograd.grad(got, parts, made, allow_unused=True), wanted, strict=True):
                if x is None and y is None:
                    continue
                like = torch.zeros(x.shape) if y is None else y
                pairs.append((distribute_tensor(torch.zeros_like(like), mesh, [Replicate()]) if x is None else x, like))
            pairs = [(a.full_tensor(), b) for a, b in pairs]
            errors[name, sign] = max(((a - b).abs().max() / b.abs().max().clamp(1)).item() for a, b in pairs)
    return errors


@pytest.mark.filterwarnings("ignore:.*gathers its operands")
@pytest.mark.parametrize(
    ("rows", "backend", "programs"),
    [
        (3, None, [several, layouts, terms, counted, along_rows]),
        (1, "aot_eager", [nested, closure, unused, until, recurrent, mapped]),
        pytest.param(3, "inductor", [unused, nested, recurrent], marks=pytest.mark.full),
    ],
)
def test_values_and_gradients(rows, backend, programs):
    require("subclasses in nested regions")
    names = [program.__name__ for program in programs]
    for errors in run_ranks(2, compare, rows, backend, names, timeout=280):
        assert {case: error for case, error in errors.items() if not error < 1e-5} == {}


@pytest.mark.parametrize(
    ("partition", "programs"),
    [(default_partition, [nested]), (min_cut_rematerialization_partition, [several, recurrent])],
)
def test_ranks_send_the_same(partition, programs):
    require("subclasses in nested regions")
    for function in programs:

        def program(rank, function=function):
            mesh = init_device_mesh("cpu", (WORLD,))
            values = zip(given(5, 1), SPLITS[2], strict=True)
            return function, [distribute_tensor(x, mesh, p, src_data_rank=None).requires_grad_() for x, p in values]

        first, *others = sent_by_ranks(WORLD, program, partition)
        assert others == [first] * len(others), function.__name__
        assert any(first), function.__name__


@pytest.fixture
def mesh():
    with fake_ranks(2):
        yield init_device_mesh("cpu", (2,))


def test_results_have_the_layout_of_the_first_branch(mesh):
    require("subclasses in nested regions")
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)

    def program(x, pred):
        return torch.cond(pred, lambda x: x * 2, lambda x: x.redistribute(placements=[Replicate()]) * 2, (x,))

    for run in (program, torch.compile(program, backend="aot_eager", fullgraph=True)):
        for pred in (True, False):
            assert run(x, torch.tensor(pred)).placements == (Shard(0),)


def written(x):
    with torch.no_grad():
        return torch.cond(x.sum() > 0, lambda x: x.add_(1) * 2, lambda x: x * 3, (x,))


REFUSED = {
    "a plain result": (
        lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x.to_local() * 2, (x,)),
        "as true_fn",
    ),
    "another shape": (lambda x: while_loop(lambda x: x.sum() < 9, lambda x: (x[:2] + 1,), (x,)), None),
    "a plain decision": (lambda x: torch.cond(torch.ones(1) > 0, lambda x: x * 2, lambda x: x * 3, (x,)), "pred"),
    "other terms": (
        lambda x: torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t * 3, (x.amax(0),)),
        "sums and means",
    ),
    "a view that was moved": (lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x[1:],)), "clone()"),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_writes_are_seen_or_refused(mesh, backend):
    require("subclasses in nested regions")
    x = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()], src_data_rank=None)
    program = torch.compile(written, backend=backend, fullgraph=True)
    if backend == "aot_eager" and not known("writes in functions"):
        with pytest.raises(Exception, match="return the new value"):
            program(x)
        return
    y = program(x)
    torch.testing.assert_close((x.to_local(), y.to_local()), (torch.full((4, 4), 2.0), torch.full((4, 4), 4.0)))


def test_writes_along_a_split_dim_are_refused(mesh):
    require("subclasses in nested regions")
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)

    def program(x):
        with torch.no_grad():
            return map_(lambda t: t.add_(1) * 2, x)

    with pytest.raises(Exception, match=r"along a split dim is of a copy|input mutation"):  # of torch, before 2.15
        torch.compile(program, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(mesh, name):
    require("subclasses in nested regions")
    program, told = REFUSED[name]
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(Exception, match=told):
        torch.compile(program, backend="aot_eager", fullgraph=True)(x)


def test_meshes_must_be_one(mesh):
    require("subclasses in nested regions")
    others = init_device_mesh("cpu", (2, 1))
    x, y = [distribute_tensor(torch.ones(4), m, [Replicate()] * m.ndim, src_data_rank=None) for m in (mesh, others)]
    with pytest.raises(Exception, match="the arguments live on different meshes"):
        torch.cond(torch.tensor(True), lambda x, y: (x * 1, y * 1), lambda x, y: (x * 2, y * 2), (x, y))


def on_two_of_three(rank, world):
    mesh = DeviceMesh("cpu", [0, 1])
    results = []
    for program in (several, recurrent):
        for run in (program, torch.compile(program, backend="aot_eager")):
            torch._dynamo.reset()
            x, w = [distribute_tensor(v, mesh, [Replicate()]).requires_grad_() for v in given(5, 1)]
            y = run(x, w)
            y.sum().backward()
            results += (
                [y.full_tensor().sum().item(), x.grad.full_tensor().sum().item()] if rank < 2 else [tuple(y.shape)]
            )
    return results


def test_a_rank_outside_of_the_mesh_goes_on():
    require("subclasses in nested regions")
    first, second, outside = run_ranks(WORLD, on_two_of_three, timeout=280)
    assert first == pytest.approx(second)
    assert len(outside) == len(first) // 2
