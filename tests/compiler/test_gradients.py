"""Gradients equal those of one process on the whole batch, and are reduced in the graph."""

import copy
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.compiler.models import batch, error, loss_of, make, train_step
from tests.ranks import run_ranks

IN_GRAPH = {  # of the parameters with a gradient, those that only graphs use
    "mlp": 8,
    "normed": 8,
    "gpt": 29,
    "tied gpt": 28,
    "plain": 6,
    "tied": 5,
    "checkpoint": 6,
    "break": 4,
    "both": 4,
    "unused": 4,
    "shared": 5,
    "strided": 5,
    "picked": 2,
}
CAP = 0.01  # MiB: several buckets in each model


def train(rank, world, how, names, sizes=(8, 8, 8), parts=1, zero=True, settings=None):
    """Train each model for a step per size; worst error and what was counted in each."""
    from tests.compiler.traced import BACKENDS
    from torchshard.ddp import DistributedDataParallel

    warnings.filterwarnings("error", message="backend .torchshard.")
    answers = {}
    for name in names:
        module = make(name)
        reference = copy.deepcopy(module)
        unused = name in ("tied", "unused")
        ddp = DistributedDataParallel(module, bucket_cap_mb=CAP, find_unused_parameters=unused, **(settings or {}))
        model = torch.compile(ddp, **BACKENDS[how]())
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (ddp, reference)]
        answers[name] = []
        for size in sizes:
            for optimizer in optimizers:
                if zero is not None:
                    optimizer.zero_grad(set_to_none=zero)
            x, y = batch(name, size)
            loss_of(reference(x), y).backward()
            before = copy.copy(ddp.reducer.counters)
            train_step(ddp, model, name, size, rank, world, parts)
            after = ddp.reducer.counters
            counts = after.in_graph - before.in_graph, after.by_hook - before.by_hook, after.late - before.late
            answers[name].append((error(ddp, reference), *counts))
            if zero is not None:
                for optimizer in optimizers:
                    optimizer.step()
    return answers


def check(answers, expected, settled=2):
    for name, steps in answers.items():
        assert all(worst < 1e-5 for worst, *_ in steps), (name, steps)
        for _, in_graph, _, late in steps[settled:]:
            assert (in_graph, late) == (expected[name], 0), (name, steps)


@pytest.mark.parametrize(
    "names",
    [["mlp", "normed", "tied", "unused", "shared", "strided", "picked"], ["gpt", "tied gpt", "checkpoint", "both"]],
)
def test_every_model(names):
    for answers in run_ranks(2, train, "traced", names):
        check(answers, IN_GRAPH)


@pytest.mark.full
@pytest.mark.parametrize("name", IN_GRAPH)
def test_every_model_with_inductor(name):
    for answers in run_ranks(2, train, "inductor", [name], timeout=280):
        check(answers, IN_GRAPH)


def test_split():
    names = ["mlp", "tied gpt", "both", "unused"]
    for answers in run_ranks(2, train, "split", names):
        check(answers, dict.fromkeys(names, 0))


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_worlds(world):
    for answers in run_ranks(world, train, "traced", ["plain"], (12, 12, 12)):
        check(answers, IN_GRAPH)


def _accumulate(rank, world):
    """All wrappers go through one compiled graph, which serves any of them."""
    return [
        train(
            rank,
            world,
            "traced",
            ["plain", "break", "shared"],
            (8, 8, 8, 16),
            parts,
            zero,
            {"gradient_as_bucket_view": views},
        )
        for parts, zero in ((1, True), (1, False), (1, None), (2, True), (2, False))
        for views in (False, True)
    ]


def test_accumulation():
    """Gradients that are there before the reduction: from no_sync, from before, or zeros."""
    for answers in run_ranks(2, _accumulate):
        for answer in answers:
            check(answer, IN_GRAPH)


@pytest.mark.copied
@pytest.mark.parametrize(
    "names",
    [
        ["normed", "tied gpt", "both", "strided"],
        pytest.param(["mlp", "checkpoint", "shared", "picked"], marks=pytest.mark.full),
    ],
)
def test_small_gradients_are_copied(names):
    """As they are outside of tests: none is written to its slot by the operator that makes it."""
    for answers in run_ranks(2, train, "traced", names):
        check(answers, IN_GRAPH)


@pytest.mark.copied
@pytest.mark.full
def test_accumulation_of_copied_gradients():
    for answers in run_ranks(2, _accumulate):
        for answer in answers:
            check(answer, IN_GRAPH)


def _of_one_size(rank, world):
    """Buckets of small gradients alone, as large as what the graph makes after them."""
    from torchshard.ddp import DistributedDataParallel

    module = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(4)])
    reference, x = copy.deepcopy(module), torch.randn(4, 8)
    model = DistributedDataParallel(module, bucket_cap_mb=0.0001)
    compiled = torch.compile(model, backend="torchshard")
    for _ in range(2):
        model.zero_grad()
        compiled(x).square().sum().backward()
    reference(x).square().sum().backward()
    assert model.reducer.counters.in_graph == 4
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.copied
def test_inductor_does_not_use_the_memory_of_a_bucket_again():
    run_ranks(1, _of_one_size)


@pytest.mark.parametrize("name", ["plain", pytest.param("gpt", marks=pytest.mark.full)])
def test_dynamic_batch_sizes(name):
    # The graph of other sizes may fill buckets of its own, to which ranks come after the fourth backward.
    for answers in run_ranks(2, train, "traced", [name], (8, 8, 12, 16, 8, 12, 8), timeout=240):
        check(answers, IN_GRAPH, settled=5)


@pytest.mark.parametrize("fast", [True, False], ids=("fast", "slow"))
@pytest.mark.parametrize("factors", [None, (1.0, 0.0), (0.5, 0.0), (0.5, 0.25)], ids=str)
def test_gradients_that_are_copied(factors, fast, monkeypatch):
    """In one pass where they are large, all others together; to slots of whatever strides."""
    from torchshard import _torch
    from torchshard.compiler import ops

    launched = []
    call = SimpleNamespace(
        factors=lambda bucket, slot: factors,
        common_factors=lambda bucket: factors if factors and factors[1] == 0.0 else None,
        launch=lambda bucket, views, results: launched.append(bucket),
    )
    monkeypatch.setattr(ops, "current_call", lambda: call if factors else None)
    torch.manual_seed(0)
    flat, gradients = torch.randn(40000), [torch.randn(64, 300), torch.randn(30), torch.randn(8, 9), torch.randn(0)]
    parts = flat.split([19200, 30, 72, 0, 20698])[:4]
    views = [parts[0].view(300, 64).t(), parts[1], parts[2].view(8, 9), parts[3]]
    alpha, beta = factors or (1.0, 0.0)
    expected = [alpha * new + beta * old for new, old in zip(gradients, views, strict=True)]
    kept = flat[19302:].clone()
    with nullcontext() if fast else _torch.without_fast_paths():
        torch.ops.torchshard.launch_bucket(flat, torch.empty(1), views, gradients, [0, 1, 2, 3], 0, 7)
    for view, values in zip(views, expected, strict=True):
        torch.testing.assert_close(view, values, rtol=0, atol=1e-6 if beta else 0)
    assert torch.equal(flat[19302:], kept)
    assert launched == ([7] if factors else [])
