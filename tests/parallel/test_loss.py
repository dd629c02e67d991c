"""Cross entropy of split classes with plain targets."""

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import run_ranks


def losses(rank, world, mesh_shape):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.errors import UnsupportedOperatorError
    from torchshard.parallel import loss_parallel

    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Shard(0), Shard(1)][2 - mesh.ndim :]
    g = torch.Generator().manual_seed(0)
    scores, targets, weight = torch.randn(4, 7, generator=g), torch.tensor([0, 6, -100, 3]), torch.rand(7, generator=g)
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.1):
            options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
            plain = scores.clone().requires_grad_()
            placed = distribute_tensor(scores, mesh, placements).requires_grad_()
            want = F.cross_entropy(plain, targets, **options)
            want.sum().backward()
            with loss_parallel():
                got = F.cross_entropy(placed, targets, **options)
                got.sum().backward()
            torch.testing.assert_close(got.full_tensor(), want)
            torch.testing.assert_close(placed.grad.full_tensor(), plain.grad)
            assert placed.grad.placements == tuple(placements)
            if mesh.ndim == 1 and not smoothing:
                assert got.placements == (Replicate(),)
    with pytest.raises(UnsupportedOperatorError, match="'target' is a plain"):
        F.cross_entropy(placed, targets)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_plain_targets_and_weights(mesh_shape):
    run_ranks(2 ** len(mesh_shape), losses, mesh_shape)
