"""Plans of models, played; what a model computes, measured. The arithmetic is tested in tests/test_simulation.py."""

import re

import pytest
import torch
from torch import nn

from benchmarks import slow_link
from tests.compiler.models import batch, make
from torchshard.compiler import explain, measure, simulate, split_backend
from torchshard.ddp import DistributedDataParallel
from torchshard.simulation import Link, StepTimes


def test_plans_of_any_kind():
    model, x = make("mlp"), batch("mlp", 8)[0]
    plan = explain(model, x, bucket_cap_mb=0.005)
    backend = split_backend(0.005, 0.005, inner="eager")
    torch.compile(model, backend=backend)(x)
    for given in (plan, plan.buckets, backend.last_plan):
        step = simulate(given, world_size=16, bandwidth=1e9, latency=1e-5, times=StepTimes(1e-3, 2e-3))
        assert step.nbytes == sum(4 * p.numel() for p in model.parameters())
        assert step.seconds == pytest.approx(step.compute + step.exposed())
    nodes = simulate(
        plan, world_size=4096, bandwidth=1e9, algorithm="tree", ranks_per_node=8, inside=Link(1e11), times=None
    )
    assert nodes.exposed() == pytest.approx(nodes.seconds)


@pytest.mark.parametrize(
    "how", [lambda m: m.compile(backend="eager") or m, lambda m: torch.compile(m, backend="eager")]
)
@pytest.mark.parametrize("wrap", [lambda module: module, DistributedDataParallel])
def test_times_and_plans_have_the_same_names(fake_group, wrap, how):
    names, x = set(dict(make("plain").named_parameters())), batch("plain", 2)[0]
    for form in (how(wrap(make("plain"))), wrap(how(make("plain")))):
        assert set(measure(form, x, repeat=1).ready) == names == {n for b in explain(form, x).buckets for n in b.params}


def test_times_of_something_else():
    """None that fits is an error; where all fit that are there, the rest comes evenly, as documented."""
    plan = explain(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4), bucket_cap_mb=0)

    def begins(**ready):
        times = StepTimes(0.0, 8.0, {name.replace("__", "."): at for name, at in ready.items()})
        step = simulate(plan, world_size=2, bandwidth=1e9, times=times)
        return {s.lane: s.start for s in step.spans}["bucket 0"]

    assert plan.buckets[0].params == ("1.weight",)
    assert begins(module___orig_mod__1__weight=3.0) == begins(**{"1__weight": 3.0}) == 3.0
    assert begins() == begins(**{"0__bias": 7.0}) == 8.0 * 64 / 160
    with pytest.raises(ValueError, match=r"given of blocks\.1\.weight, the plan has 1\.weight \.\. 0\.bias \(4\)"):
        begins(blocks__1__weight=3.0)
    with pytest.warns(UserWarning, match=r"no time is given of 0\.weight, 1\.bias, 0\.bias, .* the plan has no other;"):
        assert begins(other=1.0, **{"1__weight": 3.0}) == 3.0


class Slow(nn.Module):
    """The gradient of `late` comes after half of the backward."""

    def __init__(self):
        super().__init__()
        self.late, self.early, self.unused = nn.Linear(256, 256), nn.Linear(256, 8), nn.Linear(2, 2)
        self.seen = nn.Buffer(torch.zeros(()))
        self.drop = nn.Dropout()

    def forward(self, x):
        self.seen += 1
        x = self.late(x)
        for _ in range(20):
            x = torch.tanh(x)
        return {"out": self.early(self.drop(x)), "count": len(x)}


def test_measured_times():
    model, x = Slow(), torch.randn(256, 256)
    model(x)["out"].sum().backward()
    grads, state = [p.grad for p in model.parameters()], torch.get_rng_state()
    times = measure(model, x, repeat=3)
    assert set(times.ready) == {"late.weight", "late.bias", "early.weight", "early.bias"}
    assert times.forward > 0
    assert 0 < times.ready["early.weight"] < times.ready["late.weight"] <= times.backward
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.seen == 1
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    own = measure(model, x, repeat=1, loss=lambda out: out["out"].square().mean())
    assert own.ready.keys() == times.ready.keys()


def test_mistakes_in_measuring():
    with pytest.raises(ValueError, match="repeat=0 measures nothing"):
        measure(Slow(), torch.randn(2, 256), repeat=0)
    for model, loss, got in [
        (Slow(), lambda out: torch.zeros(()), "Slow with requires_grad, got float32[2, 8] with requires_grad, int"),
        (Slow().requires_grad_(False), None, "Slow with requires_grad, got float32[2, 8], int"),
        (nn.ReLU(), None, "ReLU with requires_grad, got float32[2, 256]"),
        (Largest(256, 4), None, "Largest with requires_grad, got int64[2]"),
    ]:
        said = f"measure: the loss has no gradient: expected it to depend on an output of {got}"
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            measure(model, torch.randn(2, 256), loss=loss)


class Largest(nn.Linear):
    """No output that has a gradient."""

    def forward(self, x):
        return super().forward(x).argmax(-1)


def test_complex_outputs_are_measured():
    times = measure(nn.Linear(4, 4, dtype=torch.complex64), torch.randn(2, 4, dtype=torch.complex64), repeat=1)
    assert set(times.ready) == {"weight", "bias"}


def test_a_model_without_parameters_can_be_measured():
    times = measure(nn.ReLU(), torch.randn(2, 256, requires_grad=True))
    assert times.forward > 0
    assert times.ready == {}


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_measured_steps_over_a_slow_link(world):
    """The link is known from two all-reduces, compute from `measure`; the paper is right within a quarter."""
    if reason := slow_link.why_not():
        pytest.skip(reason)
    for cap, (measured, played, compute) in slow_link.run_on_slow_link(500, world, "tests.compiler.slow:steps")[
        0
    ].items():
        error = played / measured - 1
        print(
            f"{world} ranks, {cap} MiB: measured {measured:.3f} s, on paper {played:.3f} s ({error:+.0%}), compute {compute:.3f} s"
        )
        assert abs(error) < 0.25
