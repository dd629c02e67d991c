"""Data parallel over one axis of a mesh, tensor parallel over the other: with our DTensors and with torch's."""

import copy

import pytest
import torch
import torch.distributed.tensor as upstream
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_ranks


def _parallelized(module, mesh, ours):
    if ours:
        from torchshard.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    else:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    return parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _two_axes(rank, world):
    from torchshard import DTensor
    from torchshard.ddp import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batches = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    for ours, late in ((True, False), (False, False), (True, True)):
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
        module = _parallelized(copy.deepcopy(reference), mesh["tp"], ours)
        kind = DTensor if ours else upstream.DTensor
        assert type(module[0].weight.data if ours else module[0].weight) is not torch.Tensor
        with pytest.raises(ValueError, match=r'0\.weight is a .*DTensor.*device_mesh=mesh\["dp"\]'):
            DistributedDataParallel(module)
        with pytest.raises(ValueError, match="along the axis over which gradients are to be averaged"):
            DistributedDataParallel(module, device_mesh=mesh["tp"])
        delayed = dict(module.named_parameters())  # as they are before they become plain
        model = DistributedDataParallel(
            module,
            device_mesh=mesh["dp"],
            bucket_cap_mb=0,
            delay_all_reduce_named_params=[(name, delayed[name]) for name in ("0.bias", "2.weight")] if late else None,
            param_to_hook_all_reduce=delayed["0.weight"] if late else None,
        )
        assert {n: type(p) for n, p in model.named_parameters()}.keys() == {
            f"module.{n}" for n, _ in reference.named_parameters()
        }
        assert all(type(p.data) is torch.Tensor for p in model.parameters())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (reference, model)]
        for both in batches:
            for m, x, optimizer in (
                (reference, both.flatten(0, 1), optimizers[0]),
                (model, both[mesh["dp"].get_local_rank()], optimizers[1]),
            ):
                optimizer.zero_grad()
                m(x).square().mean().backward()
                optimizer.step()
        state = model.module.state_dict()
        assert isinstance(state["0.weight"], kind)
        for name, value in reference.state_dict().items():
            mine = state[name]
            torch.testing.assert_close(mine.full_tensor() if isinstance(mine, kind) else mine, value)
        model.module.load_state_dict(state)
        for p, q in zip(model.parameters(), copy.deepcopy(module).parameters(), strict=True):
            assert torch.equal(p, q)


def test_equals_one_process_on_the_whole_batch():
    run_ranks(4, _two_axes)
