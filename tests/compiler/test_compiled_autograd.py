"""Backwards under compiled autograd: gradients right, nothing compiled twice, and no for an answer where it must be."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from tests.compiler.models import BatchNormed, Parts, batch, error, loss_of
from tests.compiler.trial import Trial, check_on_each_rank
from tests.interpreters import run_code
from torchshard.buckets import BucketPolicy
from torchshard.compiler.joined import JoinReductions
from torchshard.ddp import DistributedDataParallel


def _plain(model, module, rank, size):
    x, y = batch("plain", size + rank)
    return loss_of(model(x), y)


class Eager(Trial):
    """A trial whose forward is not compiled, and whose backward is, by compiled autograd."""

    def __init__(self, rank, world, **settings):
        super().__init__(rank, world, **settings)
        self.model, self.compiles = self.ddp, CompileCounterWithBackend("aot_eager")

    def step(self, objective=_plain, size=8):
        """As of Trial."""
        with compiled_autograd._enable(torch.compile(backend=self.compiles)):
            return super().step(objective, size)[0]

    def counted(self):
        """What was reduced until now, as the next forward notes it."""
        with compiled_autograd._enable(torch.compile(backend=self.compiles)):
            self.ddp(batch("plain", 8)[0])
        counters = self.ddp.reducer.counters
        return counters.backwards, counters.in_graph, counters.by_hook


class Tied(Parts):
    """A weight used three times."""

    def forward(self, x):
        x = F.linear(self.b(F.gelu(self.a(x))), self.a.weight.t())
        return self.c(self.a(x))


def _forwards(rank, world):
    answers = {}
    for how, make in {"both": functools.partial(Parts, "both"), "tied": Tied}.items():
        trial = Eager(rank, world, make=make)
        errors, compiles = [trial.step()], trial.compiles.frame_count
        errors += [trial.step() for _ in range(2)]
        answers[how] = max(errors), trial.counted(), trial.compiles.frame_count - compiles
    return answers


def _all_kinds_of_forwards(answers):
    for worst, counted, compiled_again in answers.values():
        assert worst < 1e-5
        assert counted == (3, 18, 0)
        assert compiled_again == 0


def _accumulated(rank, world):
    trial = Eager(rank, world)
    errors = []
    for _ in range(3):
        for model in (trial.ddp, trial.reference):
            model.zero_grad()
        with compiled_autograd._enable(torch.compile(backend=trial.compiles)):
            with trial.ddp.no_sync():
                _plain(trial.ddp, None, rank, 8).backward()
            _plain(trial.ddp, None, rank, 16).backward()
        for other in range(world):
            for size in (8, 16):
                (_plain(trial.reference, None, other, size) / world).backward()
        errors.append(error(trial.ddp, trial.reference))
    return max(errors), trial.counted()


def _no_sync_accumulates(found):
    worst, counted = found
    assert worst < 1e-5
    assert counted == (3, 18, 0)


def _everything(rank, world):
    """Forward, loss and backward in one call of a compiled function."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        trial = Trial(rank, world, make=BatchNormed)

        @torch.compile(backend="torchshard")
        def step(x, y):
            loss_of(trial.ddp(x), y).backward()

        errors = []
        for number in range(4):
            for model in (trial.ddp, trial.reference):
                if number < 3:  # the last one adds to what is there
                    model.zero_grad()
            step(*batch("plain", 8 + rank))
            for other in range(world):
                (_plain(trial.reference, None, other, 8) / world).backward()
            errors.append(error(trial.ddp, trial.reference))
        trial.ddp(batch("plain", 8)[0])
        counters = trial.ddp.reducer.counters
        return max(errors), (counters.backwards, counters.in_graph, counters.by_hook)


def _a_step_in_one_call(found):
    worst, counted = found
    assert worst < 1e-4
    assert counted == (4, 32, 0)


def _low(rank, world):
    trial = Eager(rank, world)
    trial.ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return [trial.step() for _ in range(2)], {p.grad.dtype for p in trial.ddp.parameters()}


def _in_lower_precision(found):
    errors, dtypes = found
    assert 1e-5 < max(errors) < 2e-2
    assert dtypes == {torch.float32}


def _by_turns(rank, world):
    """With compiled autograd, without, and with it again."""
    trial = Eager(rank, world)
    errors = []
    for _ in range(2):
        errors += [trial.step() for _ in range(2)]
        errors += [Trial.step(trial, _plain)[0] for _ in range(3)]
    return max(errors), trial.counted()


def _on_and_off(found):
    worst, counted = found
    assert worst < 1e-5
    assert counted == (10, 24, 36)


class Either(nn.Module):
    """Two layers of which a forward uses one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, which):
        return (self.a if which else self.b)(x)


def _apart(rank, world):
    """Ranks that use other parameters; and all ranks not using one."""
    messages = []
    for which in (rank, 0):
        ddp = DistributedDataParallel(Either())
        with compiled_autograd._enable(torch.compile(backend="eager")):
            ddp(torch.ones(2, 4), which).sum().backward()
            try:
                ddp(torch.ones(2, 4), which)
            except RuntimeError as found:
                messages.append(f"{type(found).__name__}: {found}")
    return messages


def _the_next_forward_says_what_was_wrong(found):
    differ, unused = found
    assert differ.startswith("RankMismatchError")
    assert "averaged under compiled autograd: a.weight" in differ
    assert "averaged under compiled autograd: b.weight" in differ
    assert "parameters that were not used in producing loss" in unused
    assert "a.weight" in unused


def _joined(rank, world):
    """Whose ranks run out of inputs at different times: refused on all of them before anything is sent."""
    ddp = DistributedDataParallel(Parts())
    with compiled_autograd._enable(torch.compile(backend="eager")):
        try:
            with ddp.join():
                _plain(ddp, None, rank, 8).backward()
        except NotImplementedError as found:
            return str(found)
    return ""


def _uneven_inputs_are_refused(found):
    assert "join() does not work under compiled autograd" in found


class Halves(Parts):
    """What Parts gives, in halves."""

    def forward(self, x):
        return super().forward(x).chunk(2, dim=1)


def _second(model, module, rank, size):
    x, y = batch("plain", size + rank)
    return loss_of(model(x)[1], y[:, : y.shape[1] // 2])


def _halves(rank, world):
    """The first output has no gradient."""
    trial = Eager(rank, world, make=Halves)
    errors = [trial.step(_second) for _ in range(3)]
    trial.model = torch.compile(trial.ddp, backend="aot_eager")
    errors += [trial.step(_second) for _ in range(3)]
    return max(errors), trial.counted()


def _backward_of_one_output(found):
    worst, counted = found
    assert worst < 1e-5
    assert counted == (6, 36, 0)


TRIALS = {
    _halves: _backward_of_one_output,
    _forwards: _all_kinds_of_forwards,
    _accumulated: _no_sync_accumulates,
    _everything: _a_step_in_one_call,
    _low: _in_lower_precision,
    _by_turns: _on_and_off,
    _joined: _uneven_inputs_are_refused,
    _apart: _the_next_forward_says_what_was_wrong,
}


def test_torch_is_told_of_missing_gradients_once():
    script = "from torchshard import _torch; print([_torch.take_missing_gradients() for _ in range(2)])"
    assert run_code(script).split() == ["[True,", "False]"]  # where torch needs it no longer: [False, False]


def test_trials():
    """One start of the ranks for all."""
    check_on_each_rank(TRIALS)


@pytest.fixture
def under_compiled_autograd(fake_group):
    """Run a step of a wrapper with these settings."""

    def run(prepare=lambda ddp: None, **settings):
        ddp = DistributedDataParallel(Parts(), **settings)
        prepare(ddp)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            _plain(ddp, None, 0, 8).backward()

    return run


def _graph(build):
    """A graph that `build` has made, on inputs x and y of ten numbers, with what the nodes' values look like."""
    graph = torch.fx.Graph()
    with torch._subclasses.FakeTensorMode() as mode:
        inputs = [mode.from_tensor(torch.ones(10)) for _ in range(2)]
        graph.output(build(graph, *[graph.placeholder(name) for name in "xy"]))
        FakeTensorProp(torch.fx.GraphModule({}, graph), mode).propagate(*inputs)
    return graph


def _averaged(graph, x, scale=2.0):
    sent = graph.call_function(torch.ops.aten.mul.Tensor, (x, scale))
    name = dist.group.WORLD.group_name
    reduced = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (sent, "sum", name))
    return graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,))


def _independent(graph, x, y):
    first = graph.call_function(torch.ops.aten.neg.default, (_averaged(graph, x),))
    return first, _averaged(graph, y), _averaged(graph, x, 3.0)


def _chained(graph, x, y):
    first = _averaged(graph, x)
    return _averaged(graph, first), _averaged(graph, y)


@pytest.mark.parametrize(("build", "joined"), [(_independent, (3,)), (_chained, (2,))])
def test_collectives_are_joined_where_nothing_waits_for_them(fake_group, build, joined):
    graph = _graph(build)
    run = functools.partial(torch.fx.GraphModule({}, graph), torch.arange(10.0), torch.ones(10))
    expected = run()
    rewrite = JoinReductions(BucketPolicy())
    rewrite(graph)
    graph.lint()
    assert rewrite.joined == joined
    names = [getattr(node.target, "_opname", "") for node in graph.nodes]
    assert names.count("all_reduce_coalesced") == 1
    assert names.count("all_reduce") == (build is _chained)
    torch.testing.assert_close(torch.fx.GraphModule({}, graph)(torch.arange(10.0), torch.ones(10)), expected)


def test_collectives_of_others_are_left_alone():
    script = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchshard.compiler.options import parse
from torchshard.ddp import DistributedDataParallel
from torchshard.ddp.reducing import traced
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
said = []
def wrapped(make):
    model = make(torch.nn.Linear(8, 8))
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda x: model(x).sum().backward(), backend=backend)(torch.ones(2, 8))
def backend(graph, inputs):
    said.append(traced.in_use())
    return graph.forward
wrapped(lambda module: module)
assert said and not any(said), said
wrapped(DistributedDataParallel)
assert any(said), said
"""
    run_code(script)


def test_each_bucket_has_its_own_collective(fake_group):
    graph = _graph(_independent)
    rewrite = JoinReductions(BucketPolicy(cap=80, first=80))
    rewrite(graph)
    assert rewrite.joined == (2, 1)


def _own_hook(state, bucket):
    return default_hooks.allreduce_hook(state, bucket)


@pytest.mark.parametrize(
    ("settings", "prepare", "named"),
    [
        ({"find_unused_parameters": True}, lambda ddp: None, "find_unused_parameters=True"),
        ({}, lambda ddp: ddp.register_comm_hook(None, _own_hook), "a communication hook of one's own"),
        (
            {},
            lambda ddp: ddp.register_comm_hook(dist.new_group([0]), default_hooks.allreduce_hook),
            "a communication hook that averages over another process group",
        ),
        ({}, lambda ddp: setattr(ddp, "require_manual_backward_finalization", True), "require_manual_backward"),
    ],
)
def test_what_does_not_work_is_refused_by_name(under_compiled_autograd, settings, prepare, named):
    with pytest.raises(NotImplementedError, match=f"{named}.* does not work under compiled autograd"):
        under_compiled_autograd(prepare, **settings)


def test_delayed_parameters_are_refused(fake_group):
    module = Parts()
    delayed = [("b.weight", module.b.weight)]
    ddp = DistributedDataParallel(
        module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.a.weight
    )
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match="delay_all_reduce_named_params does not work under compiled autograd"),
    ):
        _plain(ddp, None, 0, 8).backward()


def test_switched_on_after_the_forward(fake_group):
    ddp = DistributedDataParallel(Parts())
    loss = _plain(ddp, None, 0, 8)
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match="compiled_autograd = True before it"),
    ):
        loss.backward()


def test_backwards_that_cannot_be_told_apart(fake_group):
    ddp = DistributedDataParallel(Parts())
    with compiled_autograd._enable(torch.compile(backend="eager")):
        with ddp.no_sync():
            first = _plain(ddp, None, 0, 8)
        second = _plain(ddp, None, 0, 8)
        with pytest.raises(RuntimeError, match="run each backward before the next forward"):
            (first + second).backward()
