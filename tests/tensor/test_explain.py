"""What explain shows is what happens: tables on a fake group of 512 ranks, counts against the steps of transitions."""

from collections import Counter

import pytest
import torch
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.ranks import fake_ranks, run_ranks
from torchshard import DTensor, explain, fallback
from torchshard.tensor.calls import dispatch
from torchshard.tensor.calls.dispatch import clear_entries

KINDS = {
    "all_gather": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "exchange": "all_to_all_single",
}


@pytest.fixture
def mesh():
    """512 ranks that compute nothing, as 64 x 8."""
    with fake_ranks(512):
        yield init_device_mesh("cpu", (64, 8), mesh_dim_names=("dp", "tp"))


def placed(mesh, shape, *placements):
    local = list(shape)
    for parts, p in zip(mesh.shape, placements, strict=True):
        if isinstance(p, Shard):
            local[p.dim] = -(-local[p.dim] // parts)
    stride = torch.empty(shape).stride()
    return DTensor.from_local(torch.ones(local), mesh, placements, shape=shape, stride=stride)


def test_a_tensor_parallel_block_forward_and_backward(mesh):
    x = placed(mesh, (256, 64), Shard(0), Replicate())
    first = placed(mesh, (64, 128), Replicate(), Shard(1)).requires_grad_()
    second = placed(mesh, (128, 64), Replicate(), Shard(0)).requires_grad_()

    def block():
        out = torch.relu(x @ first) @ second
        out.redistribute(placements=[Shard(0), Replicate()]).sum().backward()

    assert_expected_inline(
        str(explain(block)),
        """\
mesh (dp=64, tp=8)
 operator                   | operands                    | by              | moved                       | bytes   | results
----------------------------+-----------------------------+-----------------+-----------------------------+---------+-----------------------------
 mm.default                 | f32[256, 64] (S(0), R)      | i k, k j -> i j |                             |         | f32[256, 128] (S(0), S(1))
                            | f32[64, 128] (R, S(1))      |                 |                             |         |
 relu.default               | f32[256, 128] (S(0), S(1))  | ... -> ...      |                             |         | f32[256, 128] (S(0), S(1))
 mm.default                 | f32[256, 128] (S(0), S(1))  | i k, k j -> i j |                             |         | f32[256, 64] (S(0), P(sum))
                            | f32[128, 64] (R, S(0))      |                 |                             |         |
 redistribute               | f32[256, 64] (S(0), P(sum)) | asked for       | all_reduce(tp) -> (S(0), R) | 1.8 KiB | f32[256, 64] (S(0), R)
 sum.default                | f32[256, 64] (S(0), R)      | a b ->          |                             |         | f32[] (P(sum), R)
 ones_like.default          | f32[] (P(sum), R)           | ... -> ...      |                             |         | f32[] (R, R)
 expand.default             | f32[] (R, R)                | -> Z0 Z1        |                             |         | f32[256, 64] (R, R)
 redistribute               | f32[256, 64] (R, R)         | asked for       | slice(dp) -> (S(0), R)      | 0 B     | f32[256, 64] (S(0), R)
 t.default                  | f32[256, 128] (S(0), S(1))  | a b -> b a      |                             |         | f32[128, 256] (S(1), S(0))
 mm.default                 | f32[128, 256] (S(1), S(0))  | i k, k j -> i j |                             |         | f32[128, 64] (P(sum), S(0))
                            | f32[256, 64] (S(0), R)      |                 |                             |         |
 t.default                  | f32[128, 64] (R, S(0))      | a b -> b a      |                             |         | f32[64, 128] (R, S(1))
 mm.default                 | f32[256, 64] (S(0), R)      | i k, k j -> i j |                             |         | f32[256, 128] (S(0), S(1))
                            | f32[64, 128] (R, S(1))      |                 |                             |         |
 threshold_backward.default | f32[256, 128] (S(0), S(1))  | ..., ... -> ... |                             |         | f32[256, 128] (S(0), S(1))
                            | f32[256, 128] (S(0), S(1))  |                 |                             |         |
 t.default                  | f32[256, 64] (S(0), R)      | a b -> b a      |                             |         | f32[64, 256] (S(1), R)
 mm.default                 | f32[64, 256] (S(1), R)      | i k, k j -> i j |                             |         | f32[64, 128] (P(sum), S(1))
                            | f32[256, 128] (S(0), S(1))  |                 |                             |         |
redistributions: 2, received by a rank at most: 1.8 KiB, collectives: 1 all_reduce""",
    )


@torch.library.custom_op("explain_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


def test_a_part_is_explained_by_itself(mesh):
    x, w = placed(mesh, (64, 64), Shard(0), Shard(1)), placed(mesh, (64, 64), Replicate(), Shard(0))
    parts = []
    both = explain(lambda: parts.append(explain(lambda: torch.relu(x @ w))) or explain(torch.relu, x))
    assert [row.operator for row in both.rows] == ["mm.default", "relu.default", "relu.default"]
    assert str(parts[0]) == str(explain(lambda: torch.relu(x @ w)))
    assert [row.operator for row in both.result.rows] == ["relu.default"]
    assert both.collectives == parts[0].collectives == {"reduce_scatter_tensor": 1}
    assert both.nbytes == parts[0].nbytes > 0


def test_without_a_rule(mesh):
    x = placed(mesh, (64, 64), Shard(0), Replicate())
    with fallback("silent"):
        assert_expected_inline(
            str(explain(twice, x)),
            """\
mesh (dp=64, tp=8)
 operator                    | operands              | by       | moved                       | bytes    | results
-----------------------------+-----------------------+----------+-----------------------------+----------+--------------------
 explain_test::twice.default | f32[64, 64] (S(0), R) | gathered | x: all_gather(dp) -> (R, R) | 15.8 KiB | f32[64, 64] (R, R)
redistributions: 1, received by a rank at most: 15.8 KiB, collectives: 1 all_gather_into_tensor""",
        )


def test_parts_of_an_operator_stand_below_it(mesh):
    x = placed(mesh, (128, 8), Shard(0), Replicate())
    target = DTensor.from_local(
        torch.zeros(2, dtype=torch.long), mesh, [Shard(0), Replicate()], shape=(128,), stride=(1,)
    )
    explained = explain(torch.nn.functional.cross_entropy, x, target)
    assert_expected_inline(
        "\n".join(f"{'  ' * row.depth}{row.operator}: {row.line or row.how}" for row in explained.rows),
        """\
_log_softmax.default: a B -> a B
nll_loss_forward.default: handler
  nll_loss_forward.default: n C, n -> ,""",
    )
    assert explained.result.placements == (Replicate(), Replicate())
    whole = [t.redistribute(placements=[Replicate(), Replicate()]) for t in (x, target)]
    rows = explain(torch.nn.functional.cross_entropy, *whole).rows  # what is not split needs no sums
    assert [(row.operator, row.how) for row in rows] == [
        ("_log_softmax.default", "rule"),
        ("nll_loss_forward.default", "rule"),
    ]


def test_lists_and_handlers(mesh):
    x = placed(mesh, (128, 8), Shard(0), Replicate())
    explained = explain(lambda: (torch._foreach_add([x, x], [x, x]), torch.rand_like(x)))
    assert [(row.operator, row.how) for row in explained.rows] == [
        ("_foreach_add.List", "list"),
        ("rand_like.default", "handler"),
    ]
    assert explained.collectives == {"broadcast": 1}


def _planned(explained):
    """Collectives that the steps of all moves ask for."""
    steps = [step for row in explained.rows for move in row.moves for step in move.route.steps]
    return Counter(KINDS[step.kind] for step in steps if step.kind in KINDS)


def test_what_is_planned_is_what_is_called(mesh):
    kinds = [Replicate(), Shard(0), Shard(1), Partial()]
    for a in kinds:
        for b in kinds:
            x, y = placed(mesh, (512, 64), a, b), placed(mesh, (64, 512), b, a)
            explained = explain(lambda x=x, y=y: torch.relu(x @ y).redistribute(placements=[Shard(1), Replicate()]))
            assert explained.collectives == _planned(explained)
            assert explained.nbytes == sum(m.route.nbytes for row in explained.rows for m in row.moves)


def plans_kept() -> int:
    return sum(map(len, dispatch._plan_tables))


def test_nothing_is_kept_and_nothing_changed(mesh):
    x = placed(mesh, (512, 64), Shard(0), Replicate())
    clear_entries()
    first, second = explain(torch.relu, x), explain(torch.relu, x)
    assert str(first) == str(second)
    assert plans_kept() == 0
    torch.relu(x)
    assert plans_kept() == 1
    assert str(explain(torch.relu, x)) == str(first)


def test_what_integers_select_is_planned_once(mesh):
    x, rows = placed(mesh, (512, 64), Replicate(), Shard(1)), placed(mesh, (3,), Replicate(), Replicate()).long()
    values = placed(mesh, (3, 64), Replicate(), Shard(1))
    mask = x > 0
    clear_entries()
    for kept, call in enumerate([lambda: x[rows], lambda: torch.index_put(x, [rows], values)], 1):
        for _ in range(2):
            call()
            assert plans_kept() == kept
    with fallback("silent"):
        x[mask]  # its shape depends on values
    assert plans_kept() == kept


def test_a_function_that_fails(mesh):
    x = placed(mesh, (512, 64), Shard(0), Replicate())
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        explain(lambda: x @ x)
    assert explain(torch.relu, x).rows


def _on_ranks(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    whole = {"shape": (4 * world, 2), "stride": (2, 1)}  # told, so that nothing is compared
    x = DTensor.from_local(torch.arange(8.0).view(4, 2), mesh, [Shard(0)], **whole).requires_grad_()

    def step(scale):
        y = (x * scale).sum()
        y.backward()
        return y.full_tensor()

    explained = explain(step, scale=2.0)
    assert explained.result == 28.0 * 2.0 * world
    assert torch.equal(x.grad.full_tensor(), torch.full((4 * world, 2), 2.0))
    return [row.operator for row in explained.rows], dict(explained.collectives)


def test_on_real_ranks_it_runs_as_it_would():
    operators, counts = run_ranks(2, _on_ranks)[1]
    assert operators[0] == "mul.Tensor"
    assert operators[-1] == "redistribute"
    assert counts == {"all_reduce": 1}
