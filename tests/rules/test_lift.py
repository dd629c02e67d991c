"""Which way an operator is run: the decisions of the lifter, as a table, and laws that all of them obey."""

import expecttest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchshard.layout.layout import Mesh, contiguous_stride
from torchshard.layout.placements import Partial, R, Shard
from torchshard.rules.bind import bind
from torchshard.rules.lift import lift
from torchshard.rules.notation import parse
from torchshard.rules.registry import find

SUM = Partial("sum")


def decide(name, mesh, *operands, fixed=None):
    """Operands are (shape, placements); returns the Lifted."""
    layouts = [mesh.sharding(list(ps)).layout(shape, contiguous_stride(shape), torch.float32) for shape, ps in operands]
    made, options = find(name).made(layouts, {})
    bound = bind(parse(made.line), [x.shape for x in layouts], made.sizes)
    return layouts, lift(bound, options, layouts, fixed or {})


class Decisions(expecttest.TestCase):
    def test_products_of_matrices(self):
        mesh = Mesh((4,))
        rows = []
        for a in (R, Shard(0), Shard(1), SUM):
            for b in (R, Shard(0), Shard(1)):
                _, lifted = decide("mm.default", mesh, ((64, 32), [a]), ((32, 128), [b]))
                ways = ", ".join(str(s.placements[0]) for s in lifted.operands)
                rows.append(f"{a} x {b}: {ways} -> {lifted.results[0].placements[0]}")
        self.assertExpectedInline(
            "\n".join(rows),
            """\
R x R: R, R -> R
R x S(0): S(1), S(0) -> P(sum)
R x S(1): R, S(1) -> S(1)
S(0) x R: S(0), R -> S(0)
S(0) x S(0): S(0), R -> S(0)
S(0) x S(1): R, S(1) -> S(1)
S(1) x R: S(1), S(0) -> P(sum)
S(1) x S(0): S(1), S(0) -> P(sum)
S(1) x S(1): R, S(1) -> S(1)
P(sum) x R: P(sum), R -> P(sum)
P(sum) x S(0): S(1), S(0) -> P(sum)
P(sum) x S(1): R, S(1) -> S(1)""",
        )

    def test_a_sum_is_scattered_along_a_dim_of_which_every_rank_gets_some(self):
        decided = [decide("relu.default", Mesh((4,)), ((n, 16, 8192), [SUM]))[1] for n in (1, 2, 4)]
        self.assertExpectedInline(
            str([str(d.results[0].placements[0]) for d in decided]), """['S(1)', 'S(1)', 'S(0)']"""
        )

    def test_statistics_of_rows_are_scattered_where_an_operand_lies_so_alone(self):
        found = []
        for columns in (1, 4):
            rows = ((64, columns), [SUM])
            for other in ([R], [Shard(0)], [SUM]):
                _, lifted = decide("maximum.default", Mesh((4,)), rows, ((64, columns), other))
                found.append(str(lifted.results[0].placements[0]))
        self.assertExpectedInline(str(found), """['R', 'S(0)', 'R', 'S(0)', 'S(0)', 'S(0)']""")

    def test_the_bias_of_a_sum_counts_once(self):
        mesh = Mesh((2,))
        _, lifted = decide("addmm.default", mesh, ((8,), [R]), ((4, 6), [Shard(1)]), ((6, 8), [Shard(0)]))
        self.assertExpectedInline(
            str([str(s.placements[0]) for s in (*lifted.operands, *lifted.results)]),
            """['P(sum)', 'S(1)', 'S(0)', 'P(sum)']""",
        )


placements = st.sampled_from([R, Shard(0), Shard(1), SUM, Partial("avg"), Partial("max")])


@given(placements, st.sampled_from([1, 2, 3, 5]))
def test_sums_move_nothing_where_both_operands_are_alike(a, parts):
    layouts, lifted = decide("add.Tensor", Mesh((parts,)), ((6, 4), [a]), ((6, 4), [a]))
    if a is Partial("max"):  # the maximum of sums is not the sum of maxima
        assert Partial("max") not in lifted.results[0].placements
    else:
        assert [*lifted.operands, *lifted.results] == [layouts[0].sharding] * 3


@given(placements, placements, st.sampled_from([2, 3]))
def test_a_product_is_partial_in_one_operand_only(a, b, parts):
    _, lifted = decide("mul.Tensor", Mesh((parts,)), ((6, 4), [a]), ((6, 4), [b]))
    assert sum(isinstance(s.placements[0], Partial) for s in lifted.operands) <= 1


@given(placements, st.sampled_from([2, 3]))
def test_an_operand_written_in_place_stays_where_it_is(a, parts):
    mesh = Mesh((parts,))
    layouts, lifted = decide("add.Tensor", mesh, ((6, 4), [a]), ((6, 4), [R]), fixed={0: 0})
    if lifted is not None:
        assert lifted.operands[0] is layouts[0].sharding is lifted.results[0]
