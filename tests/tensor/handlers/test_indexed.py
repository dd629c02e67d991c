"""Rows of a split dim that are written by index, as in a cache of split positions: each rank writes its own."""

import itertools
import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import fake_ranks, run_ranks
from tests.watching import Sent
from torchshard import DTensor, distribute_tensor, fallback, init_device_mesh

WRITES = {
    "index_copy_": lambda t, i, s: t.index_copy_(1, i, s),
    "index_add_": lambda t, i, s: t.index_add_(-2, i, s, alpha=2),
    "index_fill_": lambda t, i, s: t.index_fill_(1, i, 7),
    "[:, i] =": lambda t, i, s: t.__setitem__((slice(None), i), s) or t,
    "[:, i] = number": lambda t, i, s: t.__setitem__((slice(None), i), 3.0) or t,
    "index_put_": lambda t, i, s: torch.ops.aten.index_put_(t, [None, i], s, True),
    "of a slice": lambda t, i, s: (t[:, 1:].index_copy_(1, i, s), t)[1],
    "[:, -i] =": lambda t, i, s: t.__setitem__((slice(None), -1 - i), s) or t,
    "index_fill_ from the end": lambda t, i, s: t.index_fill_(1, -1 - i, 7),
}


def _values(rank, world, shape, step):
    mesh, wrong, done = init_device_mesh("cpu", shape), [], 0
    generator = torch.Generator().manual_seed(3)
    writes = itertools.product(WRITES.items(), [(9, 4), (4, 2), (2, 1), (9, 0)])
    for number, ((name, write), (length, count)) in enumerate(writes):
        whole, rows = (torch.randn(2, n, 4, generator=generator) for n in (length, count))
        index = torch.randperm(length - 1, generator=generator)[:count]
        kinds = [Shard(1), Replicate(), Shard(2)]
        placed = [p for p in itertools.product(kinds, repeat=len(shape)) if Shard(1) in p]
        ways = [*itertools.product(placed, [Replicate(), Shard(0)], [Replicate(), *map(Shard, range(3))])]
        for of_x, of_index, of_rows in ways[number % step :: step]:
            plain = [t.clone().requires_grad_(t.is_floating_point()) for t in (whole, index, rows)]
            want = write(plain[0] * 1, *plain[1:])
            grad = torch.randn(want.shape, generator=generator)
            want.backward(grad)
            kinds_of = [of_x, [of_index] * mesh.ndim, [of_rows] * mesh.ndim]
            given = [distribute_tensor(t, mesh, list(p)) for t, p in zip((whole, index, rows), kinds_of, strict=True)]
            leaves = [t.requires_grad_(t.is_floating_point()) for t in given]
            base = leaves[0] * 1
            found = write(base, *leaves[1:])
            found.backward(distribute_tensor(grad, mesh, list(of_x)))
            pairs = [
                (found, want),
                *[(a.grad, b.grad) for a, b in zip(leaves, plain, strict=True) if b.grad is not None],
            ]
            done += 1
            if found is not base or not all(torch.allclose(a.full_tensor(), b, atol=1e-6) for a, b in pairs):
                wrong.append(f"{name} {length} {of_x} {of_index} {of_rows}")
    return done > 50, wrong[:5]


@pytest.mark.parametrize(
    ("shape", "step"), [((2,), 1), ((3,), 1), ((2, 2), 5), pytest.param((2, 2), 1, marks=pytest.mark.full)]
)
def test_values(shape, step):
    assert run_ranks(math.prod(shape), _values, shape, step, timeout=250) == [(True, [])] * math.prod(shape)


def _refused(rank, world):
    mesh, found = init_device_mesh("cpu", (world,)), []
    for name, write in WRITES.items():
        for length, number in itertools.product((9, 2), (9, -19)):
            if name == "of a slice" and length == 2:
                continue  # of one row, ranks without columns find nothing wrong
            x = distribute_tensor(torch.zeros(2, length, 4), mesh, [Shard(1)])
            index = distribute_tensor(torch.tensor([1, number]), mesh, [Replicate()])
            rows = distribute_tensor(torch.ones(2, 2, 4), mesh, [Replicate()])
            try:
                write(x, index, rows)
            except (IndexError, RuntimeError):
                continue
            found.append((name, length, number))
    return found


def test_what_is_nobodys_row_is_refused_on_every_rank():
    assert run_ranks(3, _refused) == [[]] * 3


@pytest.mark.parametrize("name", WRITES)
def test_a_cache_is_not_gathered(name):
    with fake_ranks(4), fallback("error"), torch.no_grad():
        mesh = init_device_mesh("cpu", (2, 2))
        cache = distribute_tensor(torch.zeros(4, 64, 8), mesh, [Shard(0), Shard(1)])
        index = distribute_tensor(torch.tensor([3, 40]), mesh, [Replicate(), Replicate()])
        rows = distribute_tensor(torch.ones(4, 2, 8), mesh, [Shard(0), Replicate()])
        with Sent() as sends:
            WRITES[name](cache, index, rows)
        assert sends.calls == [] or name == "of a slice"


def _summed(rank, world):
    """A codebook of replicated rows, to which those of a split batch are added."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    generator = torch.Generator().manual_seed(0)
    for rows in (40, 2):
        of_batch, which = torch.randn(rows, 3, generator=generator), torch.randint(0, 6, (rows,), generator=generator)
        for run in (
            lambda t, i, s: t.index_add_(0, i, s, alpha=3),
            lambda t, i, s: t[:, 0].scatter_add_(0, i, s[:, 0]),
        ):
            want = run(torch.ones(6, 3), which, of_batch)
            table, index, source = (
                distribute_tensor(t, mesh, [p])
                for t, p in zip((torch.ones(6, 3), which, of_batch), (Replicate(), Shard(0), Shard(0)), strict=True)
            )
            with Sent() as sends:
                made = run(table, index, source)
            assert isinstance(made, DTensor)
            torch.testing.assert_close(made.full_tensor(), want)
            found.append([name for name, _ in sends.calls])
    return found


def test_what_is_added_to_replicated_rows_is_reduced_where_that_is_less():
    for *many, few, fewer in run_ranks(2, _summed):
        assert [len(names) for names in many] == [1, 1]
        assert not any(name.startswith("all_reduce") for name in few + fewer)


def _truth(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    which, of_batch = torch.arange(40) % 5, torch.arange(80).view(40, 2) % 3 == 0
    for run in (
        lambda t, i, s: t.index_add_(0, i, s),
        lambda t, i, s: t.scatter_add_(0, i.unsqueeze(1).expand(-1, 2), s),
    ):
        made, index, source = (
            distribute_tensor(t, mesh, [p])
            for t, p in zip((torch.zeros(6, 2).bool(), which, of_batch), (Replicate(), Shard(0), Shard(0)), strict=True)
        )
        run(made, index, source)
        assert torch.equal(made.full_tensor(), run(torch.zeros(6, 2).bool(), which, of_batch))


def test_rows_of_truth_are_added_up():
    run_ranks(2, _truth)
