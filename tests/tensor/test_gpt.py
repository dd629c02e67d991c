"""A GPT on DTensors, forward, backward and AdamW, equals the same model on plain tensors."""

import pytest
import torch

from tests.ranks import run_ranks

BATCH, TIME, STEPS = 5, 7, 3  # uneven on two and on three ranks


def train(mesh_shape, cuts, batch_placements, foreach):
    """Losses and parameters of plain and of distributed training, on every rank."""
    from torch.distributed.device_mesh import init_device_mesh

    from torchshard import Replicate, Shard, distribute_tensor, fallback
    from torchshard.demo.model import GPT, Config, loss, tensor_parallel

    config = Config(layers=2, width=24, heads=6, context=8, vocabulary=29)
    g = torch.Generator().manual_seed(1)
    data = torch.randint(0, config.vocabulary, (STEPS, 2, BATCH, TIME), generator=g)
    torch.manual_seed(0)
    plain = GPT(config)
    torch.manual_seed(0)
    model = GPT(config)
    mesh = init_device_mesh("cpu", mesh_shape)
    axis = cuts if cuts is not None else 0
    if cuts is None:
        from torchshard import distribute_module

        distribute_module(model, mesh)
    else:
        tensor_parallel(model, mesh, axis)
    placements = [{"S": Shard(0), "R": Replicate()}[p] for p in batch_placements]
    # The gradient of a key's bias is zero but for rounding; with a smaller eps Adam would take its sign for a signal.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-4, foreach=foreach) for m in (plain, model)]
    losses = []
    with fallback("error"):
        for x, y in data:
            pair = []
            for m, optimizer in zip((plain, model), optimizers, strict=True):
                ins, outs = (x, y) if m is plain else (distribute_tensor(t, mesh, placements) for t in (x, y))
                value = loss(m(ins), outs)
                value.backward()
                if m is model:
                    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=foreach)
                else:
                    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                pair.append(value.detach().item() if m is plain else value.detach().full_tensor().item())
            losses.append(pair)
    worst = {
        name: (p.full_tensor() - q).abs().max().item()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True)
    }
    held = sum(p.to_local().numel() for p in model.parameters())
    return losses, worst, held, sum(p.numel() for p in plain.parameters())


def body(rank, world, *args):
    return train(*args)


@pytest.mark.parametrize(
    ("mesh_shape", "cuts", "batch", "foreach"),
    [
        pytest.param((2,), None, "S", True, id="data"),
        pytest.param((2,), 0, "R", True, id="tensor"),
        pytest.param((2, 2), 1, "SR", True, id="data and tensor"),
        pytest.param((2, 2), 1, "SR", False, id="one tensor after the other"),
        pytest.param((3,), 0, "R", False, id="tensor by three"),
        pytest.param((3,), None, "S", True, id="data by three"),
        pytest.param((2,), 0, "S", True, id="sharded batch on cut weights"),
    ],
)
def test_training_equals_plain_training(mesh_shape, cuts, batch, foreach):
    world = 2 if mesh_shape == (2,) else 3 if mesh_shape == (3,) else 4
    for losses, worst, held, whole in run_ranks(world, body, mesh_shape, cuts, batch, foreach):
        for want, got in losses:
            assert abs(want - got) < 2e-5, losses
        assert max(worst.values()) < 2e-4, worst
        if cuts is not None:
            assert held < 0.75 * whole
