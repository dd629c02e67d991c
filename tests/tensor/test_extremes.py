"""The largest, the least, their places and what runs along a split dim, beside eager torch."""

import math

import torch

from tests.ranks import run_ranks


def _calls(x, dim):
    yield lambda: x.max(dim)
    yield lambda: x.min(dim, True)
    yield lambda: x.argmax(dim, True)
    yield lambda: x.argmin()
    yield lambda: torch.aminmax(x, dim=dim)
    yield lambda: x.cumsum(dim)
    yield lambda: x.cumprod(dim, dtype=torch.float64)
    yield lambda: x.cumsum(dim, dtype=torch.bfloat16)
    yield lambda: x.cumsum(dim, dtype=torch.int32)
    yield lambda: x.logcumsumexp(dim)


def _outcome(call):
    from torchshard import DTensor

    try:
        found = call()
    except Exception as error:
        return type(error)
    tensors = found if isinstance(found, tuple) else (found,)
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return [(t.shape, t.stride(), w.dtype, w.tolist()) for t, w in zip(tensors, whole, strict=True)]


def beside_eager(rank, world):
    """What differs from eager torch: equal elements, NaN, infinities, parts of nothing, and kinds that kernels refuse."""
    from torchshard import Shard, distribute_tensor, init_device_mesh

    mesh, nan, inf = init_device_mesh("cpu", (world,)), math.nan, math.inf
    wholes = [
        torch.tensor([[1.0, nan, 3.0, nan], [2.0, 7.0, 7.0, 1.0], [-inf] * 4]),
        torch.tensor([3, 200, 200, 1, 0], dtype=torch.uint8),
        torch.ones(1, 2, dtype=torch.bfloat16),  # a rank has none
        torch.tensor([[True, False], [True, True]]),
        torch.tensor([2j, 1 + 0j]),
        torch.zeros(0, 3),
    ]
    bad = []
    for whole in wholes:
        for split in range(whole.ndim):
            x = distribute_tensor(whole, mesh, [Shard(split)])
            for dim in range(whole.ndim):
                for k, (ours, theirs) in enumerate(zip(_calls(x, dim), _calls(whole, dim), strict=True)):
                    got, want = _outcome(ours), _outcome(theirs)
                    if str(got) != str(want):
                        bad.append(f"call {k} of {whole}, split {split}, dim {dim}: {got} for {want}")
    return bad


def test_what_eager_torch_gives_or_refuses():
    assert run_ranks(2, beside_eager, timeout=120) == [[], []]


def outside(rank, world):
    """Layouts and values where the last rank is outside of the mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    from torchshard import DTensor, Shard

    mesh = DeviceMesh("cpu", [0])
    x = DTensor.from_local(torch.tensor([[1.0, 5.0, 2.0]])[: 1 - rank], mesh, [Shard(1)], shape=(1, 3), stride=(3, 1))
    value, place = x.max(1)
    ran = x.cumsum(1)
    return (value.shape, place.dtype, ran.placements), [] if rank else [place.item(), *ran.to_local()[0].tolist()]


def test_a_rank_outside_of_the_mesh():
    from torchshard import Shard

    layouts = (1,), torch.int64, (Shard(1),)
    assert run_ranks(2, outside, timeout=60) == [(layouts, [1, 1.0, 6.0, 8.0]), (layouts, [])]
