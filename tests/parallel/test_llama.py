"""A Llama under tensor, sequence and data parallelism: loss, gradients and five AdamW steps of a single process."""

import pytest
import torch

from tests.parallel.llama import Config, Llama, loss, plan
from tests.ranks import run_ranks

STEPS, BATCH = 5, 4


def batches(config, time):
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, config.vocabulary, (STEPS, 2, BATCH, time), generator=g)


def optimizer_of(model):
    # A smaller eps would have Adam take the sign of a gradient that is only rounding for a signal.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def relative(got, want):
    full = got.full_tensor() if hasattr(got, "full_tensor") else got
    assert full.shape == want.shape
    return (full - want).abs().max().item() / max(1.0, want.abs().max().item())


def train(rank, world, kind, tied, time):
    from torchshard import fallback, init_device_mesh
    from torchshard.parallel import loss_parallel, parallelize_module

    config = Config(tied=tied)
    torch.manual_seed(0)
    plain, model = Llama(config), Llama(config)
    model.load_state_dict(plain.state_dict())
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan(kind))
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    ours, theirs = optimizer_of(model), optimizer_of(plain)
    errors = {}
    with fallback("error"):
        for step, (x, y) in enumerate(batches(config, time)):
            want = loss(plain(x), y)
            want.backward()
            with loss_parallel():
                got = loss(model(x), y)
                got.backward()
            errors[f"loss {step}"] = relative(got, want)
            for name, p, q in zip(names, model.parameters(), plain.parameters(), strict=True):
                errors[f"gradient {step} {name}"] = relative(p.grad, q.grad)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    for name, p, q in zip(names, model.parameters(), plain.parameters(), strict=True):
        errors[f"parameter {name}"] = relative(p, q)
    return max((e, name) for name, e in errors.items())


@pytest.mark.parametrize(
    ("kind", "world", "tied", "time"),
    [
        ("tp", 2, False, 7),
        ("sp", 2, True, 8),
        ("dtensor", 2, False, 7),
        ("tp", 4, True, 6),
        ("sp", 4, False, 8),
        ("dtensor", 4, True, 7),
    ],
)
def test_training_equals_one_process(kind, world, tied, time):
    for error, name in run_ranks(world, train, kind, tied, time, timeout=200):
        assert error < 2e-5, name
