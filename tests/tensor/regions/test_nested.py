"""Functions under torch.compiler.nested_compile_region, and torch's print for graphs, with DTensors and ShardedTensors."""

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.older import known, require
from tests.ranks import fake_ranks, run_ranks
from torchshard import DTensor, Partial, Replicate, Shard, _torch, distribute_tensor, init_device_mesh, layout_of
from torchshard.compiler.advice import way_around
from torchshard.errors import ShardingError
from torchshard.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchshard.state_dict import to_sharded_tensor

pytestmark = pytest.mark.filterwarnings("ignore:.*is compiled anew for each of its calls")

nest = torch.compiler.nested_compile_region


@pytest.fixture(scope="module", autouse=True)
def line():
    global MESH
    with fake_ranks(2):
        MESH = init_device_mesh("cpu", (2,))
        yield


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    @nest
    def forward(self, x):
        return x + self.down(self.up(x).relu())


def blocks():
    model = torch.nn.Sequential(*[Block() for _ in range(3)])
    ways = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, MESH, {f"{k}.{name}": way for k in range(3) for name, way in ways.items()})
    return model, [torch.randn(3, 4, requires_grad=True)], list(model.parameters())


def rows():
    return distribute_tensor(torch.randn(3, 4), MESH, [Shard(0)], src_data_rank=None).requires_grad_()


@nest
def sine(x):
    return x.sin() + 1


@nest
def nested(x):
    return sine(x) * sine(x * 2)


@nest
def replicated(x):
    return x.redistribute(placements=[Replicate()]).exp()


@nest
def written(x):
    x = x * 1
    x[:, 0] = 0  # rows are on another rank, which a fake group does not have
    return x


@nest
def several(x):
    return {"local": x.to_local() * 2, "more": [x.cos()]}


def several_twice(x):
    first = several(x)
    second = several(first["more"][0])
    return first["local"], second["local"], second["more"][0]


PROGRAMS = {
    "twice": lambda x: (sine(x), sine(x * 2)),
    "added up": lambda x: sine(x) + sine(x * 2),
    "asked": lambda x: (sine(x), sine(x * 2).to_local()),
    "beside a plain one": lambda x: (sine(x), sine(torch.ones(2)), sine(torch.ones(2) * 2)),
    "nested in another": lambda x: nested(nested(x)),
    "moved": lambda x: replicated(replicated(x).redistribute(placements=[Shard(0)])),
    "written to": lambda x: written(written(x)),
    "several results": several_twice,
    "slices": lambda x: sine(x[:, :-1]) + sine(x[:, 1:]),
    "in a checkpoint": lambda x: checkpoint(lambda x: sine(sine(x)), x, use_reentrant=False),
}


def found(function, inputs, leaves):
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    gradients = torch.autograd.grad(
        sum(local(y).square().sum() for y in results if y.requires_grad), [*inputs, *leaves], allow_unused=True
    )
    layouts = [layout_of(y) for y in results if isinstance(y, DTensor)]
    return layouts, [local(y).detach() for y in (*results, *gradients)]


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("name", ["blocks", *PROGRAMS])
def test_values_and_gradients_are_eagers(name):
    require("subclasses in nested regions")
    torch._dynamo.reset()
    function, inputs, leaves = blocks() if name == "blocks" else (PROGRAMS[name], [rows()], [])
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    wanted = found(function, inputs, leaves)
    for _ in range(2):
        layouts, values = found(compiled, inputs, leaves)
        assert layouts == wanted[0]
        torch.testing.assert_close(values, wanted[1])


def test_without_gradients_too():
    require("subclasses in nested regions")
    torch._dynamo.reset()
    x = rows().detach()
    for function in PROGRAMS.values():
        results = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close([*map(local, results)], [*map(local, function(x))])


def test_sharded_tensors():
    require("subclasses in nested regions")
    torch._dynamo.reset()
    x = to_sharded_tensor(rows().detach())
    function = PROGRAMS["twice"]
    for got, wanted in zip(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x), strict=True):
        torch.testing.assert_close(got.local_tensor(), wanted.local_tensor())


def compare(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    values, weight = torch.randn(5, 4), torch.randn(4, 4)

    @nest
    def block(x, w):
        return (x @ w).softmax(0).sin() * x.cumsum(0)

    def function(x, w):
        return block(block(x, w), w)

    results = []
    for run, placements in ((function, None), (torch.compile(function, fullgraph=True), [[Shard(0)], [Replicate()]])):
        inputs = [values, weight]
        if placements:
            inputs = [distribute_tensor(x, mesh, on) for x, on in zip(inputs, placements, strict=True)]
        inputs = [x.detach().requires_grad_() for x in inputs]
        y = run(*inputs)
        y.square().sum().backward()
        results.append([x.full_tensor() if placements else x for x in (y, *[x.grad for x in inputs])])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.full
def test_values_of_several_ranks_under_inductor():
    require("subclasses in nested regions")
    run_ranks(3, compare, timeout=200)


def test_it_is_said_once():
    require("subclasses in nested regions")
    _torch.nested._say_in_place.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            torch._dynamo.reset()
            torch.compile(PROGRAMS["twice"], backend="aot_eager", fullgraph=True)(rows())
    assert [str(w.message) for w in said if "nested_compile_region" in str(w.message)] == [
        "torchshard: a function under torch.compiler.nested_compile_region that takes a DTensor is compiled anew for "
        "each of its calls, as torch has no rule for such tensors there (said once)."
    ]


def test_a_torch_without_it_refuses_with_a_way_around():
    if known("subclasses in nested regions"):
        return
    with pytest.raises(Exception) as refused:  # noqa: PT011
        torch.compile(PROGRAMS["twice"], backend="aot_eager", fullgraph=True)(rows())
    assert "to_local()" in way_around(str(refused.value))


def test_a_torch_that_takes_them_is_not_told(monkeypatch):
    class Other(torch.Tensor):
        pass

    operator = torch.ops.higher_order.invoke_subgraph
    monkeypatch.setattr(operator, "py_kernels", dict(operator.py_kernels))
    monkeypatch.setattr(operator, "python_key_table", dict(operator.python_key_table))
    monkeypatch.setattr(_torch.nested, "_refuses_wrappers", lambda operator: False)
    assert not _torch.nest_in_place(Other)
    assert Other not in operator.python_key_table


@pytest.mark.parametrize("compiled", [False, True])
def test_print_shows_parts(compiled, capfd):
    require("print in graphs")
    torch._dynamo.reset()

    def function(x, y):
        torch._higher_order_ops.print("{} and {y}", x, y=y)
        return x * 2

    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    x = distribute_tensor(torch.arange(4.0), MESH, [Shard(0)], src_data_rank=None)
    function(x, y=torch.ones(1))
    assert capfd.readouterr().out == "[rank 0] tensor([0., 1.]) and tensor([1.])\n"
    with pytest.raises((ShardingError, RuntimeError), match="no part of its values"):
        function(DTensor.from_local(torch.ones(2), MESH, [Partial()]), 1)
