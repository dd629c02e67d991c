"""Slices, joins, pads and rolls along split dims: eager's values, and rows of other ranks are all that is sent."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.older import known
from tests.ranks import fake_ranks, many, run_ranks
from tests.tensor.proving.cases import case
from tests.tensor.proving.proof import prove_all
from tests.watching import Sent
from torchshard import distribute_tensor, init_device_mesh

CASES = [
    *[
        case(f"{name} of {n}", function, (n, 4))
        for n in (8, 7, 3, 1)
        for name, function in {
            "[:-1]": lambda x: x[:-1],
            "[1:]": lambda x: x[1:],
            "[2:5]": lambda x: x[2:5],
            "[5:2]": lambda x: x[5:2],
            "[-3:, 1:]": lambda x: x[-3:, 1:],
            "[::2]": lambda x: x[::2],
            "[1::3]": lambda x: x[1::3],
            "[-1]": lambda x: x[-1],
            "[:, 1]": lambda x: x[:, 1] * x[:, -1],
            "slices of slices": lambda x: x[1:][:-1][::2],
            "a row of a slice": lambda x: x[:, 1:][0][1],
            "a row with its dim": lambda x: x[1:2] - x[-1:],
            "roll": lambda x: x.roll(3, 0),
            "roll of both": lambda x: x.roll((1, -2), (1, 0)),
            "roll of none": lambda x: x.roll(0, 0),
            "pad": lambda x: F.pad(x, (0, 0, 2, 1)),
            "pad by a value": lambda x: F.pad(x, (1, 0, 0, 1), value=2.0),
            "pad and cut": lambda x: F.pad(x, (-1, 2, -1, 1)),
            "cut": lambda x: F.pad(x, (-1, 0, 0, -1)),
            "cat": lambda x: torch.cat([x, x[:3]]),
            "cat of both dims": lambda x: torch.cat([torch.cat([x, x[:, :1]], 1), torch.cat([x[:1, :1], x[:1]], 1)]),
            "cat of types": lambda x: torch.cat([x[:2].double(), x], 0),
            "chunks": lambda x: x.chunk(2)[0].sum(0) * x.chunk(3)[-1].sin(),
            "parts": lambda x: torch.cat(x.split([1, 0, x.shape[0] - 1])[::-1]),
            "diff": lambda x: x.diff(dim=0),
            "copies": lambda x: torch.slice_copy(x, 0, 1) + torch.select_copy(x, 0, 0),
        }.items()
    ],
    case("cat of three", lambda x, y, z: torch.cat([x, y, z], 1), (3, 5), (3, 2), (3, 1)),
    case("cat of more and less", lambda x, y: torch.cat([y, x, x[:1]]), (6, 3), (2, 3)),
    case("halves of planes", lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1), (2, 3, 6)),
    case("padded planes", lambda x: F.pad(x, (1, 1, 2, 0)), (2, 3, 5)),
    case("zeros of both signs", lambda x: torch.cat([F.pad(x, (0, 0, 0, 2), value=v).signbit() for v in (0.0, -0.0)]), (4, 2), grad=False),
    case("columns", lambda x: x.t()[1:].contiguous(), (3, 5)),
    case("expanded", lambda x: x.expand(3, 4, 5)[:, 1:, 1:] * 2, (4, 1)),
    case("truth", lambda x: torch.cat([x > 0, (x > 0)[1:]]).roll(1, 0), (5, 2), grad=False),
    case("complex", lambda x: torch.view_as_real(torch.complex(x, x * 2).conj()[1:].resolve_conj()), (5, 2)),
    case("twice differentiated", lambda x: torch.autograd.grad(x[1:].pow(3).sum(), x, create_graph=True)[0], (5, 2)),
]  # fmt: skip


def values(rank, world, mesh_shape, limit):
    return prove_all(CASES, mesh_shape, limit)


@pytest.mark.parametrize("mesh_shape", [pytest.param((2,), marks=pytest.mark.full), (3,), (2, 2)])
def test_values(mesh_shape):
    for done, bad in run_ranks(math.prod(mesh_shape), values, mesh_shape, many(7), timeout=280):
        assert not bad, f"{len(bad)} of {done}:\n" + "\n".join(bad[:8])


WRITES = {
    "a slice": lambda x: x[2:6].mul_(2),
    "every second row": lambda x: x[1::2].zero_(),
    "a slice of a slice": lambda x: x[1:][2:4].add_(1),
    "one of several": lambda x: x.split(3)[1].add_(x.split(3)[0]),
    "all of several": lambda x: [part.mul_(k) for k, part in enumerate(x.split([2, 4, 1]))],
    "a row": lambda x: x[3].fill_(7),
    "two rows": lambda x: x[2:4].mul_(5),
    "a number": lambda x: x[4][1].add_(3),
    "overlapping slices in turn": lambda x: [x[:4].add_(1), x[2:6].mul_(2), x[5:].sub_(1)],
    "a slice, by another": lambda x: x[:3].copy_(x[4:7]),
}


def written(rank, world):
    mesh, full = init_device_mesh("cpu", (world,)), torch.arange(14.0).view(7, 2)
    for name, write in WRITES.items():
        want, x = full.clone(), distribute_tensor(full, mesh, [Shard(0)])
        seen = [x[1:5], x[::3], x[6], x[:, 1:]], [want[1:5], want[::3], want[6], want[:, 1:]]
        write(x)
        write(want)
        assert torch.equal(x.full_tensor(), want), name
        for a, b in zip(*seen, strict=True):
            assert torch.equal(a.full_tensor(), b), f"{name}: a view of before"
        assert x.placements == (Shard(0),)


def test_writes_reach_the_base_and_its_views():
    run_ranks(3, written, timeout=120)


def in_order(rank, world):
    mesh, full = init_device_mesh("cpu", (2, 2)), torch.arange(42.0).view(7, 6)
    x = distribute_tensor(full, mesh, [_StridedShard(0, split_factor=2), Shard(0)])  # the second axis splits first
    for name, function in {
        **{f"[{k}]": lambda x, k=k: x[k] for k in range(7)},
        "a row of a row": lambda x: x[4][2],
        "[1:]": lambda x: x[1:],
        "rows": lambda x: x[2:4],
        "cat": lambda x: torch.cat([x, x[:3]]),
        "a row written": lambda x: x[5].mul_(2),
    }.items():
        assert torch.equal(function(x).full_tensor(), function(full)), name
    assert torch.equal(x.full_tensor(), full)


def test_axes_that_split_in_another_order():
    run_ranks(4, in_order, timeout=120)


WIDE = 16
SENT = {
    # 8 rows on each of 8 ranks: how many the first one gives to others, in forward and in backward
    "[:-1]": (lambda x: x[:-1], [], []),
    "[:, 1:]": (lambda x: x[:, 1:], [], []),
    "[1:]": (lambda x: x[1:], [0], [1]),
    "[8:24]": (lambda x: x[8:24], [0], [2]),
    "[3:5]": (lambda x: x[3:5], [2], []),
    "[3]": (lambda x: x[3], [1], []),
    "[40:]": (lambda x: x[40:], [0], [3]),
    "halves": (lambda x: x.chunk(2)[1], [4], []),
    "roll": (lambda x: x.roll(1, 0), [1], [1]),
    "pad": (lambda x: F.pad(x, (0, 0, 1, 0)), [0], [0]),
    "pad at the end": (lambda x: F.pad(x, (0, 0, 0, 8)), [0], [1]),
    "cat": (lambda x: torch.cat([x, x.detach()[:8]]), [7, 1], [1, 0]),
    "cat of a few": (lambda x: torch.cat([x[4:5], x]), [1, 0, 0], [1, 0, 8]),
}


def test_what_is_sent():
    found = {}
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (8,))
        for name, (function, *_) in SENT.items():
            x = distribute_tensor(torch.randn(64, WIDE), mesh, [Shard(0)]).requires_grad_()
            with Sent() as forward:
                y = function(x)
            with Sent() as backward:
                y.backward(torch.ones_like(y))
            assert y.placements == (Shard(1 if name == "[3:5]" else 0),), name
            found[name] = [[n // WIDE for _, n in sent.calls] for sent in (forward, backward)]
    assert found == {name: list(rows) for name, (_, *rows) in SENT.items()}


def in_regions(rank, world):
    mesh, full = init_device_mesh("cpu", (world,)), torch.arange(24.0).view(8, 3)
    nest = torch.compiler.nested_compile_region if known("subclasses in nested regions") else lambda f: f
    sine = nest(lambda x: x.sin())

    def function(x):
        return x[:-1] * 2, sine(x[1:]) + sine(x[:-1]), x[2] - 1

    run = torch.compile(function, backend="aot_eager", fullgraph=True)
    x, y = full.clone().requires_grad_(), distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    for slices, *_ in SENT.values():
        slices(y)  # what eager calls are planned as is not what a region needs
    for got, want in zip(run(y), function(full), strict=True):
        torch.testing.assert_close(got.full_tensor(), want)
    sum([(t * t).sum() for t in run(y)]).backward()
    sum([(t * t).sum() for t in function(x)]).backward()
    torch.testing.assert_close(y.grad.full_tensor(), x.grad)
    assert run(y)[0].placements == (Shard(0),)  # nothing has to be sent, as in eager calls


def test_regions():
    run_ranks(2, in_regions, timeout=120)


def assumed(rank, world):
    from torchshard import DTensor
    from torchshard.errors import RankMismatchError

    mesh = init_device_mesh("cpu", (world,))
    x = DTensor.from_local(torch.ones(3 - rank, 2), mesh, [Shard(0)])
    for function in (
        lambda x: x[1:],
        lambda x: x[4:],
        lambda x: x[:-1],
        lambda x: x[0],
        lambda x: x.roll(1, 0),
        lambda x: torch.cat([x, x[:, :]])[1:],
    ):
        with pytest.raises(RankMismatchError):
            function(x)
    y, z = (DTensor.from_local(torch.ones(n, 2), mesh, [Shard(0)]) for n in (3, 2))
    for joined in ([y, x], [x, y], [y, x, y], [z, x, z]):  # of one layout here and of several there
        with pytest.raises(RankMismatchError, match="from_local"):
            torch.cat(joined).full_tensor()


def test_pieces_that_are_not_what_was_assumed():
    run_ranks(2, assumed, timeout=120)
