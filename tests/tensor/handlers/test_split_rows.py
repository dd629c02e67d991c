"""Normalised rows and their variance along dims that are split: eager's values, and a few numbers a row are sent."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.ranks import fake_ranks, many, run_ranks
from tests.tensor.proving.cases import case
from tests.tensor.proving.proof import prove_all
from tests.watching import Sent
from torchshard import distribute_tensor, init_device_mesh


def grown(function):
    """Twice differentiated."""

    def run(x, *rest):
        y = function(x, *rest)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + grad

    return run


CASES = [
    case("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), (5, 3, 6), (6,), (6,)),
    case("layer_norm of short rows", lambda x, w, b: F.layer_norm(x, (3,), w, b), (4, 3), (3,), (3,)),
    case("layer_norm of planes", lambda x, w: F.layer_norm(x, (3, 5), w), (4, 3, 5), (3, 5)),
    case("layer_norm of all", lambda x: F.layer_norm(x, (5, 3)), (5, 3)),
    case("layer_norm of far rows", lambda x: F.layer_norm(x + 4, (8,)), (3, 8)),
    case("layer_norm of double", lambda x, w: F.layer_norm(x.double(), (5,), w.double()), (3, 5), (5,)),
    case("layer_norm twice", grown(lambda x, w: F.layer_norm(x, (6,), w)), (2, 6), (6,)),
    case("layer_norm of half", lambda x: F.layer_norm(x.bfloat16(), (6,)), (3, 6), grad=False),
    case("layer_norm of half by float", lambda x, w: F.layer_norm(x.bfloat16(), (6,), w, w), (3, 6), (6,), grad=False),
    case("rms_norm", lambda x, w: F.rms_norm(x, (6,), w), (5, 3, 6), (6,)),
    case("group_norm", lambda x, w: F.group_norm(x, 2, w), (3, 4, 5), (4,)),
    case("group_norm of few", lambda x, w, b: F.group_norm(x, 3, w, b), (2, 6), (6,), (6,)),
    case("group_norm of one channel each", lambda x: F.group_norm(x, 5), (2, 5, 3)),
    *[
        case(f"{name} {options}", lambda x, name=name, options=options: getattr(torch, name)(x, **options), (3, 5, 4))
        for name in ("var", "std")
        for options in ({"dim": 1}, {"dim": (0, 2), "keepdim": True}, {"dim": None, "correction": 0}, {"dim": 2, "correction": 7})
    ],
    case("var_mean", lambda x: torch.stack(torch.var_mean(x, 1)), (3, 5)),
    case("std_mean of far", lambda x: torch.stack(torch.std_mean(x + 3e4, 0, keepdim=True)), (7, 3), grad=False),
    case("var of half", lambda x: x.bfloat16().var(1), (3, 7), grad=False),
    case("var of complex", lambda x: torch.complex(x, x * x - 1).var(1), (3, 5)),
    case("var_mean of complex", lambda x: torch.view_as_real(torch.std_mean(torch.complex(x, x * x), 0)[1]), (5, 2), grad=False),
]  # fmt: skip


def values(rank, world, mesh_shape, limit, at_once):
    from torchshard.tensor.handlers import rows

    rows.gathered_up_to = lambda *_: math.inf if at_once else -1
    return prove_all(CASES, mesh_shape, limit)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_values(mesh_shape, at_once):
    limit = many(16 if len(mesh_shape) == 1 else 9)
    for done, bad in run_ranks(math.prod(mesh_shape), values, mesh_shape, limit, at_once, timeout=280):
        assert not bad, f"{len(bad)} of {done}:\n" + "\n".join(bad[:8])


NORMED = {
    "layer_norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w, w),
    "rms_norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w),
    "variance": lambda x, w: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * w,
}


@pytest.mark.parametrize("name", NORMED)
def test_what_is_sent(name):
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 4))
        x = distribute_tensor(torch.ones(512, 64), mesh, [Shard(0), Shard(1)]).requires_grad_()
        w = distribute_tensor(torch.ones(64), mesh, [Replicate(), Shard(0)]).requires_grad_()
        with Sent() as sends:
            y = NORMED[name](x, w)
            y.sum().backward()
        assert y.placements == x.grad.placements == (Shard(0), Shard(1))
        assert w.grad.placements == (Partial("sum"), Shard(0))
        assert all(n <= 256 * 4 * 3 for _, n in sends.calls)  # two or three numbers for each row of each rank
        assert len(sends.calls) == 2 or name != "layer_norm"


def test_channels_that_are_split_between_groups_stay_where_they_are():
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.ones(2, 16, 3, 3), mesh, [Shard(1)]).requires_grad_()
        w = distribute_tensor(torch.ones(16), mesh, [Shard(0)]).requires_grad_()
        with Sent() as sends:
            y = F.group_norm(x, 8, w, w)
            y.sum().backward()
        assert (sends.calls, y.placements, w.grad.placements) == ([], (Shard(1),), (Shard(0),))


def far(rank, world):
    """Numbers that differ in their last digits alone, and what is not finite, on some rank or on all."""
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    rows = torch.randn(6, 9).double() + 1e7
    rows[1, 0], rows[2, 8], rows[3, 4] = math.inf, math.nan, -math.inf
    x = distribute_tensor(rows, mesh, [Shard(1)])
    for function in (lambda t: t.var(1), lambda t: F.layer_norm(t, (9,)), lambda t: t.std(1, correction=0)):
        torch.testing.assert_close(function(x).full_tensor(), function(rows), equal_nan=True, rtol=1e-6, atol=1e-6)
    same = torch.rand(50, 1).expand(50, 9).contiguous() * 1e3  # by rounding no square is below zero
    found = distribute_tensor(same, mesh, [Shard(1)]).std(1).full_tensor()
    assert (found < 1e-3).all()


def test_what_is_far_from_zero_or_not_finite():
    run_ranks(2, far)
    run_ranks(4, far)


def fused(rank, world):
    """The handlers of RMSNorm's kernels, which are on accelerators alone, beside the formula that others have."""
    from torchshard.tensor.handlers.layer_norm import HANDLERS

    def kernel(x, shape, weight, eps):
        return F.rms_norm(x, shape, weight, eps), x.float()

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    for shape, dtype in (((4, 7), torch.float32), ((2, 3, 3), torch.bfloat16)):
        rows, of_rows, grad = torch.randn(shape, dtype=dtype), shape[-1:], torch.randn(shape, dtype=dtype)
        weight = torch.randn(of_rows, dtype=dtype)
        x, g = (distribute_tensor(t, mesh, [Shard(len(shape) - 1)]) for t in (rows, grad))
        w = distribute_tensor(weight, mesh, [Replicate()])
        for eps, scale, placed in ((None, weight, w), (0.1, None, None)):
            plain = [t.detach().double().requires_grad_() for t in (rows, weight)]
            want = F.rms_norm(plain[0], of_rows, None if scale is None else plain[1], eps or torch.finfo(dtype).eps)
            want.backward(grad.double())
            made, rstd = HANDLERS["_fused_rms_norm.default"](kernel, x, of_rows, placed, eps)
            wanted = [True, scale is not None]
            found = HANDLERS["_fused_rms_norm_backward.default"](None, g, x, of_rows, rstd, placed, wanted)
            assert (made.dtype, rstd.dtype, rstd.shape) == (dtype, torch.float32, (*shape[:-1], 1))
            close = {"rtol": 0.02, "atol": 0.05} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(made.full_tensor().double(), want.detach(), **close)
            torch.testing.assert_close(found[0].full_tensor().double(), plain[0].grad, **close)
            assert (found[1] is None) == (scale is None)
            if scale is not None:
                torch.testing.assert_close(found[1].full_tensor().double(), plain[1].grad, **close)


def test_the_fused_kernels_of_accelerators():
    run_ranks(2, fused)
    run_ranks(4, fused)
