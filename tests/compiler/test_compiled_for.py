"""Graphs serve the wrapper for which they were compiled; for one with other sizes, or with none, they are made anew."""

import contextlib
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.compiler.models import Parts, batch, loss_of
from tests.compiler.traced import BACKENDS
from tests.compiler.trial import Trial, check_on_each_rank
from tests.models import mlp
from torchshard import _torch
from torchshard.ddp import DistributedDataParallel, active
from torchshard.ddp.buckets.layouts import Events
from torchshard.simulation import LinkSpeed, StepTimes


class Recorder:
    """An inner compiler that compiles nothing; how many graphs it was given, and how often each was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, graph, inputs):
        number = len(self.calls)
        self.calls.append(0)

        def run(*args):
            self.calls[number] += 1
            return graph.forward(*args)

        return run

    def options(self, **more):
        """For torch.compile."""
        return {"options": {"reduction": "split", "inner": self, **more}}


def _plain(model, module, rank, size):
    x, y = batch("plain", size + rank)
    return loss_of(model(x), y)


def _wide(model, module, rank, size):
    return model(torch.randn(size, 256, generator=torch.Generator().manual_seed(rank))).square().mean()


# ---------------------------------------------------------------------------------------------- sizes yet to be chosen


def _timed(rank):
    """Gradients come evenly; so fast on all ranks but the first that one bucket would be best."""

    def times(events, came):
        backward = 1e-6 if rank else 1.0
        return StepTimes(backward=backward, ready={g.name: backward * k / len(came) for k, g in enumerate(came)})

    return mock.patch.object(Events, "times", times)


def _chosen(rank, world):
    inner = Recorder()
    trial = Trial(rank, world, make=lambda: mlp(256, 4), compile=inner.options(), how="inductor", bucket_cap_mb="auto")
    trial.ddp.reducer.choose_sizes(LinkSpeed(latency=1e-9, bandwidth=1e6))
    with trial.ddp.no_sync():  # nothing can be learned of a backward that is not reduced
        _wide(trial.model, None, rank, 8).backward()
    found = list[tuple[float, int]]()
    with _timed(rank):
        found += [(trial.step(_wide)[0], len(inner.calls)) for _ in range(3)]
    return found, trial.ddp.reducer.policy.cap, [bucket.params for bucket in trial.ddp.reducer.plan]


def _pieces_are_cut_by_what_rank_0_has_seen(answer):
    steps, cap, plan = answer
    assert all(worst < 1e-5 for worst, _ in steps)
    assert [compiled for _, compiled in steps] == [0, 4, 4]
    assert cap == 4 * 256 * 257  # of one layer
    assert len(plan) == 4


def _same_sizes(rank, world):
    """Another wrapper with these sizes needs nothing compiled; and nothing is to be cut without a backward."""
    inner = Recorder()
    trials = [Trial(rank, world, make=lambda: mlp(256, 4), compile=inner.options(), how="inductor") for _ in range(2)]
    worst = [trial.step(_wide)[0] for trial in trials for _ in range(2)]
    compiled = [len(inner.calls)]
    with torch.no_grad():
        for trial in trials:
            trial.model(torch.ones(8, 256))
            compiled.append(len(inner.calls))
    return worst, compiled


def _pieces_are_shared_by_wrappers_of_the_same_sizes(answer):
    worst, compiled = answer
    assert max(worst) < 1e-5
    assert compiled == [4, 5, 5]


# ---------------------------------------------------------------------------------------------- wrappers that differ


def _two_sizes(rank, world):
    found = []
    trials = [Trial(rank, world, how="inductor", bucket_cap_mb=cap) for cap in (25, 0.01)]
    for trial in trials * 2:
        steps = [trial.step(_plain) for _ in range(3)]
        found.append((steps, [bucket.params for bucket in trial.ddp.reducer.plan]))
    return found


def _each_wrapper_has_buckets_of_its_size(found):
    assert all(worst < 1e-5 for steps, _ in found for worst, *_ in steps)
    assert all(tuple(counts) == (6, 0, 0) for steps, _ in found for _, *counts in steps[1:])
    assert [len(plan) for _, plan in found] == [1, 2, 1, 2]


def _given_sizes(rank, world):
    """Sizes given to the compiler hold for all wrappers."""
    inner = Recorder()
    for cap in (25, "auto"):
        trial = Trial(rank, world, how="inductor", bucket_cap_mb=cap, compile=inner.options(bucket_cap_mb=0.01))
        trial.step(_plain)
    return len(inner.calls)


def _sizes_of_the_compiler_come_first(compiled):
    assert compiled == 2


def _alone(rank, world):
    """A group of one rank has nobody to wait for; one of two has, with the same sizes."""
    inner, compiled = Recorder(), []
    options = inner.options(bucket_cap_mb=0.01)
    for members in ([[0], [1]], [[0, 1]]):
        groups = [dist.new_group(ranks) for ranks in members]
        group = groups[rank] if len(groups) > 1 else groups[0]
        trial = Trial(rank, world, how="inductor", compile=options, process_group=group)
        trial.step(_plain)
        compiled.append(len(inner.calls))
    return compiled


def _graphs_of_one_rank_are_not_cut(compiled):
    assert compiled == [1, 3]


# ---------------------------------------------------------------------------------------------- before wrapping, beside


def _wrapped_later(rank, world):
    """Compiled and called, then wrapped; and wrapped around a compiled module that was not called before."""
    x, y = batch("plain", 8)
    answers = []
    for called_before in (True, False):
        for private in (True, False):
            torch._dynamo.reset()
            module = Parts()
            compiled = torch.compile(module, backend="torchshard")
            with mock.patch.object(_torch, "guard_attribute", _torch.guard_attribute if private else lambda *_: False):
                if called_before:
                    loss_of(compiled(x), y).backward()
                    module.zero_grad()
                ddp = DistributedDataParallel(compiled)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    for _ in range(3):
                        ddp.zero_grad()
                        loss_of(ddp(x), y).backward()
            said = [str(w.message) for w in caught if "backend" in str(w.message)]
            answers.append((ddp.reducer.counters.in_graph, ddp.reducer.counters.by_hook, said))
    return answers


def _what_was_compiled_before_is_made_anew(answers):
    called, (in_graph, by_hook, said), *without = answers
    assert called == (12, 6, [])
    assert without == [(12, 6, [])] * 2
    assert (in_graph, by_hook) == (0, 18)  # where Dynamo cannot be told
    assert len(said) == 1
    assert "compiled and called before it was wrapped" in said[0]


def _after_a_failure(rank, world):
    """A backward fails; then a module is compiled and called without a wrapper, and wrapped with the same sizes."""
    x, y = batch("plain", 8)
    failing = DistributedDataParallel(Parts())
    loss = loss_of(failing(x), y)
    failing.module.a.weight.register_post_accumulate_grad_hook(_fail)
    with contextlib.suppress(ArithmeticError):
        loss.backward()
    shown = active.wrapped
    module = Parts()
    compiled = torch.compile(module, backend="torchshard")
    loss_of(compiled(x), y).backward()
    ddp = DistributedDataParallel(compiled)
    for _ in range(3):
        ddp.zero_grad()
        loss_of(ddp(x), y).backward()
    return shown, ddp.reducer.counters.in_graph, ddp.reducer.counters.by_hook


def _fail(param):
    raise ArithmeticError


def _guards_see_no_wrapper_then(found):
    assert found == (False, 12, 6)


class Blocks(nn.Module):
    """Compiled blocks, which a checkpoint outside of them runs again in backward."""

    def __init__(self, reentrant, **options):
        super().__init__()
        self.blocks = nn.ModuleList([mlp(32, 2) for _ in range(3)])
        self.compiled = [torch.compile(block, **options) for block in self.blocks]
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.compiled:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _checkpointed(rank, world):
    found = []
    for reentrant in (False, True):
        torch._dynamo.reset()
        inner = Recorder()
        module = Blocks(reentrant, backend="torchshard", **inner.options())
        ddp = DistributedDataParallel(module)
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(4, 32, requires_grad=True)).sum().backward()
        found.append((len(inner.calls), sum(inner.calls)))
    return found


def _what_a_checkpoint_runs_again_is_not_compiled_again(found):
    kept, inside = found
    assert kept == (1, 18)
    assert inside == (2, 18)  # forward without gradients, backward with them


def _reduced_inside(rank, world):
    found = []
    for reentrant in (False, True):
        trial = Trial(rank, world, make=lambda reentrant=reentrant: Blocks(reentrant, **BACKENDS["traced"]()))
        trial.model = trial.ddp
        found.append([trial.step(_narrow) for _ in range(4)])
    return found


def _narrow(model, module, rank, size):
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    return model(x).square().mean()


def _what_a_checkpoint_runs_again_is_reduced_in_the_graph(found):
    for steps in found:
        assert all(worst < 1e-5 for worst, *_ in steps), found
        assert [tuple(counts) for _, *counts in steps[2:]] == [(12, 0, 0)] * 2, found


TRIALS = {
    _chosen: _pieces_are_cut_by_what_rank_0_has_seen,
    _same_sizes: _pieces_are_shared_by_wrappers_of_the_same_sizes,
    _two_sizes: _each_wrapper_has_buckets_of_its_size,
    _given_sizes: _sizes_of_the_compiler_come_first,
    _alone: _graphs_of_one_rank_are_not_cut,
    _wrapped_later: _what_was_compiled_before_is_made_anew,
    _after_a_failure: _guards_see_no_wrapper_then,
    _checkpointed: _what_a_checkpoint_runs_again_is_not_compiled_again,
    _reduced_inside: _what_a_checkpoint_runs_again_is_reduced_in_the_graph,
}


def test_trials():
    """One start of the ranks for all."""
    check_on_each_rank(TRIALS)
