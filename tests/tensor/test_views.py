"""Views: they share memory with their base, or refuse what would show that they do not."""

import pytest
import torch

from tests.ranks import run_ranks


def shared(rank, world):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(24.0).view(4, 6)
    found = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        x, want = distribute_tensor(full, mesh, [placement]), full.clone()
        for t in (x, want):
            t.t().mul_(2)
            t.unsqueeze(0).add_(1)
            t.transpose(0, 1).view(6, 4).neg_() if placement.is_replicate() or t is want else t.neg_()
            a, b = t.chunk(2, 1 if placement == Shard(0) else 0) if placement != Shard(1) else (t[:2], t[2:])
            a.zero_()
            b.mul_(3)
        found.append(torch.equal(x.full_tensor(), want))
    return found


def test_writes_through_views_reach_the_base():
    for found in run_ranks(2, shared):
        assert all(found)


def inference(rank, world):
    from torchshard import Shard, distribute_module, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 3), torch.nn.LayerNorm(3))
    x = torch.randn(5, 6)
    want = model(x)
    distribute_module(model, mesh)
    errors = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = model(distribute_tensor(x, mesh, [Shard(0)]))
            errors.append((y.full_tensor() - want).abs().max().item())
            z = y.clone()
            z.t().add_(1)
            errors.append((z.full_tensor() - want - 1).abs().max().item())
    return errors


def test_inference_mode():
    for errors in run_ranks(2, inference):
        assert max(errors) < 1e-5


def memory(rank, world):
    from torchshard import Replicate, distribute_tensor, init_device_mesh

    x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (world,)), [Replicate()])
    found = {}
    for name, call in {
        "as_strided": lambda: x.as_strided((2, 2), (1, 1)),
        "resize_": lambda: x.resize_(2, 2),
        "t_": lambda: x.t_(),
    }.items():
        try:
            found[name] = f"returned {call()}"
        except Exception as error:
            found[name] = type(error).__name__
    return found


@pytest.mark.parametrize("name", ["as_strided", "resize_", "t_"])
def test_operators_on_memory_are_refused(name):
    for found in run_ranks(1, memory):
        assert found[name] == "UnsupportedOperatorError"
