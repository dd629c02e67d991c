"""Styles on single modules: values, gradients and layouts, on real ranks."""

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks


class MLP(nn.Module):
    def __init__(self, width, hidden, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def worst(pairs):
    """Largest difference between DTensors and plain tensors, beside the largest value."""
    errors = []
    for got, want in pairs:
        full = got.full_tensor() if hasattr(got, "full_tensor") else got
        assert full.shape == want.shape
        errors.append((full - want).abs().max().item() / max(1.0, want.abs().max().item()))
    return max(errors)


def mlp(rank, world, hidden, bias):
    from torchshard import init_device_mesh
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    plain = MLP(6, hidden, bias)
    torch.manual_seed(rank)  # the first rank's parameters count
    model = MLP(6, hidden, bias)
    assert parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}) is model
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(5))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, got = plain(a), model(b)
    assert type(got) is torch.Tensor
    want.square().sum().backward()
    got.square().sum().backward()
    pairs = [(got, want), (b.grad, a.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    return worst(pairs), {name: str(p.placements) for name, p in model.named_parameters()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hidden", [8, 5, 1])
def test_colwise_and_rowwise_make_an_mlp(hidden, bias):
    for error, placements in run_ranks(2, mlp, hidden, bias):
        assert error < 1e-5
        assert placements["up.weight"] == "(Shard(dim=0),)"
        assert placements["down.weight"] == "(Shard(dim=1),)"
