"""Backward hooks of modules in compiled regions: under compiled autograd as in eager mode, else a break with a reason."""

from pathlib import Path

import pytest
import torch
from torch import nn

from torchshard.compiler import explain
from torchshard.compiler.advice import WAYS_AROUND


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x, factor):
        return self.rest(self.first(x) * factor)


def hooked():
    """A module with hooks of all kinds, and what they saw."""
    torch.manual_seed(0)
    model, seen = Scaled(), []

    def before(name):
        def hook(module, grads):
            seen.append(("before", name, [None if g is None else g.detach().clone() for g in grads]))

        return hook

    def after(name):
        def hook(module, inputs, grads):
            seen.append(("after", name, [None if g is None else g.detach().clone() for g in (*inputs, *grads)]))

        return hook

    model.register_full_backward_hook(after("model"))
    model.first.register_full_backward_pre_hook(before("first"))
    model.first.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))
    model.first.register_full_backward_hook(after("first"))
    model.first.register_full_backward_hook(lambda module, inputs, grads: tuple(g * 3 for g in inputs))
    model.rest.register_full_backward_hook(after("rest"))
    model.rest[0].register_full_backward_pre_hook(before("inner"))
    return model, seen


def test_hooks_run_as_in_eager_mode():
    x = torch.arange(8.0).reshape(2, 4)
    (plain, wanted), (model, seen) = hooked(), hooked()
    xs = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(xs[0], 3).sum().backward()
    with torch._dynamo.config.patch(compiled_autograd=True):

        @torch.compile(backend="aot_eager")
        def backward(loss):
            loss.backward()

        loss = torch.compile(model, backend="aot_eager", fullgraph=True)(xs[1], 3).sum()
        backward(loss)
    assert [(kind, name, len(grads)) for kind, name, grads in seen] == [
        (kind, name, len(grads)) for kind, name, grads in wanted
    ]
    for (_, name, got), (_, _, expected) in zip(seen, wanted, strict=True):
        for a, b in zip(got, expected, strict=True):
            assert (a is None) == (b is None), name
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(xs[1].grad, xs[0].grad)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_without_compiled_autograd_the_break_is_named():
    model, _ = hooked()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Module-level backwards hooks require compiled autograd"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 4), 3)
    plan = explain(model, torch.ones(2, 4), 3)
    assert any("Module-level backwards hooks" in found.kind for found in plan.breaks)
    assert "compiled_autograd = True" in str(plan)


def test_the_guide_lists_every_known_break():
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "regions.md").read_text()
    assert not [advice for advice in WAYS_AROUND.values() if advice not in guide]
