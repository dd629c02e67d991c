"""Settings of the wrapper under compiled graphs: hooks, precision, uneven inputs, buffers. One start of ranks for all."""

from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel.distributed import _MixedPrecision

from tests.compiler.models import BatchNormed, Parts, batch, loss_of
from tests.compiler.trial import Trial, check_on_each_rank
from tests.models import mlp
from torchshard.ddp.buckets.layouts import Events
from torchshard.simulation import LinkSpeed, StepTimes


def _plain(model, module, rank, size):
    x, y = batch("plain", size + rank)
    return loss_of(model(x).float(), y)


def _regularised(model, module, rank, size):
    return _plain(model, module, rank, size) + module.b.weight.square().sum() + module.a.bias.sum()


def _power():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=32, start_powerSGD_iter=3)
    return state, powerSGD_hook.powerSGD_hook


HOOKS = {  # state and hook, size of buckets, worst error
    "sum": (lambda: (None, default_hooks.allreduce_hook), 0.01, 1e-5),
    "fp16": (lambda: (None, default_hooks.fp16_compress_hook), 0.01, 2e-3),
    "bf16": (lambda: (None, default_hooks.bf16_compress_hook), 0.01, 2e-2),
    "power": (_power, 25, 1e-5),  # over gloo it hangs with several buckets, under torch's wrapper as well
}


def _hooks(rank, world):
    found = {}
    for name, (make, cap, _) in HOOKS.items():
        trial = Trial(rank, world, bucket_cap_mb=cap)
        trial.ddp.register_comm_hook(*make())
        steps = [trial.step(_plain) for _ in range(4)]
        later = trial.step(_regularised) if name == "fp16" else None
        found[name] = steps, later
    return found


def _hooks_reduce_in_the_graph(found):
    for name, (steps, later) in found.items():
        assert all(worst < HOOKS[name][2] for worst, *_ in steps), (name, steps)
        assert [tuple(counts) for _, *counts in steps[1:]] == [(6, 0, 0)] * 3, name
        if later:  # casting is linear: reduced in two parts
            assert later[0] < 2e-3
            assert later[1:] == (6, 0, 2)


class _Odd(Parts):
    """Gradients between which a graph leaves gaps."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 63), nn.Linear(63, 61), nn.Linear(61, 32)


def _own(state, bucket):
    assert torch.equal(bucket.buffer(), torch.cat([g.flatten() for g in bucket.gradients()]))  # as hooks cut it
    return default_hooks.allreduce_hook(state, bucket)


def _not_linear(rank, world):
    """A hook of the user's, and other sources of gradients than the graph: from the first step on, or only later."""
    early, late = Trial(rank, world, make=_Odd), Trial(rank, world, make=_Odd)
    for trial in (early, late):
        trial.ddp.register_comm_hook(None, _own)
    steps, said = [early.step(_regularised) for _ in range(3)], ""
    late.step(_plain)
    try:
        late.step(_regularised)
    except RuntimeError as error:
        said = str(error)
    return steps, said


def _late_gradients_under_a_hook_that_is_not_linear(found):
    steps, said = found
    assert all(worst < 1e-5 for worst, *_ in steps), steps
    assert [tuple(counts) for _, *counts in steps] == [(0, 6, 0), (4, 2, 0), (4, 2, 0)]
    assert "after a compiled graph had given the gradients of a.bias, b.weight to the communication hook" in said


def _low(rank, world):
    found = []
    for reduce_dtype in (None, torch.float32):
        trial = Trial(rank, world, mixed_precision=_MixedPrecision(torch.bfloat16, reduce_dtype))
        steps = [trial.step(_plain) for _ in range(3)]
        for model, ranks in ((trial.model, [rank]), (trial.reference, range(world))):  # on top of what is there
            for other in ranks:
                (_plain(model, None, other, 12) / len(ranks)).backward()
        pairs = zip(trial.ddp.module.parameters(), trial.reference.parameters(), strict=True)
        error = max(((p.grad - q.grad).abs().max() / q.grad.abs().max()).item() for p, q in pairs)
        found.append(
            (steps, error, {p.grad.dtype for p in trial.ddp.parameters()}, trial.ddp.reducer.counters.in_graph)
        )
    return found


def _mixed_precision_in_the_graph(found):
    for steps, after, dtypes, in_graph in found:
        assert max(after, *(worst for worst, *_ in steps)) < 2e-2, found
        assert [tuple(counts) for _, *counts in steps[1:]] == [(6, 0, 0)] * 2
        assert dtypes == {torch.float32}
        assert in_graph == 18


class Odd(Parts):
    """Sizes that leave room between the slots of a bucket."""

    def __init__(self):
        super().__init__()
        self.b, self.c = torch.nn.Linear(64, 51), torch.nn.Linear(51, 32)


def _uneven(rank, world):
    """Rank r has 3 + r batches; the third one, and those after it, have gradients from outside of the graph too."""
    found = []
    for divide in (True, False):
        torch._dynamo.reset()
        trial = Trial(rank, world, make=Odd)
        for _ in range(3):
            trial.step(_plain)
        steps = []
        with trial.ddp.join(divide_by_initial_world_size=divide):
            for number in range(3 + rank):
                running = [other for other in range(world) if 3 + other > number]
                objective = _plain if number < 2 else _regularised
                steps.append(trial.step(objective, ranks=running, divisor=None if divide else len(running)))
        found.append((steps, trial.step(_plain)))
    return found


def _uneven_inputs_are_reduced_in_the_graph(found):
    for steps, after in found:
        assert all(worst < 1e-5 for worst, *_ in steps)
        assert [tuple(counts) for _, *counts in steps] == [(6, 0, 0)] * 2 + [(6, 0, 2)] * (len(steps) - 2)
        assert after[0] < 1e-5
        assert after[1:] == (6, 0, 0)


def _buffers(rank, world):
    trial = Trial(rank, world, make=BatchNormed)
    steps = [trial.step(_plain) for _ in range(3)]
    trial.ddp(batch("plain", 8)[0])
    mean = trial.ddp.module.norm.running_mean
    means = [torch.empty_like(mean) for _ in range(world)]
    dist.all_gather(means, mean)
    return steps, int(trial.ddp.module.norm.num_batches_tracked), (means[0] - means[1]).abs().max().item()


def _buffers_are_rank_0s_before_each_forward(found):
    steps, batches, apart = found
    assert all(worst < 1e-4 for worst, *_ in steps)
    assert steps[2][1:] == (8, 0, 0)
    assert batches == 4
    assert apart < 1e-6  # the last forward saw equal inputs on equal buffers


class Mapped(Parts):
    def forward(self, x):
        x = F.gelu(self.a(x))
        x = map_rows(lambda row: torch.tanh(self.b(row)), x)
        return self.c(x)


def _rows(rank, world):
    trial = Trial(rank, world, make=Mapped, how="split")
    return [trial.step(_plain) for _ in range(3)]


def _rows_in_graph(rank, world):
    trial = Trial(rank, world, make=Mapped, compile={"fullgraph": True})
    return [trial.step(_plain) for _ in range(3)]


def _mapped_rows_in_one_graph(steps):
    assert all(worst < 1e-5 for worst, *_ in steps)
    assert [counts for _, *counts in steps[1:]] == [[6, 0, 0]] * 2


def _mapped_rows_in_pieces(steps):
    assert all(worst < 1e-5 for worst, *_ in steps)


def _chosen(rank, world):
    """Sizes chosen for a link with delay and one without, after the graph was compiled; a backward of a second."""
    found = []
    for link in (LinkSpeed(latency=100.0, bandwidth=1e12), LinkSpeed(latency=1e-9, bandwidth=1e6)):
        trial = Trial(rank, world, make=lambda: mlp(256, 4), bucket_cap_mb="auto")
        trial.ddp.reducer.choose_sizes(link)
        with mock.patch.object(Events, "times", _evenly):
            steps = [trial.step(_wide) for _ in range(4)]
        found.append((steps, [bucket.params for bucket in trial.ddp.reducer.plan]))
    return found


def _evenly(events, came):
    return StepTimes(backward=1.0, ready={gradient.name: k / len(came) for k, gradient in enumerate(came)})


def _wide(model, module, rank, size):
    return model(torch.randn(size, 256, generator=torch.Generator().manual_seed(rank))).square().mean()


def _sizes_are_chosen_for_what_a_graph_was_seen_to_do(found):
    for steps, _ in found:
        assert all(worst < 1e-5 for worst, *_ in steps)
        assert [tuple(counts) for _, *counts in steps[1:]] == [(8, 0, 0)] * 3
    (_, whole), (_, parts) = found
    assert whole == [tuple(name for part in parts for name in part)]
    assert len(parts) == 5


TRIALS = {
    _hooks: _hooks_reduce_in_the_graph,
    _not_linear: _late_gradients_under_a_hook_that_is_not_linear,
    _low: _mixed_precision_in_the_graph,
    _uneven: _uneven_inputs_are_reduced_in_the_graph,
    _buffers: _buffers_are_rank_0s_before_each_forward,
    _chosen: _sizes_are_chosen_for_what_a_graph_was_seen_to_do,
    _rows: _mapped_rows_in_pieces,
    _rows_in_graph: _mapped_rows_in_one_graph,
}


def test_trials():
    """One start of the ranks for all."""
    check_on_each_rank(TRIALS)
