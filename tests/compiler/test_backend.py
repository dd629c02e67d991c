"""The string, its options, and modules that are not wrapped."""

import copy
import textwrap
import weakref
from importlib.metadata import entry_points

import pytest
import torch
from expecttest import assert_expected_inline
from torch._inductor.custom_graph_pass import CustomGraphPass

from tests.compiler.models import batch, loss_of, make
from tests.compiler.traced import traced
from tests.interpreters import run_code
from torchshard.buckets import BucketPolicy, MiB
from torchshard.compiler.backend import torchshard
from torchshard.compiler.options import parse
from torchshard.ddp import DistributedDataParallel

ALONE = """
import sys, torch
assert not any(name.startswith("torchshard") for name in sys.modules)
model = torch.nn.Linear(4, 4)
compiled = torch.compile(model, backend="torchshard", options={"inner": "aot_eager"})
x = torch.ones(2, 4)
torch.testing.assert_close(compiled(x), model(x))
assert "torchshard.compiler.backend" in sys.modules
from torch._dynamo.variables import builder, tensor
assert not hasattr(builder.VariableBuilder.__call__, "__wrapped__")
assert not hasattr(tensor.TensorVariable.call_method, "__wrapped__")
"""


def test_the_entry_point():
    found = [e for e in entry_points(group="torch_dynamo_backends") if e.name == "torchshard"]
    assert [e.value for e in found] == ["torchshard.compiler.backend:torchshard"]
    assert found[0].load() is torchshard


def test_nothing_has_to_be_imported():
    run_code(ALONE)


def test_a_plain_module_is_compiled_by_inductor():
    model = make("plain")
    inductor = torch.compile(copy.deepcopy(model))
    ours = torch.compile(model, backend="torchshard", options={"reorder_for_locality": True})
    x, y = batch("plain", 8)
    loss_of(ours(x), y).backward()
    loss_of(inductor(x), y).backward()
    for p, q in zip(ours.parameters(), inductor.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    with torch.no_grad():
        assert torch.equal(ours(x), inductor(x))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_plain_module_under_any_inner_compiler(inner):
    calls = []

    def counting(graph, inputs, **given):
        calls.append(given)
        return torch._dynamo.lookup_backend(inner)(graph, inputs)

    model = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4)
    compiled = torch.compile(model, backend="torchshard", options={"inner": counting, "theirs": 1})
    torch.testing.assert_close(compiled(x), model(x))
    assert calls == [{"options": {"theirs": 1}}]


def test_settings_go_where_they_belong():
    options = {"reduction": "split", "bucket_cap_mb": 2, "first_bucket_mb": 0.5, "max_autotune": True}
    chosen = parse(None, options)
    assert (chosen.reduction, chosen.inner, chosen.in_graph) == ("split", "inductor", False)
    assert chosen.sizes(BucketPolicy(1, 1)) == BucketPolicy(2 * MiB, MiB // 2)
    assert chosen.inductor == {"max_autotune": True}
    assert options["reduction"] == "split"
    assert parse("max-autotune", None).mode == "max-autotune"
    assert parse(None, None).in_graph
    assert not parse(None, {"inner": "aot_eager"}).in_graph
    assert parse(None, None).sizes(BucketPolicy(3, 2)) == BucketPolicy(3, 2)
    assert parse(None, {"first_bucket_mb": 1}).sizes(BucketPolicy(3, 2)) == BucketPolicy(3, MiB)
    assert parse(None, {"first_bucket_mb": 1}).sizes(BucketPolicy(caps=(3, 2))).caps == (MiB, 2)


MISTAKES = {
    "unknown": {"bucket_cap": 1},
    "far off": {"zzz": 1},
    "negative": {"bucket_cap_mb": -1},
    "negative first": {"first_bucket_mb": -0.5},
    "not a number": {"bucket_cap_mb": "big"},
    "not finite": {"bucket_cap_mb": float("inf")},
    "reduction": {"reduction": "hooks"},
    "inner": {"inner": "aot_eagre"},
    "inner is itself": {"inner": "torchshard"},
    "both": {"reduction": "ingraph", "inner": "aot_eager"},
}


def test_mistakes_in_options():
    said = []
    for name, options in MISTAKES.items():
        with pytest.raises(ValueError, match='backend "torchshard"') as caught:
            parse(None, options)
        said.append(f"{name}: {caught.value}")
    assert_expected_inline(
        "\n".join(textwrap.fill(line, 110) for line in said),
        """\
unknown: backend "torchshard": unknown option 'bucket_cap', did you mean 'bucket_cap_mb'? Its own options are
bucket_cap_mb, first_bucket_mb, inner, reduction; all others must be options of inductor
far off: backend "torchshard": unknown option 'zzz'; Its own options are bucket_cap_mb, first_bucket_mb,
inner, reduction; all others must be options of inductor
negative: backend "torchshard": bucket_cap_mb=-1 is no size; give a number of MiB, 0 or more
negative first: backend "torchshard": first_bucket_mb=-0.5 is no size; give a number of MiB, 0 or more
not a number: backend "torchshard": bucket_cap_mb='big' is no size; give a number of MiB, 0 or more
not finite: backend "torchshard": bucket_cap_mb=inf is no size; give a number of MiB, 0 or more
reduction: backend "torchshard": option reduction='hooks' is not known; give one of auto, ingraph, split
inner: backend "torchshard": inner='aot_eagre' is no compiler; give a callable, or a name that
torch.compiler.list_backends() lists
inner is itself: backend "torchshard": inner='torchshard' is no compiler; give a callable, or a name that
torch.compiler.list_backends() lists
both: backend "torchshard": reduction="ingraph" needs inductor, not 'aot_eager'; give reduction="split", which
works with any inner compiler, or leave it out""",
    )


def test_a_mistake_reaches_the_user():
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="torchshard", options={"bucket_cap_mb": -1})
    with pytest.raises(Exception, match="bucket_cap_mb=-1 is no size; give a number of MiB, 0 or more"):
        compiled(torch.ones(1, 2))


def _global_state():
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    configs = [torch._dynamo.config, torch._inductor.config, torch._functorch.config]
    active = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()  # Dynamo asks whether it is true
    return [config.get_config_copy() for config in configs], torch.compiler.list_backends(), bool(active)


@pytest.mark.parametrize("wrapped", [False, True])
def test_nothing_global_is_changed(fake_group, wrapped):
    before, x = _global_state(), torch.ones(2, 32)
    for settings in ({"backend": "torchshard", "options": {"inner": "aot_eager"}}, {"backend": traced}):
        model = make("mlp")
        compiled = torch.compile(DistributedDataParallel(model) if wrapped else model, **settings)
        for _ in range(3):
            compiled(x).sum().backward()
        assert _global_state() == before


def test_what_a_graph_has_made_is_kept_until_it_is_compared(fake_group):
    """Longer, and the first backward would hold all gradients twice."""
    lending, made = DistributedDataParallel(make("mlp")).reducer.lending, torch.ones(4)
    memory = weakref.ref(made.untyped_storage())
    compare, brought = lending._comparing(0, made), made.view(2, 2)
    del made
    compare((brought,))
    assert not lending.shared
    del brought
    assert memory() is None
    compare((torch.ones(4),))  # once more: the graph is not its only source
    assert lending.shared == {0}

    made = torch.ones(4)
    memory = weakref.ref(made.untyped_storage())
    compare = lending._comparing(1, made)
    del made
    assert memory() is not None
    compare((torch.ones(4),))
    assert lending.shared == {0, 1}


def test_backends_with_different_options_side_by_side(fake_group):
    seen = {}

    def inner(name):
        def compiler(graph, inputs):
            seen[name] = seen.get(name, 0) + 1
            return graph.forward

        return compiler

    models = [
        torch.compile(
            DistributedDataParallel(make("mlp")),
            backend="torchshard",
            options={"inner": inner(cap), "bucket_cap_mb": cap},
        )
        for cap in (0.003, 0.007, 1)
    ]
    for _ in range(3):
        for model in models:
            model(torch.ones(2, 32)).sum().backward()
    assert seen == {0.003: 4, 0.007: 2, 1: 1}


def test_sizes_come_from_options_or_else_from_the_wrapper(fake_group):
    seen, x = [], torch.ones(2, 32)

    def pieces(options, **settings):
        torch._dynamo.reset()
        seen.clear()
        wrapper = DistributedDataParallel(make("mlp"), **settings)
        torch.compile(wrapper, backend="torchshard", options={"inner": counting, **options})(x)
        return len(seen)

    def counting(graph, inputs):
        seen.append(graph)
        return graph.forward

    assert pieces({"bucket_cap_mb": 0.003}) == 4
    assert pieces({"bucket_cap_mb": 1}, bucket_cap_mb=0.003) == 1
    assert pieces({}, bucket_cap_mb=0.003) == 4
    assert pieces({}, bucket_cap_mb_list=[0.003, 1]) == 2


@pytest.mark.parametrize("reduction", ["split", "ingraph"])
@pytest.mark.parametrize(
    ("options", "settings", "buckets"),
    [
        ({"bucket_cap_mb": 0.004}, {}, [2, 2, 2, 2]),
        ({"first_bucket_mb": 0.001}, {"bucket_cap_mb": 0.004}, [1, 2, 2, 2, 1]),
        ({}, {"bucket_cap_mb": 0.008}, [4, 4]),
    ],
)
def test_what_is_reduced_together_has_these_sizes_too(fake_group, reduction, options, settings, buckets):
    """Four layers of a weight of 4,096 bytes and a bias of 128."""
    wrapper = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]), **settings)
    inner = {"inner": "aot_eager"} if reduction == "split" else {}
    model = torch.compile(wrapper, backend="torchshard", options={"reduction": reduction, **inner, **options})
    for _ in range(3):
        model(torch.ones(2, 32)).sum().backward()
    assert [len(bucket.params) for bucket in wrapper.reducer.plan] == buckets


class Seen(CustomGraphPass):
    """Counts the graphs that it is given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph):
        self.graphs += 1

    def uuid(self):
        return None  # never cached


def test_passes_of_the_user_run(fake_group):
    """Those that are given as an option, and those of the process; a forward and a backward each."""
    given, configured = Seen(), Seen()
    options = {"post_grad_custom_post_pass": given}
    for option, key in ((options, {}), (None, {"post_grad_custom_post_pass": configured})):
        model = torch.compile(DistributedDataParallel(make("plain")), backend="torchshard", options=option)
        x, y = batch("plain", 8)
        with torch._inductor.config.patch(key):
            loss_of(model(x), y).backward()
    assert (given.graphs, configured.graphs) == (2, 2)
