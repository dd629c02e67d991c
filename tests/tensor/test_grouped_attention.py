"""Attention in which several heads of queries share one of keys, split by heads and by batch."""

import warnings

import pytest
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.ranks import run_ranks
from tests.tensor.cases import case
from tests.tensor.proving import prove


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
