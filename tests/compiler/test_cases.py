"""What models do in a forward, and what users do around it: gradients right, and reduced in the graph where they can be."""

import functools
import gc
import logging
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.compiler.models import BatchNormed, Parts, Strided, batch, loss_of
from tests.compiler.traced import traced
from tests.compiler.trial import Trial
from tests.older import require
from tests.plain_graphs import compiled_frames
from tests.ranks import run_ranks
from torchshard.compiler import ingraph
from torchshard.compiler.options import parse
from torchshard.compiler.rewrite import BucketPass
from torchshard.ddp.cutting import reduces_gradients


def _plain(model, module, rank, size):
    x, y = batch("plain", size + rank)
    return loss_of(model(x).float(), y)


def _autocast(model, module, rank, size):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _plain(model, module, rank, size)


def _low(model, module, rank, size):
    return _plain(lambda x: model(x.bfloat16()), module, rank, size)


def _keep_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Reentrant(Parts):
    def forward(self, x):
        x = F.gelu(self.a(x))
        return self.c(checkpoint(lambda t: F.gelu(self.b(t)), x, use_reentrant=True))


class Selective(Parts):
    def forward(self, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
        x = F.gelu(self.a(x))
        return self.c(checkpoint(lambda t: F.gelu(self.b(t)), x, use_reentrant=False, context_fn=contexts))


class Cond(Parts):
    def forward(self, x):
        x = F.gelu(self.a(x))
        x = torch.cond(x.sum() > 0, lambda t: self.b(t).cos(), lambda t: self.b(t).sin(), (x,))
        return self.c(x)


class Looks(Parts):
    """The second graph returns nothing but views, the first of them of its input."""

    def forward(self, x):
        h = F.gelu(self.a(x))
        torch._dynamo.graph_break()
        z = self.c(F.gelu(self.b(h)))
        return h.flatten(), z[:, :16], z[:, 16:]


def _looks(model, module, rank, size):
    return _plain(lambda x: torch.cat(model(x)[1:], 1), module, rank, size)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(16, 32, sparse=True), nn.Linear(32, 32)

    def forward(self, x):
        return self.out(x + self.table((x[:, 0] * 4).long().clamp(0, 15)))


STEPS = {  # module, objective, worst error, gradients in the graph
    "reentrant": (Reentrant, _plain, 1e-5, None),
    "selective": (Selective, _plain, 1e-5, 6),
    "cond": (Cond, _plain, 1e-5, 6),
    "views after a break": (Looks, _looks, 1e-5, 6),
    "sparse embedding": (Sparse, _plain, 1e-5, 2),
    "batch norm": (BatchNormed, _plain, 1e-4, 8),
    "autocast": (Parts, _autocast, 3e-2, 6),
    "bfloat16": (lambda: Parts().bfloat16(), _low, 3e-2, 6),
}


@pytest.fixture
def trial(fake_group):
    """Makes trials on a fake group: gradients are compared with this rank's share of the average."""
    return functools.partial(Trial, 0, fake_group.size(), alone=True)


@pytest.mark.parametrize("name", STEPS)
def test_forwards_of_many_kinds(trial, name):
    make, objective, limit, in_graph = STEPS[name]
    made = trial(make=make)
    steps = [made.step(objective) for _ in range(3)]
    assert all(worst < limit for worst, *_ in steps), steps
    if in_graph is not None:
        sparse = sum(p.grad.is_sparse for p in made.ddp.parameters())
        assert steps[2][1:] == (in_graph, sparse, 0), steps


def test_parameters_in_another_order_of_memory(trial):
    """Inductor must not hand over copies of slots: as views of the buckets, gradients would not have their values."""
    made = trial(how="inductor", make=Strided, gradient_as_bucket_view=True)
    steps = [made.step(_plain) for _ in range(3)]
    assert all(worst < 1e-5 for worst, *_ in steps), steps
    assert steps[2][1:] == (5, 0, 0)
    assert all(p.grad.stride() == p.stride() for p in made.ddp.parameters())


def test_parameters_that_are_frozen_and_thawed(trial):
    require("parameters that are thawed")
    made = trial(find_unused_parameters=True)
    steps = []
    for trained, count in ((True, 3), (False, 6), (True, 9)):
        for module in (made.ddp.module, made.reference):
            module.b.requires_grad_(trained)
        steps.append([made.step(_plain) for _ in range(count)])
    assert all(worst < 1e-5 for part in steps for worst, *_ in part)
    # Each time in the graph again, a layout later.
    assert [part[-1][1:] for part in steps] == [(6, 0, 0), (4, 0, 0), (6, 0, 0)]


def test_two_models_of_one_class_take_turns(trial):
    trials = [trial(), trial(gradient_as_bucket_view=True)]
    for p in trials[1].ddp.parameters():
        with torch.no_grad():
            p.mul_(2)
    for p in trials[1].reference.parameters():
        with torch.no_grad():
            p.mul_(2)
    steps = [[made.step(_plain) for made in trials] for _ in range(3)]
    assert all(worst < 1e-5 for pair in steps for worst, *_ in pair)
    assert [counts for _, *counts in steps[-1]] == [[6, 0, 0]] * 2


class _Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def test_more_sizes_than_dynamo_compiles_for(trial):
    """The rest runs eagerly, which Dynamo says once, and is reduced by hooks."""
    heard, log = _Heard(), logging.getLogger("torch._dynamo")
    log.addHandler(heard)
    with torch._dynamo.config.patch(recompile_limit=2):
        made = trial(compile={"dynamic": False})
        steps = [made.step(_plain, size) for size in (8, 8, 10, 12, 14, 14, 8)]
    log.removeHandler(heard)
    assert all(worst < 1e-5 for worst, *_ in steps)
    assert all(in_graph + by_hook == 6 for _, in_graph, by_hook, _ in steps)
    assert steps[1][1:] == (6, 0, 0)
    assert steps[-2][1:] == (0, 6, 0)
    assert sum("recompile_limit" in text for text in heard.messages) == 1


def test_a_whole_step_with_its_optimizer_under_one_compile(trial, monkeypatch):
    made, compiled = trial(), compiled_frames(monkeypatch)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (made.ddp, made.reference)]

    @torch.compile(backend=traced)
    def train(x, y):
        optimizers[0].zero_grad()
        loss = F.mse_loss(made.ddp(x), y)
        loss.backward()
        optimizers[0].step()
        return loss

    for _ in range(4):
        train(*batch("plain", 8))
        optimizers[1].zero_grad()
        (_plain(made.reference, None, 0, 8) / made.world).backward()
        optimizers[1].step()
    for p, q in zip(made.ddp.parameters(), made.reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert (made.ddp.reducer.counters.in_graph, made.ddp.reducer.counters.by_hook) == (18, 6)
    assert {name for ours, name in compiled if ours} == {"_call_module"}  # no hook


def test_double_backward_is_an_error_of_torch(trial):
    made = trial()
    for _ in range(3):
        made.step(_plain)
    params = list(made.ddp.parameters())

    def twice():
        grads = torch.autograd.grad(_plain(made.model, None, 0, 8), params, create_graph=True)
        sum(g.sum() for g in grads).backward()

    with pytest.raises(RuntimeError, match=r"create_graph|double backward"):
        twice()
    gc.collect()  # what failed is an outstanding forward as long as anybody holds its graph
    after = made.step(_plain)
    assert after[0] < 1e-5
    assert after[1] + after[2] == 6


@pytest.mark.parametrize("make", [Parts, lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))])
def test_fullgraph_is_one_graph_each_way(trial, make, monkeypatch):
    graphs, backwards = [], []

    @reduces_gradients
    def counting(graph, inputs):
        graphs.append(graph)
        return traced(graph, inputs)

    def inserting(rewrite, graph, insert=BucketPass.__call__):
        backwards.append(graph)
        insert(rewrite, graph)

    monkeypatch.setattr(BucketPass, "__call__", inserting)
    made = trial(make=make)
    made.model = torch.compile(made.ddp, backend=counting, fullgraph=True)
    steps = [made.step(_plain) for _ in range(3)]
    assert (len(graphs), len(backwards)) == (1, 1)
    assert steps[2][0] < 1e-5
    assert steps[2][1:] == (len(list(made.ddp.parameters())), 0, 0)


def test_cuda_graphs_are_refused():
    module = Parts()
    reducer = types.SimpleNamespace(
        names_by_id={id(p): n for n, p in module.named_parameters()}, device=torch.device("cuda"), policy=None
    )
    for mode, options in (("reduce-overhead", None), (None, {"triton.cudagraphs": True})):
        with pytest.raises(NotImplementedError, match=r"CUDA graphs .* cannot hold the reduction of gradients"):
            ingraph.compile_graph(None, list(module.parameters()), reducer, parse(mode, options))


def _run_either_order(rank, world):
    """compile(wrap(m)) and wrap(compile(m)): gradients after each of four steps, and what was counted."""
    from tests.compiler.traced import traced
    from torchshard.ddp import DistributedDataParallel

    found = []
    for inside in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Parts()
        ddp = DistributedDataParallel(torch.compile(module, backend=traced) if inside else module, bucket_cap_mb=0.01)
        model, grads = ddp if inside else torch.compile(ddp, backend=traced), []
        for size in (8, 8, 12, 8):
            ddp.zero_grad()
            _plain(model, module, rank, size).backward()
            grads += [p.grad.clone() for p in module.parameters()]
        found.append((grads, str(ddp.reducer.counters), [b.nbytes for b in ddp.reducer.plan]))
    (ours, *counted), (other, *counted_too) = found
    return all(map(torch.equal, ours, other)), counted, counted_too


def test_either_order_of_wrapping_and_compiling():
    for equal, counted, counted_too in run_ranks(2, _run_either_order):
        assert equal
        assert counted == counted_too
        assert "in_graph=18" in counted[0]


def _run_late_on_one_rank(rank, world):
    from torchshard.errors import RankMismatchError

    trial = Trial(rank, world, process_group=dist.new_group(timeout=timedelta(seconds=60)))
    for _ in range(3):
        trial.step(_plain)
    try:
        for _ in range(2):
            loss = _plain(trial.model, None, rank, 8)
            (loss + trial.ddp.module.b.weight.square().sum() if rank else loss).backward()
    except RankMismatchError as error:
        return str(error)
    return ""


def test_what_one_rank_alone_has_to_reduce_is_an_error_on_all():
    """Rank 1 has a second source of gradient, and so one collective more than rank 0."""
    for message in run_ranks(2, _run_late_on_one_rank):
        assert "ranks 0 and 1 have different buckets" in message
        assert "late: b.weight" in message
