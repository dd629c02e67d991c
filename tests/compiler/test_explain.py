"""Plans and traces, on a fake group of 8 ranks."""

import contextlib
import re
import sys

import pytest
import torch
from expecttest import assert_expected_inline

from tests.compiler.models import batch, make
from tests.compiler.traced import traced
from tests.older import require
from torchshard import _torch
from torchshard.compiler import explain, measure, named, simulate, writing
from torchshard.ddp import DistributedDataParallel


def _inserted(plan):
    """Each graph's operators that belong to buckets, with the matrix products around them."""
    lines = []
    for graph in plan.graphs:
        lines.append("graph")
        for line in graph.code.splitlines():
            found = re.search(r"(torchshard\.\w+|aten\.mm)\.default\]\((args = .*), kwargs", line)
            if found:
                arguments = found[2].replace("open_bucket_default", "flat")
                lines.append(f"  {found[1]} {arguments.replace('%empty_memory_format', '%token')}")
    return "\n".join(lines)


def test_the_table_of_a_gpt(fake_group):
    ddp = DistributedDataParallel(make("gpt"), bucket_cap_mb=0.03)
    text = str(explain(ddp, batch("gpt", 2)[0])).replace("index_put_1", "_unsafe_mask")  # the embedding, to torch 2.12
    table = "\n".join(line[:100].rstrip() for line in text.splitlines())
    assert_expected_inline(
        table,
        """\
graph    bucket    parameters                                      bytes     in place    launched af
-------  --------  ----------------------------------------------  --------  ----------  -----------
0        0         head.weight                                     32.0 KiB  1 of 1      mm_1
0        1         blocks.1.down.weight .. blocks.1.up.weight (5)  32.4 KiB  2 of 5      mm_6
0        2         blocks.1.up.bias .. blocks.0.down.weight (10)   33.5 KiB  3 of 10     mm_12
0        3         blocks.0.down.bias .. blocks.0.qkv.weight (8)   33.0 KiB  3 of 8      mm_18
0        4         blocks.0.qkv.bias .. tokens.weight (5)          34.6 KiB  2 of 5      _unsafe_mas
165.5 KiB of gradients in graphs, 97 % of them computed in place""",
    )


def test_the_trace_of_an_mlp(fake_group):
    require("names in graphs")
    ddp = DistributedDataParallel(make("mlp"), bucket_cap_mb=0.005)
    assert_expected_inline(
        _inserted(explain(ddp, batch("mlp", 8)[0])),
        """\
graph
  torchshard.open_bucket args = (0, 2080, torch.float32, cpu, [7, 8, 5])
  torchshard.product_into args = (%permute_17, %relu_2, True, 0, 0, %slot)
  aten.mm args = (%tangents_1, %permute_4)
  torchshard.product_into args = (%permute_18, %relu_1, True, 0, 2, %slot_2)
  torchshard.launch_bucket args = (%flat, %token, [%slot, %slot_1, %slot_2], [%view], [1], 0, 0)
  aten.mm args = (%where, %permute_8)
  torchshard.open_bucket args = (1, 2112, torch.float32, cpu, [6, 3, 4, 0])
  torchshard.product_into args = (%permute_19, %relu, True, 1, 1, %slot_4)
  aten.mm args = (%where_1, %permute_12)
  torchshard.product_into args = (%permute_20, %primals_3, True, 1, 3, %slot_6)
  torchshard.launch_bucket args = (%flat_1, %token, [%slot_3, %slot_4, %slot_5, %slot_6], [%view_1, %view_2], [0, 2], 0, 1)
  torchshard.open_bucket args = (2, 32, torch.float32, cpu, [1])
  torchshard.launch_bucket args = (%flat_2, %token, [%slot_7], [%view_3], [0], 0, 2)""",
    )


def test_an_embedding_is_copied_where_torch_has_another_operator_for_it(monkeypatch, fake_group):
    for operator in (_torch.masked_index_put(), torch.ops.aten.index_put.default):
        monkeypatch.delitem(writing._TERMS, operator)
    inserted = explain(make("shared"), batch("shared", 8)[0]).inserted
    copied = {g.name for b in inserted for g in {*b.planned.gradients} - {*b.direct}}
    assert copied == {"tokens.weight"}
    with _torch.without_fast_paths():
        assert _torch.masked_index_put() is None


def test_gradients_that_are_sums_are_written_term_by_term(fake_group):
    ddp = DistributedDataParallel(make("shared"))
    plan = explain(ddp, batch("shared", 8)[0])
    assert plan.zero_copy == 1.0
    require("masked rows")
    assert_expected_inline(
        _inserted(plan),
        """\
graph
  torchshard.open_bucket args = (0, 2304, torch.float32, cpu, [5, 4, 3, 2, 1])
  torchshard.product_into args = (%permute_35, %mm_2, True, 0, 4, %slot_4)
  aten.mm args = (%view_17, %permute_12)
  torchshard.product_into args = (%permute_31, %view_34, True, 0, 0, %slot)
  aten.mm args = (%mm_5, %permute_16)
  torchshard.product_into args = (%permute_32, %mm, False, 0, 0, %slot)
  aten.mm args = (%view_21, %permute_16)
  torchshard.product_into args = (%permute_33, %mm_9, True, 0, 1, %slot_1)
  aten.mm args = (%mm_9, %permute_23)
  torchshard.product_into args = (%permute_25, %view_37, True, 0, 2, %slot_2)
  torchshard.product_into args = (%permute_29, %view_41, True, 0, 3, %view_default_7)
  torchshard.rows_into args = (%where_self, %where_self_1, False, 0, 4, %slot_4)
  torchshard.launch_bucket args = (%flat, %token, [%slot, %slot_1, %slot_2, %slot_3, %slot_4], [], [], 0, 0)""",
    )


def test_rows_that_an_index_picks_are_written_in_place(fake_group):
    plan = explain(DistributedDataParallel(make("picked")), batch("picked", 8)[0])
    assert plan.zero_copy == 1.0


def test_parameters_outside_of_graphs(fake_group):
    ddp = DistributedDataParallel(make("break"))
    assert_expected_inline(
        str(explain(ddp, batch("break", 2)[0])),
        """\
graph    bucket    parameters        bytes    in place    launched after
-------  --------  ----------------  -------  ----------  ----------------
0        0         a.weight, a.bias  8.2 KiB  1 of 2      view
1        0         c.weight, c.bias  8.1 KiB  1 of 2      view
16.4 KiB of gradients in graphs, 97 % of them computed in place
not in a graph: b.weight, b.bias
graph break: Skip calling `torch.compiler.disable()`d function (models.py:29)""",
    )


class Broken(torch.nn.Module):
    """Stops Dynamo three times, first of all before it has captured anything."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        print(end="")
        x = self.a(x)
        if x.sum() < 1e9:
            x = x + 1
        torch._dynamo.graph_break()
        return self.b(x)


def test_graph_breaks_have_reasons():
    plan = explain(Broken(), torch.ones(2, 4))
    here = Broken.forward.__code__.co_firstlineno
    lines = {b.reason.splitlines()[0]: b.place.rpartition(":")[2] for b in plan.breaks}
    assert lines == {
        "generic_jump TensorVariable()": str(here + 3),
        "Call to `torch._dynamo.graph_break()`": str(here + 5),
        "Failed to trace builtin operator": "",
    }
    assert "graph break: generic_jump TensorVariable() (" in str(plan)
    assert not explain(make("plain"), batch("plain", 2)[0]).breaks


def test_what_is_in_place_and_what_is_copied():
    plan = explain(make("plain"), batch("plain", 2)[0], bucket_cap_mb=0.01)
    total = sum(p.numel() for p in make("plain").parameters())
    biases = sum(p.numel() for p in make("plain").parameters() if p.ndim == 1)
    assert plan.nbytes == 4 * total
    assert plan.zero_copy == pytest.approx(1 - biases / total)


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.full), "tied gpt", "both", "normed"])
def test_what_is_explained_is_what_happens(fake_group, name):
    """The reducer ends up with the buckets that were announced, but for weights that several graphs share."""
    ddp = DistributedDataParallel(make(name), bucket_cap_mb=0.03)
    plan = explain(ddp, batch(name, 2)[0])
    torch._dynamo.reset()
    compiled = torch.compile(ddp, backend=traced)
    for _ in range(3):
        compiled(batch(name, 2)[0]).sum().backward()
    happened = [bucket.params for bucket in ddp.reducer.plan]
    announced = [bucket.params for bucket in plan.buckets]
    if name == "both":
        assert happened == [("c.weight", "c.bias"), ("a.weight", "a.bias"), ("b.weight", "b.bias")]
    else:
        assert sorted(happened) == sorted(announced)


def test_a_plain_module_needs_no_group():
    model = make("plain")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = explain(model, batch("plain", 2)[0], bucket_cap_mb=0.01)
    assert len(plan.buckets) == 2
    assert plan.outside == ()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="bucket_cap_mb=-1 is no size"):
        explain(model, batch("plain", 2)[0], bucket_cap_mb=-1)
    with pytest.raises(TypeError, match=r"expected a module, as Net\(\) is one of class Net, got the class Linear"):
        explain(torch.nn.Linear)
    with pytest.raises(TypeError, match=r"simulate: expected a plan, as explain\(model, \*args\) gives one, got"):
        simulate(model, world_size=2, bandwidth=1e9)


@pytest.mark.parametrize("name", [pytest.param("mlp", marks=pytest.mark.full), "break"])
def test_it_can_be_asked_often(name):
    """More often than Dynamo compiles a function again, of one model and of others like it."""
    model, x = make(name), batch(name, 2)[0]
    assert len({str(explain(asked, x)) for asked in [model] * 6 + [make(name) for _ in range(6)]}) == 1


class Counting:
    """A backend that compiles nothing; `inputs` are those of all graphs that it got."""

    def __init__(self):
        self.inputs = []

    def __call__(self, graph, inputs):
        self.inputs.append(inputs)
        return graph.forward


@pytest.mark.parametrize("fast", [True, False])
def test_it_leaves_no_trace(fast):
    """What was compiled stays, what will be is as if nobody had asked: its number, and sizes that have not changed."""
    model, later, (x, _) = make("break"), Broken(), batch("break", 2)
    backend, functions = Counting(), [f for f in vars(type(model)).values() if callable(f)]
    compiled, codes = torch.compile(model, backend=backend), [f.__code__ for f in functions]
    compiled(x)
    with contextlib.nullcontext() if fast else _torch.without_fast_paths():
        for rows in range(2, 12):
            assert len(explain(model, x[:1].expand(rows, -1)).graphs) == 2
            assert len(explain(later, torch.ones(rows, 4)).breaks) == 3
    assert all(f.__code__ is code for f, code in zip(functions, codes, strict=True))
    compiled(x)
    assert len(backend.inputs) == (2 if fast else 4)
    backend.inputs.clear()
    torch.compile(later, backend=backend)(torch.ones(7, 4))
    assert len(backend.inputs) == 3
    assert not any(isinstance(x, torch.SymInt) for inputs in backend.inputs for x in inputs)


def test_functions_that_others_make_and_what_has_reached_its_limit():
    """Compiled code of an inner function belongs to the function that makes it; the limit is Dynamo's, not of plans."""

    class Making(torch.nn.Linear):
        def forward(self, x):
            def inner(x):
                torch._dynamo.graph_break()
                return super(Making, self).forward(x)

            return inner(x)

    model, backends = Making(4, 4), [Counting() for _ in range(12)]
    for backend in backends:
        torch.compile(model, backend=backend)(torch.ones(2, 4))
    assert len(backends[0].inputs) == 1
    assert not backends[-1].inputs
    assert all(explain(model, torch.ones(rows, 4)).outside == () for rows in range(2, 12))


def test_layers_that_share_a_graph():
    """Dynamo compiles one for all of them; each has gradients of its own."""
    model = torch.nn.Sequential(*[torch.nn.Sequential(make("break"), torch.nn.Identity()) for _ in range(3)])
    plan = explain(model, batch("break", 2)[0])
    assert [b.params for b in plan.buckets] == [
        (f"{layer}.0.{part}.weight", f"{layer}.0.{part}.bias") for layer in range(3) for part in "ac"
    ]
    assert plan.outside == tuple(f"{layer}.0.b.{name}" for layer in range(3) for name in ("weight", "bias"))


class Normed(torch.nn.Module):
    """Two graphs around what no graph takes, and buffers that a wrapper broadcasts."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.last = torch.nn.BatchNorm1d(32), make("break"), torch.nn.Linear(32, 2)

    def forward(self, x):
        return self.last(self.inner(self.norm(x)))


def _refusing(graph, inputs):
    raise AssertionError("explain has compiled for somebody else")


def _in_place(module):
    module.compile(backend=_refusing)
    return module


def _compiled(module):
    return torch.compile(module, backend=_refusing)


FORMS = {
    "outside": lambda wrap, model: _compiled(wrap(model)),
    "inside": lambda wrap, model: wrap(_compiled(model)),
    "both": lambda wrap, model: _compiled(wrap(_in_place(model))),
    "in place": lambda wrap, model: _in_place(wrap(_in_place(model))),
}


@pytest.mark.parametrize("form", FORMS)
def test_compiled_models_have_the_same_plan(fake_group, form, monkeypatch):
    x = batch("mlp", 2)[0]
    monkeypatch.setattr(DistributedDataParallel, "forward", lambda self, x: pytest.fail("it would communicate"))
    for wrap in (lambda model: model, lambda model: DistributedDataParallel(model, bucket_cap_mb=0.005)):
        expected = str(explain(wrap(Normed()), x))
        assert "graph break" in expected
        assert str(explain(FORMS[form](wrap, Normed()), x)) == expected
    wrapped = FORMS[form](lambda model: DistributedDataParallel(model), Normed())
    assert {n for b in wrapped.reducer.plan for n in b.params} == set(dict(Normed().named_parameters()))


@pytest.mark.parametrize("settings", [{}, {"bucket_cap_mb": 0.005}])
def test_torchs_wrapper_is_planned_as_ours(fake_group, settings):
    x = batch("mlp", 2)[0]
    theirs = torch.nn.parallel.DistributedDataParallel
    expected = str(explain(DistributedDataParallel(Normed(), **settings), x))
    assert str(explain(theirs(Normed(), **settings), x)) == expected
    ignoring = Normed()
    theirs._set_params_and_buffers_to_ignore_for_model(ignoring, ["inner.b.weight"])
    assert "inner.b.weight" not in str(explain(theirs(ignoring, **settings), x))


def test_compiled_layers_are_taken_for_what_they_are():
    model, x = Normed(), batch("mlp", 2)[0]
    before = len(explain(model, x).graphs)
    model.inner = _compiled(_in_place(model.inner))
    plan = explain(model, x)
    assert len(plan.graphs) == before
    assert plan.outside == ("inner._orig_mod.b.weight", "inner._orig_mod.b.bias")


def test_models_without_values_and_modes_without_gradients():
    model, (x, _) = make("mlp"), batch("mlp", 8)
    expected = str(explain(model, x))
    with torch.device("meta"):
        assert str(explain(make("mlp"), torch.empty_like(x, device="meta"))) == expected
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert str(explain(model, x.clone())) == expected


def test_state_is_left_alone():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    explain(model, batch("mlp", 8)[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


BROKEN = """
import sys
from torch import nn
assert sys.modules[__name__]
def mlp(): return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
raise KeyError(7)
"""


def test_a_file_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "named_by_a_test.py"
    path.write_text(BROKEN)
    monkeypatch.setitem(sys.modules, path.stem, before := object())
    for left in (before, None):
        with pytest.raises(ValueError, match=r"but got KeyError: 7 \(named_by_a_test.py, line 6\)$") as caught:
            named.load(f"{path}:mlp", ["2,4"])
        assert isinstance(caught.value.__cause__, KeyError)
        assert sys.modules.pop(path.stem, None) is left
    path.write_text(BROKEN.rpartition("raise")[0])
    model, (x,) = named.load(f"{path}:mlp", ["2,4"])
    assert x.shape == (2, 4)
    assert model[0].num_batches_tracked == 0  # the trial left no trace


class Counts(torch.nn.Module):
    """A buffer that forward replaces, and rows of a weight that it shortens."""

    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(10, 8, max_norm=0.1)
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x):
        self.n = self.n + 1
        return self.rows(x) * self.n


@pytest.mark.parametrize("ask", [explain, measure])
def test_a_model_is_as_before(ask):
    model = Counts()
    before, values = dict(model.named_buffers()), {n: t.clone() for n, t in model.state_dict().items()}
    ask(model, torch.arange(10))
    assert all(b is before[n] for n, b in model.named_buffers())
    assert all(torch.equal(t, values[n]) for n, t in model.state_dict().items())


def test_nothing_is_measured_on_the_meta_device():
    with torch.device("meta"):
        model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="the model lies on the meta device, where nothing is computed"):
        measure(model, torch.ones(2, 4, device="meta"))
