"""Attention split by heads and by batch: several heads of queries that share one of keys; GPUs' kernels."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.ranks import run_ranks
from tests.tensor.proving.cases import case
from tests.tensor.proving.gpu_kernels import attention_kernels
from tests.tensor.proving.proof import prove, same


def attend(q, k, v, mask=None):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)


QKV = (2, 8, 3, 4), (2, 4, 5, 4), (2, 4, 5, 4)
CASES = [
    case("grouped", attend, *QKV),
    case("grouped, one mask", lambda q, k, v, m: attend(q, k, v, m.detach()), *QKV, (3, 5)),
    case("grouped, a mask a head", lambda q, k, v, m: attend(q, k, v, m.detach()), *QKV, (2, 8, 3, 5)),
    case("grouped, a mask a row", lambda q, k, v, m: attend(q, k, v, m.detach()), *QKV, (2, 1, 3, 5)),
]

aten = torch.ops.aten
ON_GPUS = {
    "flash": lambda q, k, v, m: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0],
    "efficient": lambda q, k, v, m: aten._scaled_dot_product_efficient_attention(q, k, v, m, True)[0],
    "cudnn": lambda q, k, v, m: aten._scaled_dot_product_cudnn_attention(q, k, v, m, True)[0],
}


def values(rank, world, mesh_shape):
    from torchshard import fallback, init_device_mesh

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", mesh_shape)
    with fallback("error"):
        return [prove(c, mesh, 15) for c in CASES]


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_values(mesh_shape):
    for results in run_ranks(mesh_shape[0] ** len(mesh_shape), values, mesh_shape):
        for done, bad in results:
            assert not bad, f"{len(bad)} of {done}:\n" + "\n".join(bad[:5])


def on_gpus(rank, world):
    """Eager and compiled, and without a message; with dropout gathered, so that all drop the same."""
    from torchshard import Replicate, Shard, distribute_tensor, fallback, init_device_mesh
    from torchshard.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (world,))
    full = [torch.randn(2, 4, 6, 8).requires_grad_() for _ in range(3)]
    mask = F.pad(torch.randn(2, 1, 6, 6), (0, 10))[..., :6].expand(2, 4, 6, 6)  # as torch pads it for the kernel
    whole_mask = distribute_tensor(mask, mesh, [Replicate()])
    with attention_kernels(), fallback("error"):
        for name, attend in ON_GPUS.items():
            expected = attend(*full, mask)
            wanted = torch.autograd.grad(expected.square().sum(), full)
            for dim in (0, 1):
                parts = [distribute_tensor(t.detach(), mesh, [Shard(dim)]).requires_grad_() for t in full]
                with CommDebugMode() as sent:
                    result = attend(*parts, whole_mask)
                    result.square().sum().backward()
                assert sent.get_total_counts() == 0, (name, sent.get_comm_counts())
                compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(*parts, whole_mask)
                for made in (result, compiled):
                    assert made.placements == (Shard(dim),)
                    same(made, expected)
                for part, grad in zip(parts, wanted, strict=True):
                    same(part.grad, grad)
        with fallback("silent"):
            dropped = aten._scaled_dot_product_flash_attention(*parts, 0.5, True)[0]
    assert dropped.placements == (Replicate(),)


def test_kernels_of_gpus():
    run_ranks(2, on_gpus)
