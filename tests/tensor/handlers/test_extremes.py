"""The largest, the least, their places and what runs along a split dim, beside eager torch."""

import math

import torch

from tests.ranks import fake_ranks, run_ranks
from tests.watching import Sent


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


def of_extremes(rank, world):
    """Largest and smallest of terms whose largest or smallest is the value: what stays such terms, and the values."""
    from torchshard import DTensor, Partial, Replicate, distribute_tensor, init_device_mesh

    mesh, bad, kept = init_device_mesh("cpu", (world,)), [], {}
    full = torch.tensor([[1.0, -2, 3], [4, 5, -6]])
    whole = distribute_tensor(full, mesh, [Replicate()])
    for op in ("max", "min"):
        terms = torch.where(torch.arange(6).view(2, 3) % world == rank, 3 - full, full - 1)
        x = DTensor.from_local(terms, mesh, [Partial(op)])
        for name, call in {
            "amax": lambda x, y: x.amax(0),
            "max": lambda x, y: x.max(),
            "amin": lambda x, y: x.amin(1, True),
            "min": lambda x, y: x.min(),
            "maximum": lambda x, y: torch.maximum(x, y),
            "minimum": lambda x, y: torch.minimum(y, x),
            "maximum of both": lambda x, y: torch.maximum(x, x.flip(1)),
            "minimum of both": lambda x, y: torch.minimum(x, x.flip(0)),
        }.items():
            plain, leaf = x.full_tensor().requires_grad_(), x.detach().requires_grad_()
            got, want = call(leaf, whole), call(plain, full)
            got.square().sum().backward()
            want.square().sum().backward()
            kept[op, name] = got.placements[0].is_partial()
            if not (torch.equal(got.full_tensor(), want) and torch.equal(leaf.grad.full_tensor(), plain.grad)):
                bad.append((op, name, got.full_tensor(), want, leaf.grad.full_tensor(), plain.grad))
    return bad, {key for key, partial in kept.items() if partial}


def test_extremes_of_extremes_stay_terms():
    by_element = "maximum", "minimum", "maximum of both", "minimum of both"  # of the other kind, one of both is reduced
    kept = {("max", name) for name in ("amax", "max", *by_element)}
    kept |= {("min", name) for name in ("amin", "min", *by_element)}
    for bad, partial in run_ranks(2, of_extremes):
        assert not bad, bad
        assert partial == kept


def test_values_and_places_are_one_message():
    from torchshard import Shard, distribute_tensor, init_device_mesh

    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        for dtype in (torch.bfloat16, torch.float64, torch.uint8):
            x = distribute_tensor(torch.ones(3, 8).to(dtype), mesh, [Shard(1)])
            for call in (lambda x: x.max(1), lambda x: x.argmin(1), lambda x: x.argmax()):
                with Sent() as sending:
                    call(x)
                assert [name for name, _ in sending.calls] == ["all_gather_into_tensor"]
