"""Softmax, cross entropy and embedding along a split dim: eager's values, and nothing gathered."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import many, run_ranks
from tests.tensor.proving.cases import case
from tests.tensor.proving.proof import prove_all, same
from tests.watching import Sent

aten = torch.ops.aten


def safe_softmax(x):
    masked = x.masked_fill(x > 0.2, -math.inf)
    return aten._safe_softmax.default(masked, -1)


CASES = [
    case("softmax", lambda x: torch.softmax(x, -1), (3, 5)),
    case("softmax of little", lambda x: torch.softmax(x, -1), (2, 1)),
    case("softmax in the middle", lambda x: torch.softmax(x, 1), (2, 5, 3)),
    case("softmax of double", lambda x: torch.softmax(x, 0, dtype=torch.float64), (5,)),
    case("log_softmax", lambda x: F.log_softmax(x, 1), (3, 5)),
    case("log_softmax of little", lambda x: F.log_softmax(x, 1), (3, 1)),
    case("log_softmax of half", lambda x: F.log_softmax(x.bfloat16(), 1), (3, 6), grad=False),
    case("safe softmax", safe_softmax, (4, 5)),
    case("embedding", lambda w, i: F.embedding(i, w), (7, 4), (3, 5), integers={1: 7}),
    case("embedding of few", lambda w, i: F.embedding(i, w), (1, 3), (4,), integers={1: 1}),
    case("embedding padding", lambda w, i: F.embedding(i, w, padding_idx=2), (7, 4), (5,), integers={1: 7}),
    case("embedding of one", lambda w, i: F.embedding(i, w), (5, 3), (), integers={1: 5}),
    case("gather", lambda x, i: x.gather(1, i), (3, 5), (3, 2), integers={1: 5}),
    case("gather of one", lambda x, i: torch.log_softmax(x, -1).gather(-1, i[..., None])[..., 0], (2, 3, 5), (2, 3), integers={1: 5}),
    case("gather of few rows", lambda x, i: x.gather(2, i), (3, 4, 5), (2, 4, 1), integers={1: 5}),
    case("gather of whole numbers", lambda x, i: (x * 9).long().gather(0, i), (5, 3), (2, 3), integers={1: 5}, grad=False),
    *[
        case(f"nll {r}", lambda x, t, r=r: F.nll_loss(x, t, reduction=r), (3, 5), (3,), integers={1: 5})
        for r in ("none", "sum", "mean")
    ],
    case("nll of little", lambda x, t: F.nll_loss(x, t), (3, 1), (3,), integers={1: 1}),
    case("nll one row", lambda x, t: F.nll_loss(x, t, reduction="sum"), (5,), (), integers={1: 5}),
    case("nll one row, mean", lambda x, t: F.nll_loss(x, t), (5,), (), integers={1: 5}),
    *[
        case(
            f"cross entropy {r}",
            lambda x, t, w, r=r: F.cross_entropy(x, t, w.detach().abs() + 0.5, ignore_index=2, reduction=r),
            (4, 5), (4,), (5,), integers={1: 5},
        )
        for r in ("none", "sum", "mean")
    ],
    *[
        case(
            f"cross entropy of images {r}",
            lambda x, t, r=r: F.cross_entropy(x, t, reduction=r),
            (2, 5, 3, 2), (2, 3, 2), integers={1: 5},
        )
        for r in ("none", "mean")
    ],
    case("cross entropy smooth", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (4, 5), (4,), integers={1: 5}),
    case(
        "cross entropy smooth with weights",
        lambda x, t, w: F.cross_entropy(x, t, w.detach().abs() + 0.5, label_smoothing=0.1),
        (4, 5), (4,), (5,), integers={1: 5},
    ),
    case("cross entropy of chances", lambda x, t: F.cross_entropy(x, t.softmax(1)), (4, 5), (4, 5)),
]  # fmt: skip


def values(rank, world, mesh_shape, limit):
    return prove_all(CASES, mesh_shape, limit)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_values(mesh_shape):
    limit = many(20 if len(mesh_shape) == 1 else 12)
    for done, bad in run_ranks(math.prod(mesh_shape), values, mesh_shape, limit, timeout=280):
        assert not bad, f"{len(bad)} of {done}:\n" + "\n".join(bad[:8])


def sent(rank, world):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    logits = distribute_tensor(torch.randn(6, 50), mesh, [Shard(1)]).requires_grad_()
    target = distribute_tensor(torch.randint(0, 50, (6,)), mesh, [Replicate()])
    with Sent() as loss_sends:
        loss = F.cross_entropy(logits, target)
    with Sent() as backward_sends:
        loss.backward()
    for changed in (lambda grad: grad.mul_(2), lambda grad: grad.to_local().mul_(2)):  # not what it was noted to be
        again, whole = logits.detach().requires_grad_(), logits.full_tensor().detach().requires_grad_()
        for x, t, change in (again, target, changed), (whole, target.full_tensor(), lambda grad: grad.mul_(2)):
            scores = F.log_softmax(x, 1)
            scores.register_hook(lambda grad, change=change: (change(grad), None)[1])
            F.nll_loss(scores, t).backward()
        torch.testing.assert_close(again.grad.full_tensor(), whole.grad)
    table = distribute_tensor(torch.randn(50, 4), mesh, [Shard(0)]).requires_grad_()
    with Sent() as embedding_sends:
        found = F.embedding(target, table)
        found.sum().backward()
    with Sent() as gather_sends:
        taken = logits.gather(1, target[:, None])
    assert (gather_sends.calls, str(taken.placements)) == ([], "(Partial(sum),)")
    layouts = [loss.placements, logits.grad.placements, found.placements, table.grad.placements]
    return loss_sends.calls, backward_sends.calls, embedding_sends.calls, list(map(str, layouts))


def test_only_a_few_numbers_a_row_are_sent():
    for forward, backward, embedding, layouts in run_ranks(2, sent):
        # Largest with sum of exponentials, and loss with weight.
        assert [name for name, _ in forward] == ["all_gather_into_tensor", "all_reduce"]
        assert sum(n for _, n in forward) == 6 + 6 + 1 + 1
        assert backward == []
        assert embedding == []
        assert layouts == ["(Replicate(),)", "(Shard(dim=1),)", "(Partial(sum),)", "(Shard(dim=0),)"]


def extremes(rank, world, at_once):
    from torchshard import Shard, distribute_tensor, init_device_mesh
    from torchshard.tensor.handlers import rows as of_rows

    inf, nan = math.inf, math.nan
    rows = torch.tensor([
        [-inf, -inf, -inf], [-inf, 1.0, -inf], [inf, 0.0, 1.0], [nan, 0.0, 1.0], [0.0, 1.0, nan], [1e38, -1e38, 3e38],
        [-inf, -1000.0, -1001.0], [-1000.0, -1002.0, -inf], [200.0, -200.0, 0.0], [0.0, inf, inf], [-inf, -1e38, -3e38],
    ])  # fmt: skip
    of_rows.gathered_up_to = lambda *_: math.inf if at_once else -1
    x = distribute_tensor(rows, init_device_mesh("cpu", (world,)), [Shard(1)])
    for function in (torch.softmax, torch.log_softmax, aten._safe_softmax.default, torch.logsumexp):
        with Sent() as sends:
            got = function(x, 1)
        want = function(rows, 1)
        assert torch.allclose(got.full_tensor(), want, equal_nan=True), (function, got.full_tensor(), want)
        assert [name for name, _ in sends.calls] == (["all_gather_into_tensor"] if at_once else ["all_reduce"] * 2)


@pytest.mark.parametrize("at_once", [True, False])
def test_infinities_and_nan(at_once):
    run_ranks(2, extremes, at_once)
    run_ranks(4, extremes, at_once)  # a rank without a piece


def faults(rank, world):
    from torchshard import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.errors import RankMismatchError, UnsupportedOperatorError

    mesh = init_device_mesh("cpu", (world,))
    logits = distribute_tensor(torch.randn(2, 5), mesh, [Shard(1)])
    table = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])
    for wrong in (5, -1):
        numbers = distribute_tensor(torch.tensor([0, wrong]), mesh, [Replicate()])
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            F.cross_entropy(logits, numbers)
        with pytest.raises(IndexError):
            F.embedding(numbers, table)
    good = distribute_tensor(torch.tensor([0, 1]), mesh, [Replicate()])
    for count in (3, 6):  # what a rank has of them might do
        weight = distribute_tensor(torch.ones(count), mesh, [Replicate()])
        with pytest.raises(RuntimeError, match="weight tensor should be defined either for all 5 classes"):
            F.cross_entropy(logits, good, weight)
    with pytest.raises(UnsupportedOperatorError, match="not sparse"):
        F.embedding(good, table, sparse=True)
    one = F.embedding(torch.tensor(4), table.requires_grad_())  # a plain scalar is the same everywhere
    one.sum().backward()
    assert torch.equal(one.full_tensor(), table.full_tensor()[4])
    assert table.grad.full_tensor().sum() == 3
    uneven = DTensor.from_local(torch.randn(2, 3 - rank), mesh, [Shard(1)])
    with pytest.raises(RankMismatchError):
        torch.softmax(uneven, 1)


def test_what_eager_refuses_is_refused():
    run_ranks(2, faults)


def by_columns(rank, world):
    """A table split both ways, indices split by the other axis: the gradient lies where the table does."""
    from torchshard import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    table, numbers = torch.randn(7, 5), torch.randint(0, 7, (4, 3))
    seen = []
    for of_table, of_numbers in [
        ([Shard(0), Shard(1)], [Replicate(), Replicate()]),
        ([Shard(1), Shard(0)], [Shard(0), Shard(1)]),
        ([Replicate(), Shard(0)], [Shard(0), Replicate()]),
        ([Shard(0), Shard(0)], [Shard(0), Shard(1)]),
        ([Shard(1), Shard(1)], [Shard(0), Shard(0)]),
    ]:
        plain, placed = table.clone().requires_grad_(), distribute_tensor(table, mesh, of_table).requires_grad_()
        want = F.embedding(numbers, plain, padding_idx=3)
        got = F.embedding(distribute_tensor(numbers, mesh, of_numbers), placed, padding_idx=3)
        same(got, want)
        want.square().sum().backward()
        got.square().sum().backward()
        same(placed.grad, plain.grad)
        seen.append(placed.grad.placements == tuple([Partial() if p == Replicate() else p for p in of_table]))
    return seen


def test_the_gradient_of_a_table_lies_where_the_table_does():
    for seen in run_ranks(4, by_columns):
        assert all(seen), seen


def leafless(rank, world):
    """Without the private name that tells the table, and for tables that are no leaves, the gradient lies elsewhere."""
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard._torch import without_fast_paths

    mesh = init_device_mesh("cpu", (world,))
    rows, numbers = torch.randn(7, 3), torch.tensor([6, 0, 6])
    placed = distribute_tensor(numbers, mesh, [Replicate()])
    plain = rows.clone().requires_grad_()
    F.embedding(numbers, plain).square().sum().backward()
    table = distribute_tensor(rows, mesh, [Shard(0)]).requires_grad_()
    with without_fast_paths():
        F.embedding(placed, table).square().sum().backward()
    same(table.grad, plain.grad)
    assert table.grad.placements != (Shard(0),)
    table.grad = None
    F.embedding(placed, table * 1).square().sum().backward()
    same(table.grad, plain.grad)


def test_a_table_that_is_not_known():
    run_ranks(2, leafless)
