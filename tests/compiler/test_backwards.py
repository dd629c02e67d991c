"""Backwards that are not one for each forward; and what a user changes between two of them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from tests.compiler.models import batch, loss_of
from tests.compiler.trial import Trial, check_on_each_rank
from tests.older import known


def _plain(model, module, rank, size):
    x, y = batch("plain", size + rank)
    return loss_of(model(x), y)


def _counts(steps):
    return [tuple(counts) for _, *counts in steps]


# ---------------------------------------------------------------------------------------------- for other gradients


def _asking(ranks):
    """An objective before which some ranks ask for the gradients of inputs, or of parameters, alone."""

    def objective(model, module, rank, size):
        x, y = batch("plain", size + rank)
        if model is not module and rank in ranks:
            x.requires_grad_()
            torch.autograd.grad(model(x).sum(), [x])
            torch.autograd.grad(model(x).sum(), [*module.parameters()])
            model(x).sum().backward(inputs=[x])
        return loss_of(model(x.detach()), y)

    return objective


def _elsewhere(rank, world):
    found = []
    for ranks, settings in (
        ([0, 1], {}),
        ([0], {"find_unused_parameters": True}),
        ([0, 1], {"static_graph": True}),
        ([1], {"gradient_as_bucket_view": True}),
    ):
        trial = Trial(rank, world, **settings)
        found.append([trial.step(_asking(ranks)) for _ in range(5)])
    return found


def _what_is_no_backward_of_parameters_reduces_nothing(found):
    for steps in found:
        assert all(worst < 1e-5 for worst, *_ in steps), found
        assert _counts(steps)[2:] == [(6, 0, 0)] * 3, found


# ---------------------------------------------------------------------------------------------- several for a forward


class Heads(nn.Module):
    """Two outputs, of a graph each."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(32, 64)

    def forward(self, x):
        y = self.a(x)
        torch._dynamo.graph_break()
        return y, self.b(x)


def _by_head(order):
    def objective(model, module, rank, size):
        heads = model(batch("plain", size + rank)[0])
        return tuple(heads[i].square().mean() for i in order)

    return objective


def _one_by_one(rank, world):
    """The heads' backwards in one order, and in the other; with gradients there or not."""
    found = []
    for settings in ({"bucket_cap_mb": 0.001}, {"bucket_cap_mb": 25}, {"bucket_cap_mb": "auto"}):
        for to_none in (True, False):
            for views in (True, False):
                trial = Trial(rank, world, make=Heads, to_none=to_none, gradient_as_bucket_view=views, **settings)
                found.append([trial.step(_by_head((k > 2, k < 3))) for k in range(6)])
    return found


def _each_output_has_its_backward(found):
    for steps in found:
        assert all(worst < 1e-5 for worst, *_ in steps), found


def _twice(model, module, rank, size):
    return tuple(_plain(model, module, rank, size + 8 * k) for k in range(2))


def _with_precision(rank, world):
    """Two forwards, then a backward of each, of parameters in lower precision."""
    found = []
    for reduce_dtype in (None, torch.float32):
        for to_none in (True, False):
            precision = _MixedPrecision(torch.bfloat16, reduce_dtype)
            trial = Trial(rank, world, to_none=to_none, mixed_precision=precision)
            found.append([trial.step(_twice) for _ in range(4)])
    return found


def _later_ones_find_full_precision(found):
    assert all(worst < 2e-2 for steps in found for worst, *_ in steps), found


# ---------------------------------------------------------------------------------------------- changed in between


class Convolution(nn.Module):
    """Weights that may be stored channels last."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def _image(model, module, rank, size):
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    return model(images).square().mean()


def _stored_otherwise(rank, world):
    """Parameters whose strides change, with gradients there or not; in compiled graphs that notice it, and without."""
    found = []
    for views in (True, False):
        for to_none in (True, False):
            for compiled in (True, False) if known("other strides") else (False,):
                trial = Trial(
                    rank, world, make=Convolution, to_none=to_none, gradient_as_bucket_view=views, bucket_cap_mb=25
                )
                if not compiled:
                    trial.model = trial.ddp
                steps = [trial.step(_image) for _ in range(3)]
                trial.ddp.to(memory_format=torch.channels_last)
                steps += [trial.step(_image) for _ in range(3)]
                found.append((views, to_none, compiled, steps))
    return found


def _gradients_follow_the_strides(found):
    for *case, steps in found:
        assert all(worst < 1e-5 for worst, *_ in steps), (case, steps)


def _converted(rank, world):
    """Another dtype, and the first one again."""
    found = []
    for views in (True, False):
        trial = Trial(rank, world, gradient_as_bucket_view=views)
        for dtype in (torch.float32, torch.float64, torch.float32):
            for model in (trial.ddp, trial.reference):
                model.zero_grad()
                model.to(dtype)

            def objective(model, module, rank, size, dtype=dtype):
                x, y = batch("plain", size + rank)
                return loss_of(model(x.to(dtype)), y.to(dtype))

            found.append([trial.step(objective) for _ in range(6)])
    return found


def _converted_parameters_are_reduced_in_the_graph(found):
    for steps in found:
        assert all(worst < 1e-5 for worst, *_ in steps), found
        assert _counts(steps)[5] == (6, 0, 0), found  # other graphs, buckets laid out anew


def _substituted(rank, world):
    """A graph made for other parameters than the wrapper's serves for its own."""
    trial = Trial(rank, world)
    others = {f"_orig_mod.{n}": nn.Parameter(p.detach().clone()) for n, p in trial.ddp.named_parameters()}
    torch.func.functional_call(trial.model, others, (batch("plain", 8)[0],)).sum().backward()
    return [trial.step(_plain) for _ in range(4)]


def _graphs_made_for_others_reduce_too(steps):
    assert all(worst < 1e-5 for worst, *_ in steps), steps
    assert _counts(steps)[2:] == [(6, 0, 0)] * 2


TRIALS = {
    _elsewhere: _what_is_no_backward_of_parameters_reduces_nothing,
    _one_by_one: _each_output_has_its_backward,
    _stored_otherwise: _gradients_follow_the_strides,
    _converted: _converted_parameters_are_reduced_in_the_graph,
    _substituted: _graphs_made_for_others_reduce_too,
    _with_precision: _later_ones_find_full_precision,
}


def test_trials():
    """One start of the ranks for all."""
    check_on_each_rank(TRIALS)
