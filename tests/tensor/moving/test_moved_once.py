"""What is moved, and how often: terms that lists are added up of stay terms, and an operand given twice goes once."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.ranks import fake_ranks, run_ranks
from tests.watching import Sent
from torchshard import DTensor, distribute_tensor, fallback, init_device_mesh
from torchshard.debug import CommDebugMode

TOGETHER = {
    "add": lambda x, y: torch._foreach_add(x, y, alpha=0.5),
    "sub": lambda x, y: torch._foreach_sub(x, y),
    "lerp": lambda x, y: torch._foreach_lerp(x, y, 0.3),
    "add_": lambda x, y: torch._foreach_add_(x, y, alpha=-2) or x,
    "lerp_": lambda x, y: torch._foreach_lerp_(x, y, 0.3) or x,
    "infinite": lambda x, y: torch._foreach_add(x, y, alpha=float("inf")),
}
OTHERS = [[Partial()], [Replicate()], [Shard(0)], [Partial("avg")]]
TWICE = {
    "atan2": lambda x: torch.atan2(x, x),
    "addcmul": lambda x: torch.addcmul(torch.zeros_like(x, dtype=torch.float32), x, x),
    "by keyword": lambda x: torch.where(condition=x > 0, input=x, other=x),
    "lists": lambda x: torch._foreach_maximum([x], [x])[0],
}


def _terms(rank, whole, kind, mesh):
    """A DTensor of this value whose terms, where it has some, are alike on no two ranks."""
    if not isinstance(kind, Partial):
        return distribute_tensor(whole, mesh, [kind])
    generator, world = torch.Generator().manual_seed(7), mesh.size()
    parts = [torch.randint(-8, 8, whole.shape, generator=generator).to(whole.dtype) for _ in range(world - 1)]
    scale = world if kind.reduce_op == "avg" else 1
    parts.append(whole * scale - sum(parts))
    return DTensor.from_local(parts[rank], mesh, [kind])


def _added(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    wrong = []
    for name, run in TOGETHER.items():
        for first in ([Partial()], [Partial("avg")], [Replicate()]):
            for other in OTHERS:
                for dtypes in ((torch.float32, torch.float32), (torch.float32, torch.int64)):
                    if dtypes[1] == torch.int64 and ("lerp" in name or other[0] == Partial("avg")):
                        continue
                    whole = [
                        torch.arange(35).reshape(5, 7).remainder(k).to(d) for k, d in zip((4, 3), dtypes, strict=True)
                    ]
                    x, y = ([_terms(rank, w, p[0], mesh)] for w, p in zip(whole, (first, other), strict=True))
                    want, found = run([whole[0].clone()], [whole[1]])[0], run(x, y)[0].full_tensor()
                    if not torch.allclose(want, found, equal_nan=True) or want.dtype != found.dtype:
                        wrong.append((name, first, other, dtypes))
    for name, run in TWICE.items():
        whole = torch.arange(35.0).reshape(5, 7) - 9
        terms = [_terms(rank, whole, kind, mesh) for kind in (Partial(), Shard(0), Shard(1))]
        wrong += [(name, x.placements) for x in terms if not torch.allclose(run(x).full_tensor(), run(whole))]
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_values_are_those_of_plain_lists(world):
    assert run_ranks(world, _added) == [[]] * world


def _sent(run):
    run()
    with CommDebugMode() as mode:
        run()
    return mode.get_total_counts()


@pytest.mark.parametrize(("name", "expected"), [("add", 0), ("sub", 0), ("lerp_", 0), ("infinite", 2)])
def test_terms_that_are_added_to_terms_stay(name, expected):
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        lists = [[DTensor.from_local(torch.ones(4, 3), mesh, [Partial()]) for _ in range(3)] for _ in range(2)]
        assert _sent(lambda: TOGETHER[name](*lists)) == expected
        whole = [distribute_tensor(torch.ones(4, 3), mesh, [Replicate()]) for _ in range(3)]
        if expected == 0:
            assert _sent(lambda: TOGETHER[name](lists[0], whole)) == (name[-1] != "_")
            assert _sent(lambda: TOGETHER[name](whole, lists[0])) == 1  # all in one


@pytest.mark.parametrize("name", list(TWICE))
def test_an_operand_that_is_given_twice_is_moved_once(name):
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        x, y = (DTensor.from_local(torch.ones(4, 3), mesh, [Partial()]) for _ in range(2))
        moves_of_condition = name == "by keyword"
        assert _sent(lambda: TWICE[name](x)) == 1 + moves_of_condition
        assert _sent(lambda: torch.addcmul(x, x, y)) == 2  # the plan of one tensor is not that of two
        assert _sent(lambda: torch.atan2(x, y)) == 2


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
def test_gradients_of_a_split_batch_are_reduced_by_one_collective(kind, foreach):
    momentum = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1} if kind == "SGD" else {}
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        parameters = [nn.Parameter(distribute_tensor(torch.ones(4, n), mesh, [Replicate()])) for n in (3, 5)]
        optimizer = getattr(torch.optim, kind)(parameters, lr=0.1, foreach=foreach, **momentum)

        for p in parameters:
            p.grad = DTensor.from_local(torch.ones(p.shape), mesh, [Partial()])
        assert _sent(optimizer.step) == 1


def test_logsumexp_of_a_split_dim_sends_each_number_once_and_nothing_in_backward():
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(64, 8), mesh, [Shard(1)]).requires_grad_()
        found = []
        assert _sent(lambda: found.append(x.logsumexp(1))) == 1  # the sum, with a largest element
        assert found[0].placements == (Replicate(),)
        assert _sent(lambda: x.logsumexp(1).sum().backward()) == 1
        assert x.grad.placements == (Shard(1),)


def _rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


OF_ROWS = {
    "normalize": lambda x, w: F.normalize(x, dim=-1),
    "rms_norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w),
    "rms_norm by hand": _rms,
    "std": lambda x, w: x / x.std(-1, keepdim=True),
    "amax": lambda x, w: x - x.amax(-1, keepdim=True),
    "nanmean": lambda x, w: x - x.nanmean(-1, keepdim=True),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_of_split_rows_a_few_numbers_each_are_sent(name):
    with fake_ranks(4), fallback("error"):
        mesh, rows = init_device_mesh("cpu", (4,)), 2048
        x = distribute_tensor(torch.ones(rows, 64), mesh, [Shard(1)]).requires_grad_()
        w = distribute_tensor(torch.ones(64), mesh, [Shard(0)]).requires_grad_()
        with Sent() as sends:
            y = OF_ROWS[name](x, w)
            y.sum().backward()
        assert (y.placements, x.grad.placements) == ((Shard(1),), (Shard(1),))
        assert 1 <= len(sends.calls) <= (2 if name == "rms_norm" else 5)
        assert all(n <= 3 * rows for _, n in sends.calls)


NUMBERS = {
    "add_": lambda x, n: x.add_(n),
    "sub_": lambda x, n: x.sub_(n),
    "+=": lambda x, n: x.__iadd__(n),
    "alpha": lambda x, n: x.add_(n, alpha=-2),
    "sub alpha": lambda x, n: x.sub_(n, alpha=3),
    "add_.Scalar": lambda x, n: torch.ops.aten.add_.Scalar(x, n),
    "sub_.Scalar": lambda x, n: torch.ops.aten.sub_.Scalar(x, n, 2),
    "of a tensor": lambda x, n: x.add_(torch.tensor(n)),
    "of a view": lambda x, n: (x[1:].add_(n), x)[1],
    "copy_": lambda x, n: x.copy_(torch.tensor(n)),
    "lerp_": lambda x, n: x.lerp_(torch.tensor(n, dtype=x.dtype), 0.25),
}
ADDED = 3, -0.0, 2.5, True, 300, math.inf, -math.inf, math.nan, 1 + 2j
DTYPES = torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.uint8


def _result(run, *values):
    try:
        return run(*values)
    except (RuntimeError, TypeError) as error:
        return type(error)


def _terms_of(whole, mesh, placements):
    """A DTensor of this value: the first ranks hold it, of sums; all of them hold it, of averages."""
    at = [mesh.get_local_rank(axis) for axis, p in enumerate(placements) if p == Partial()]
    local = torch.zeros_like(whole) if any(at) else whole.clone()
    terms = [p if p.is_partial() else Replicate() for p in placements]
    held = DTensor.from_local(local, mesh, terms, shape=whole.shape, stride=whole.stride())
    return held.redistribute(placements=placements)


def _with_number(rank, world, shape):
    mesh, wrong = init_device_mesh("cpu", shape), []
    placed = [(Partial(),), (Partial("avg"),)]
    if len(shape) == 2:
        placed = [(Partial(), Partial("avg")), (Shard(1), Partial()), (Partial(), Partial())]
    for placements, dtype in itertools.product(placed, DTYPES):
        if Partial("avg") in placements and not dtype.is_floating_point:
            continue
        whole = torch.arange(35).reshape(5, 7).remainder(4).to(dtype)
        whole[2] = -0.0
        for (name, run), n in itertools.product(NUMBERS.items(), ADDED):
            x = _terms_of(whole, mesh, placements)
            want, found = _result(run, whole.clone(), n), _result(run, x, n)
            if isinstance(want, type) or isinstance(found, type):
                wrong += [(name, n, placements, dtype, want, found)] * (want is not found)
                continue
            value = found.full_tensor()
            same = torch.allclose(value, want, equal_nan=True) and value.dtype == want.dtype
            if not same or found is not x or found.placements != placements:
                wrong.append((name, n, placements, dtype, want, value))
    return list(map(str, wrong[:4]))


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_numbers_that_are_written_to_terms(shape):
    assert run_ranks(math.prod(shape), _with_number, shape, timeout=120) == [[]] * math.prod(shape)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_written_to_terms_have_nothing_sent(name):
    with fake_ranks(4), fallback("error"):
        mesh = init_device_mesh("cpu", (2, 2))
        x = DTensor.from_local(torch.ones(4, 3), mesh, [Partial(), Partial("avg")])
        assert _sent(lambda: NUMBERS[name](x, 2.5)) == 0


def _padded(rank, world):
    mesh, found = init_device_mesh("cpu", (world,)), []
    full = torch.arange(35.0).reshape(5, 7) - 9
    for kind, pad, value in itertools.product(("max", "min", "sum", "avg"), ((1, 2), (0, 0, 2, -1), (-1, -2)), (0, 3)):
        part = full - rank if kind == "max" else full + rank if kind == "min" else full * (rank + 1)
        x = DTensor.from_local(part, mesh, [Partial(kind)], shape=full.shape, stride=full.stride())
        want = F.pad(x.full_tensor(), pad, value=value)
        with CommDebugMode() as mode:
            y = F.pad(x, pad, value=value)
        assert torch.equal(y.full_tensor(), want), (kind, pad, value)
        if mode.get_total_counts():
            assert y.placements != x.placements
            found.append((kind, pad, value))
    return found


def test_numbers_around_terms_are_terms():
    """But for sums: each rank's number would be added to the others'."""
    sums = [(kind, pad, 3) for kind in ("sum", "avg") for pad in ((1, 2), (0, 0, 2, -1))]
    assert run_ranks(2, _padded) == [sums] * 2


@pytest.mark.parametrize(("rows", "reduced"), [(5, 0), (25, 0), (26, 25 * 2)])
def test_terms_of_a_gradient_go_into_a_table_that_is_smaller(rows, reduced):
    """A bias for each pair of positions, of a split batch: what is reduced is the table's gradient, or the bias's."""
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        scores = distribute_tensor(torch.ones(4, 2, 5, 5), mesh, [Shard(0)])
        table = distribute_tensor(torch.ones(rows, 2), mesh, [Replicate()]).requires_grad_()
        pairs = distribute_tensor(torch.zeros(5, 5, dtype=torch.int64), mesh, [Replicate()])
        with Sent() as sends:
            bias = F.embedding(pairs, table).permute(2, 0, 1)
            grad = torch.autograd.grad((scores + bias).tanh().sum(), table)[0]
        assert [n for _, n in sends.calls] == ([reduced] if reduced else [])
        assert grad.placements == ((Replicate(),) if reduced else (Partial(),))


def _biased(rank, world, shape):
    generator, mesh = torch.Generator().manual_seed(3), init_device_mesh("cpu", shape)
    scores, rows = torch.randn(3, 2, 5, 5, generator=generator), torch.randn(6, 2, generator=generator)
    pairs = torch.randint(6, (5, 5), generator=generator)
    for op, padding, of_pairs in itertools.product(("sum", "avg"), (None, 2), (Replicate(), Shard(0))):
        for kinds in itertools.product((Partial(op), Shard(0), Shard(2), Replicate()), repeat=len(shape)):
            plain, table = rows.clone().requires_grad_(), distribute_tensor(rows, mesh, [Replicate()] * mesh.ndim)
            table = table.requires_grad_()
            other = distribute_tensor(pairs, mesh, [of_pairs] * mesh.ndim)
            want, found = F.embedding(pairs, plain, padding), F.embedding(other, table, padding)
            whole = distribute_tensor(scores[0].permute(1, 2, 0), mesh, [Replicate()] * mesh.ndim)
            want.backward(whole.full_tensor())
            found.backward(whole.redistribute(placements=kinds))
            torch.testing.assert_close(table.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_terms_of_a_table_are_its_gradient(shape):
    run_ranks(math.prod(shape), _biased, shape)


QUANTIZED = {
    "number": lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 15),
    "channels": lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s.detach(), z, 0, 0, 15),
    "learned": lambda x, s, z: torch._fake_quantize_learnable_per_channel_affine(x, s, z.float(), 0, 0, 15),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_rounding_to_numbers_of_a_type_has_nothing_sent(name):
    with fake_ranks(4), fallback("error"):
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0), Shard(1)]).requires_grad_()
        scale = distribute_tensor(torch.ones(6), mesh, [Shard(0), Replicate()]).requires_grad_()
        zero = distribute_tensor(torch.ones(6, dtype=torch.int32), mesh, [Replicate(), Replicate()])
        with Sent() as sends:
            y = QUANTIZED[name](x, scale, zero)
            y.backward(torch.ones_like(y))
        assert (sends.calls, y.placements, x.grad.placements) == ([], x.placements, x.placements)
        assert name != "learned" or scale.grad.placements == (Shard(0), Partial())
