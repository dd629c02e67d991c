"""What dtypes and numbers have to do with it: refused on all ranks alike, and sums that wrap or are not finite are eager's."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import fake_ranks, run_ranks
from tests.tensor.programs import check, program

INF = math.inf
REFUSED = {
    "softmax": lambda x: x.softmax(-1),
    "softmax along": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(1),
    "safe_softmax": lambda x: torch.ops.aten._safe_softmax(x, -1),
    "softmax's gradient": lambda x: torch.ops.aten._softmax_backward_data(x, x, 1, x.dtype),
    "cholesky": lambda x: torch.linalg.cholesky_ex(x[..., None, None])[0],
    "eigh": lambda x: torch.ops.aten._linalg_eigh(x[..., None, None])[0],
    "lu": lambda x: torch.linalg.lu_factor(x[..., None, None])[0],
    "cdist": lambda x: torch.cdist(x, x),
    "products of two types": lambda x: torch.bmm(x[:, None], x[:, :, None].float()),
    "an index that is none": lambda x: x.gather(1, x.float()),
    "cummax": lambda x: x.to(torch.complex64).cummax(1)[0],
    "amax": lambda x: x.to(torch.complex64).amax(1),
    "bucketize": lambda x: torch.bucketize(x > 0, x[0] > 0),
    "in place": lambda x: (x > 0).cumprod_(1),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "mean": lambda x: x.mean(),
    "mean along": lambda x: x.mean(0, dtype=torch.int32),
    "cross entropy": lambda x: F.cross_entropy(x, x[:, 0] * 0),
    "targets": lambda x: F.cross_entropy(x.T.float(), (x[0] * 0).int()),
    "batch_norm": lambda x: F.batch_norm(x.T.to(torch.complex64), None, None, training=True),
}


def told(function, x):
    try:
        return function(x) and "a value"
    except Exception as error:
        return type(error).__name__, str(error)


def refused(rank, world):
    from torchshard import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    full = torch.ones(1, 3, dtype=torch.int64)
    placed = distribute_tensor(full, mesh, [Shard(0)])  # a row on the first rank, none on the second
    return {name: (told(f, full), told(f, placed), told(f, placed)) for name, f in REFUSED.items()}


def test_dtypes_are_refused_on_all_ranks():
    first, second = run_ranks(2, refused)
    assert first == second
    for name, (eager, *ours) in first.items():
        assert isinstance(eager, tuple), name
        assert ours == [eager, eager], name


SIZES = {
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "select": lambda x: x.select(0, 9),
    "gather": lambda x: x.gather(1, (x[:, :2].abs() * 0).long().repeat(2, 1)),
    "reflection": lambda x: F.pad(x[:, None], (9, 1), mode="reflect"),
}


def sizes(rank, world):
    from torchshard import Shard, distribute_tensor, init_device_mesh

    full = torch.ones(5, 4)
    placed = distribute_tensor(full, init_device_mesh("cpu", (world,)), [Shard(0)])
    return {name: [re.findall(r"\d+", told(f, x)[1]) for x in (full, placed)] for name, f in SIZES.items()}


def test_sizes_in_messages_are_those_of_the_whole():
    for numbers in run_ranks(2, sizes):
        for name, (eager, ours) in numbers.items():
            assert eager, name
            assert ours == eager, name


NUMBERS = {
    line.strip(): program(line, math=math)
    for line in """
    y = x * math.inf, x * -math.inf, x * math.nan, x * 1e39, x * 2.0
    y = x / 0, x / 0.0, x / -0.0, x / math.inf, x / 1e-46, x / 2
    y = [x * s for s in (2.0, math.inf, 3.0, -math.inf, 0.0)]
    y = [x / s for s in (0.0, 2.0, 0.0)]
    y = [torch.add(x, x, alpha=a) for a in (1.0, math.inf, 2.0)]
    y = [x * put(torch.tensor(2.0)), x * torch.tensor(math.inf), x / torch.tensor(0.0), x * torch.tensor(3.0)]
    y = x.mul_(math.inf)
    y = x.mul_(2.0); z = x.div_(0.0); y = z, x
    y = [torch._foreach_mul([x, x], s) for s in (2.0, math.inf, [1.0, -math.inf], 3.0)]
    y = [torch._foreach_div([x, x], s) for s in (2.0, 0.0, [1.0, 0.0])]
    torch._foreach_mul_([x], math.inf); y = x
    torch._foreach_div_([x], 0.0); y = x
    y = (x * 0.0, x * 0, -x * 0.0)
    y = x.sum() * math.inf, x.sum(0) / 0, (x @ x.T) * math.inf
    """.strip().splitlines()
}


def test_numbers_that_are_not_finite():
    check(__name__, "NUMBERS", mesh_shapes=((2,),), texts=("P", "A", "S0"))


MIXED = {
    line.strip(): program(line)
    for line in """
    y = (x > 0) << 1, (x > 0) >> 1, (x[:1] > 0) << 1, (x[:, :1] > 0) << 2; y = y, [z.stride() for z in y]
    y = x.index_fill(0, put(torch.tensor([1])), torch.tensor(2)), x.index_fill(1, put(torch.tensor([0])), torch.tensor(3.0))
    """.strip().splitlines()
}


def test_kinds_that_meta_tensors_refuse():
    check(__name__, "MIXED", mesh_shapes=((2,),))


WRAPPED = {
    "sum": lambda x: (x.sum(), x.sum(0), x.sum(1, dtype=torch.int32), x.sum(dtype=torch.float32)),
    "sum in its own type": lambda x: (x.sum(dtype=x.dtype), x.cumsum(0, dtype=x.dtype)),
    "trace": lambda x: (x.trace(), x[:2].trace(), x.float().trace()),
    "mean": lambda x: (x.mean(dtype=torch.float32), x.mean(0, dtype=torch.float64)),
    "cumsum, prod": lambda x: (x.cumsum(0), x.prod(), x.prod(0), x.cumprod(1)),
    "casts": lambda x: (x.to(torch.int64), x.int(), x.float(), x.to(torch.complex64), x.bool(), x.to(torch.uint8)),
    "copies": lambda x: (torch.empty_like(x, dtype=torch.float32).copy_(x), x.clone(), x.new_zeros(3, 2).copy_(x)),
    "with numbers": lambda x: (x * 2, x * 0.5, x / 2, -x, x + 1, x * True, x.true_divide(3)),
    "with others": lambda x: (x + x.float(), x * x.float(), x / x.abs().clamp(min=1), x - x.int(), x + x, x * x.int()),
    "in place": lambda x: (x.float().add_(x), x.clone().mul_(2), x.int().sub_(x), x.clone().add_(x)),
    "degrees": lambda x: (x.rad2deg(), x.deg2rad()),
    "lists": lambda x: (*torch._foreach_mul([x, x], 0.5), *torch._foreach_mul([x], 2), *torch._foreach_div([x, x], 2)),
    "pooled": lambda x: (
        F.avg_pool2d(x.long()[None], 2),
        F.interpolate(x.to(torch.uint8)[None, None], (5, 4), mode="bilinear"),
    ),
    "selected": lambda x: (x[1], x.T, x.tril(), x.index_select(0, (x[0] * 0).long()), torch.where(x > 0, x, -x)),
    "products": lambda x: (x @ x.T, x @ x[0], torch.outer(x[0], x[1])),
}


def wrapped(rank, world):
    from torchshard import DTensor, Partial, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    wrong = []
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        most = torch.iinfo(dtype).max
        terms = [
            torch.full((3, 2), most // 2 + 3, dtype=dtype) - torch.arange(6).view(3, 2).to(dtype) * k for k in (1, 2)
        ]
        whole = terms[0] + terms[1]
        x = DTensor.from_local(terms[rank], mesh, [Partial()])
        assert torch.equal(x.redistribute(placements=[Replicate()]).to_local(), whole)
        for name, function in WRAPPED.items():
            for k, (want, got) in enumerate(zip(function(whole), function(x), strict=True)):
                full = got.full_tensor()
                if full.dtype != want.dtype or not torch.equal(full, want):
                    wrong.append((str(dtype), name, k, want.flatten()[:4].tolist(), full.flatten()[:4].tolist()))
        for target in (torch.float32, torch.int64, torch.int32):
            if target is not dtype:
                assert told(lambda x, t=target: x.redistribute(placements=[Replicate()], forward_dtype=t), x)[0]
    return wrong


def test_whole_numbers_that_wrap():
    assert run_ranks(2, wrapped) == [[], []]


def moved_under_autocast(rank, world):
    """Moves leave dtypes alone, with pieces of any length, whatever operators would do to them."""
    from torchshard import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh, found = init_device_mesh("cpu", (world,)), []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64):
        full = torch.arange(15.0).view(5, 3).to(dtype)
        for kind in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", kind):
                x = distribute_tensor(full, mesh, [Shard(0)])
                moves = [x, x.redistribute(placements=[Shard(1)]), x.redistribute(placements=[Replicate()])]
                moves.append(DTensor.from_local(full / world, mesh, [Partial()]).redistribute(placements=[Shard(0)]))
                moves = [y.full_tensor() for y in moves]
            for y in moves:
                assert y.dtype is dtype
                torch.testing.assert_close(y, full, rtol=1e-2, atol=0)
            found.append(len(moves))
    return len(found)


def test_moves_under_autocast():
    assert run_ranks(2, moved_under_autocast) == [10, 10]


def put_off(rank, world):
    """Products of conjugated terms that torch has not conjugated yet; pieces are uneven."""
    from torchshard import DTensor, Partial, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    a, b = torch.complex(*torch.arange(80.0).sub(30).view(2, 5, 8)).split([3, 5], 1)
    x = DTensor.from_local(a / world, mesh, [Partial()]).detach().requires_grad_()
    y, p = distribute_tensor(b, mesh, [Shard(1)]), a.clone().requires_grad_()
    torch.testing.assert_close((y @ x.conj()).full_tensor(), b @ a.conj())
    torch.testing.assert_close((y.imag @ x.conj().imag).full_tensor(), b.imag @ a.conj().imag)
    (x @ x.t()).abs().sum().backward()
    (p @ p.t()).abs().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), p.grad)


def test_conjugated_terms():
    run_ranks(2, put_off)


def conjugating_kernels(rank, world):
    """Kernels that conjugate within, as those of pseudo-inverses do, forward and in formulas of gradients."""
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    batch, b = torch.randn(2, 3, 4, 4, 2, generator=torch.Generator().manual_seed(0)).double()
    batch, b = torch.view_as_complex(batch), torch.view_as_complex(b)
    for placement in (Replicate(), Shard(0), Shard(1)):
        for f in (torch.linalg.pinv, torch.pinverse, lambda x: torch.linalg.lstsq(x, x.mT + 2 * x).solution):
            a, x = batch.clone().requires_grad_(), distribute_tensor(batch, mesh, [placement]).requires_grad_()
            y, z = f(a), f(x)
            torch.testing.assert_close(z.full_tensor(), y)
            y.abs().square().sum().backward()
            z.abs().square().sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), a.grad)
    wrong = distribute_tensor(b, mesh, [Shard(0)])
    with pytest.raises(RuntimeError):
        torch.linalg.pinv(wrong[0, 0])  # one dim
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Conjugate)


def test_kernels_that_conjugate():
    assert run_ranks(2, conjugating_kernels) == [False] * 2


def test_pseudo_inverses_that_torch_cannot_compile():
    """Its own, of plain tensors, are wrong the first time; when this no longer holds, neither need DTensors be refused."""
    from torchshard import Replicate, distribute_tensor, init_device_mesh

    whole = torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(torch.linalg.pinv, backend="aot_eager")
    assert [torch.allclose(compiled(whole), torch.linalg.pinv(whole), atol=1e-4) for _ in range(2)] == [False, True]
    with fake_ranks(2):
        x = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Replicate()])
        torch._dynamo.reset()
        with pytest.raises(Exception, match="wrong pseudo-inverse from torch"):
            torch.compile(torch.linalg.pinv, backend="aot_eager", fullgraph=True)(x)
        y = torch.compile(torch.compiler.disable(torch.linalg.pinv), backend="aot_eager")(x)
        torch.testing.assert_close(y.to_local(), torch.linalg.pinv(whole))
        real = torch.compile(torch.linalg.pinv, backend="aot_eager", fullgraph=True)(x.real.clone())
        torch.testing.assert_close(real.to_local(), torch.linalg.pinv(whole.real))


def fractions_of_whole_numbers(rank, world):
    """Products of whole numbers, a fraction of some added; the last rank has nothing to sum."""
    from torchshard import Shard, distribute_tensor, init_device_mesh

    a = torch.arange(4 * 4 * 3).view(4, 4, 3)
    x = distribute_tensor(a, init_device_mesh("cpu", (2, 2)), [Shard(2), Shard(2)])
    for f in (
        lambda a: torch.addmm(a[0] @ a[0].T, a[0], a[0].T, beta=0.5, alpha=2),
        lambda a: torch.baddbmm(a @ a.mT, a, a.mT, beta=1.5),
        lambda a: torch.addbmm(a[1] @ a[1].T, a, a.mT, beta=0.5),
        lambda a: torch.addmm(a[0] @ a[0].T, a[0], a[0].T, alpha=0.5),
    ):
        assert torch.equal(f(x).full_tensor(), f(a))


def test_fractions_of_whole_numbers_are_added():
    run_ranks(4, fractions_of_whole_numbers, timeout=60)


def spread_of_halves(rank, world):
    """Statistics whose squares are out of the range of float16."""
    from torchshard import Shard, distribute_tensor, init_device_mesh

    mesh, found = init_device_mesh("cpu", (world,)), {}
    for name, a in (
        ("large", torch.tensor([60000.0, 0, 60000, 0, 60000], dtype=torch.float16)),
        ("small", torch.tensor([1e-4, 2e-4, 1e-4, 2e-4, 1e-4], dtype=torch.float16)),
    ):
        x = distribute_tensor(a, mesh, [Shard(0)])
        for what, f in (("std", torch.std), ("norm", torch.linalg.vector_norm), ("std, mean", torch.std_mean)):
            got, want = f(x), f(a)
            pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
            found[f"{what}, {name}"] = [(g.item(), w.item(), g.dtype is w.dtype) for g, w in pairs]
    return found


def test_statistics_of_halves_are_those_of_eager_torch():
    for found in run_ranks(2, spread_of_halves, timeout=60):
        for name, pairs in found.items():
            for got, want, same in pairs:
                assert same, name
                assert got == pytest.approx(want, rel=2e-3), name
