"""The validator: it finds the table right, and rules that claim too much wrong."""

from contextlib import contextmanager

import expecttest
import pytest
import torch

from tests.tensor.proving.cases import GROUPS
from tests.tensor.proving.proof import exact, operands
from torchshard.errors import ShardingError
from torchshard.rules.rule import Made, Rule, options
from torchshard.tensor.proving.validate import check_call, validate_rule

aten = torch.ops.aten


def full(*shape):
    return exact(shape, torch.Generator().manual_seed(len(shape)))


def verdicts(func, args, how, words="", **more):
    """Which ways of a rule are wrong on the operands."""
    report = check_call(func, args, rule=Rule(how, options(words)), **more)
    return {w for o in report.wrong for w in o.ways if len(o.ways) == 1}


@contextmanager
def library(space, name, function):
    """An operator of one tensor, for a while."""
    home = torch.library.Library(space, "FRAGMENT")
    home.define(f"{name}(Tensor x) -> Tensor")
    home.impl(name, function, "CompositeExplicitAutograd")
    yield getattr(getattr(torch.ops, space), name).default


def proved(cases, **more):
    """Operators whose rule was right in all ways, with the forward and backward of these cases."""
    right = set()
    for case in cases:
        report = validate_rule(case.run, [operands(case)], backward=case.grad, strict=False, **more)
        assert not report.wrong, f"{case.name}: {report.wrong[0]}"
        right |= {o.operator for o in report.right}
    return right


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", GROUPS)
def test_the_table_is_right_on_larger_meshes(group):
    proved(GROUPS[group], meshes=((4,), (2, 2), (3, 2), (2, 2, 2)))


def test_a_sum_that_is_said_to_be_linear_in_each_operand():
    args = full(5, 4), full(5, 4)
    assert verdicts(aten.add.Tensor, args, "..., ... -> ...", "lin=0+1") == set()
    assert verdicts(aten.add.Tensor, args, "..., ... -> ...", "lin=0") == {
        "terms: P(sum), R -> P(sum)",  # an average of terms that each get the other operand is right
    }


def test_a_function_that_is_said_to_be_linear():
    assert "terms: P(sum) -> P(sum)" in verdicts(aten.exp.default, [full(5, 4)], "... -> ...", "lin=0")
    assert verdicts(aten.exp.default, [full(5, 4)], "... -> ...", "mono") == set()


BENT = (
    "abs atan ceil cos elu erf exp expm1 floor gelu hardtanh leaky_relu log log1p logical_not reciprocal relu round rsqrt"
    " sigmoid sign silu sin softplus sqrt square tanh trunc"
)


@pytest.mark.parametrize("name", BENT.split())
def test_no_other_function_passes_as_linear(name):
    x = full(5, 4)
    x = x.abs() + 0.1 if name in ("log", "log1p", "sqrt", "rsqrt") else x
    assert verdicts(getattr(aten, name).default, (x,), "... -> ...", "lin=0", meshes=((2,),))


@pytest.mark.parametrize("name", ["abs", "cos", "neg", "reciprocal", "sin", "square"])
def test_no_other_function_passes_as_rising(name):
    assert verdicts(getattr(aten, name).default, (full(5, 4),), "... -> ...", "mono", meshes=((2,),))


def test_an_operand_that_is_read_after_all():
    assert verdicts(aten.mul.Tensor, (full(3, 4), full()), "..., -> ...") == set()
    assert verdicts(aten.mul.Tensor, (full(3, 4), full()), "..., -> ...", "unread=1")


def test_a_factor_that_must_be_whole():
    assert verdicts(aten._softmax.default, [full(5, 4), 1, False], "a b -> a b") == {
        "b split: S(1) -> S(1)",
        "b split in 2 runs: S(1/2) -> S(1/2)",
        "b split in units of 2: S(1*2) -> S(1*2)",
    }
    assert verdicts(aten.cumsum.default, [full(5, 4), 0], "a b -> a b") == {"a split: S(0) -> S(0)"}


def test_dims_that_are_mixed_up():
    assert verdicts(aten.t.default, [full(5, 4)], "a b -> a b") == {
        "whole: R -> R",
        "a split: S(0) -> S(0)",
        "b split: S(1) -> S(1)",
        "b split in 2 runs: S(1/2) -> S(1/2)",
        "b split in units of 2: S(1*2) -> S(1*2)",
    }


def test_a_reduction_that_is_named_wrongly():
    x = [full(5, 4), [0]]
    assert verdicts(aten.sum.dim_IntList, x, "a b -> b", "red=a:sum") == set()
    assert verdicts(aten.sum.dim_IntList, x, "a b -> b", "red=a:avg") == set()  # 5 rows: never even
    assert verdicts(aten.sum.dim_IntList, x, "a b -> b", "red=a:max") == {"a split: S(0) -> P(max)"}
    even = [full(8, 4), [0]]
    assert verdicts(aten.sum.dim_IntList, even, "a b -> b", "red=a:avg") == {
        "a split: S(0) -> P(avg)",
        "a split in 2 runs: S(0/2) -> P(avg)",
        "a split in units of 2: S(0*2) -> P(avg)",
    }


def test_a_reduction_that_is_missing():
    rule = Rule("i k, k j -> i j")
    report = check_call(aten.mm.default, (full(5, 4), full(4, 6)), rule=rule)
    assert not report.wrong  # without red= it is never split: right, and costs more
    assert not any("k split" in way for o in report.outcomes for way in o.ways)
    claimed = Rule("i k, k j -> i j k")
    assert check_call(aten.mm.default, (full(5, 4), full(4, 6)), rule=claimed).wrong


def test_a_bias_that_would_count_on_every_rank():
    args = full(6), full(5, 4), full(4, 6)
    assert verdicts(aten.addmm.default, args, "j, i k, k j -> i j", "red=k:sum plus=0") == set()
    assert verdicts(aten.addmm.default, args, "j, i k, k j -> i j", "red=k:sum") == {
        "k split: R, S(1), S(0) -> P(sum)",
        "k split in 2 runs: R, S(1/2), S(0/2) -> P(sum)",
        "k split in units of 2: R, S(1*2), S(0*2) -> P(sum)",
    }


def test_pieces_that_would_have_to_be_even():
    with library("validate_even", "swap", lambda x: x.view(-1, 2).flip(1).reshape(-1)) as op:
        assert verdicts(op, [full(8)], "n -> n", meshes=((2,),)) == set()
        assert verdicts(op, [full(6)], "n -> n", meshes=((2,),)) == {  # pieces of 3 cannot be swapped in twos
            "n split: S(0) -> S(0)",
            "n split in 2 runs: S(0/2) -> S(0/2)",
        }
        pairs = Rule(lambda x: Made("(n P) -> (n P)", {"n": x.shape[0] // 2, "P": 2}))
        report = check_call(op, [full(12)], rule=pairs)
        assert not report.wrong
        assert any(o.verdict == "right" and o.split for o in report.outcomes)


def test_a_kernel_that_fails_on_an_empty_piece():
    rule = Rule("a b -> b", options("red=a:product"))
    report = check_call(aten.amax.default, (full(3, 4), [0]), rule=rule, meshes=((4,),))
    assert "rank (3,) raised" in report.wrong[0].detail


def test_backward_is_proved_with_forward():
    report = validate_rule(torch.nn.functional.layer_norm, [(full(5, 4), (4,), full(4), full(4))])
    assert {"native_layer_norm.default", "native_layer_norm_backward.default"} <= {o.operator for o in report.right}
    without = validate_rule("layer_norm", [(full(5, 4), (4,), {"weight": full(4)})], backward=False)
    assert {o.operator for o in without.right} == {"native_layer_norm.default"}


def test_where_torch_makes_tensors_by_default_makes_no_difference():
    scores, other = full(5, 4), full(4)
    with torch.device("meta"):
        report = validate_rule(torch.nn.functional.layer_norm, [(scores, (4,), other, other)])
    assert {o.operator for o in report.right} == {"native_layer_norm.default", "native_layer_norm_backward.default"}


def test_in_place_operators_keep_their_operand_where_it_is():
    report = check_call(aten.mul_.Tensor, (full(5, 4), full(4)))
    assert not report.wrong
    assert {o.verdict for o in report.outcomes if o.ways == ("terms: R, P(sum) -> P(sum)",)} == {"not possible"}


def test_uninitialised_and_random_results_are_judged_by_shape():
    report = check_call(aten.empty_like.default, (full(5, 4),))
    assert report.right
    assert not report.wrong


def test_values_that_are_not_finite():
    x = full(5, 4)
    x[0, 0], x[1, 1], x[4, 3] = torch.inf, torch.nan, -torch.inf
    for func, args in (
        (aten.add.Tensor, (x, full(4))),
        (aten.amax.default, (x, [0])),
        (aten.sum.dim_IntList, (x, [1])),
    ):
        assert not check_call(func, args).wrong
    huge = torch.full((4,), -torch.finfo(torch.float32).max)
    assert not check_call(aten.add.Tensor, (huge, torch.zeros(4))).wrong


def test_dtypes():
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.int32):
        x = (full(5, 4) * 8).to(dtype)
        for func in (aten.mul.Tensor, aten.add.Tensor):
            report = check_call(func, (x, x))
            assert not report.wrong, str(report.wrong[0])
    assert not check_call(aten.any.dims, (full(5, 4) > 0, [0])).wrong


class Messages(expecttest.TestCase):
    def test_a_wrong_rule_says_where(self):
        report = check_call(aten.exp.default, [torch.zeros(4)], rule=Rule("... -> ...", options("lin=0")))
        with pytest.raises(ShardingError) as caught:
            report.raise_if_wrong()
        self.assertExpectedInline(
            str(caught.value),
            """\
The rule of exp.default is wrong in 19 of 32 trials.
  expected: what eager torch gives on the full tensors
  got:      result 0 as (0=2:P(sum)), rank (0,): element (0,) is 3.2921254634857178, expected 1.0 (4 elements differ)
  where:    exp.default(float32[4]), '... -> ...'
            on 2 ranks, terms: P(sum) -> P(sum)
  fix:      mend the line, or leave an option out: a factor in upper case is never split""",
        )

    def test_what_nobody_has_a_rule_for(self):
        with library("validate_none", "twice", lambda x: x + x), pytest.raises(ShardingError) as caught:
            validate_rule("validate_none::twice", [(full(4, 4),)], backward=False)
        self.assertExpectedInline(
            str(caught.value),
            """\
Nothing was proved: no operator that was called has a rule for these samples.
  expected: an operator with a rule
  got:      validate_none::twice.default
  fix:      torchshard.register_rule(op, "i k, k j -> i j", ...)""",
        )

    def test_a_report_is_a_table(self):
        report = validate_rule("mm", [(full(5, 4), full(4, 6))], backward=False)
        self.assertExpectedInline(
            str(report),
            """\
operator    rule             way                                                right    wrong    not possible
mm.default  i k, k j -> i j  whole: R, R -> R                                       2        0               0
mm.default  i k, k j -> i j  i split: S(0), R -> S(0)                               2        0               0
mm.default  i k, k j -> i j  k split: S(1), S(0) -> P(sum)                          2        0               0
mm.default  i k, k j -> i j  k split in units of 2: S(1*2), S(0*2) -> P(sum)        2        0               0
mm.default  i k, k j -> i j  k split in 2 runs: S(1/2), S(0/2) -> P(sum)            2        0               0
mm.default  i k, k j -> i j  j split: R, S(1) -> S(1)                               2        0               0
mm.default  i k, k j -> i j  j split in units of 2: R, S(1*2) -> S(1*2)             2        0               0
mm.default  i k, k j -> i j  j split in 2 runs: R, S(1/2) -> S(1/2)                 2        0               0
mm.default  i k, k j -> i j  terms: P(sum), R -> P(sum)                             2        0               0
mm.default  i k, k j -> i j  terms: R, P(sum) -> P(sum)                             2        0               0
mm.default  i k, k j -> i j  terms: P(avg), R -> P(avg)                             2        0               0
mm.default  i k, k j -> i j  terms: R, P(avg) -> P(avg)                             2        0               0
mm.default  i k, k j -> i j  two ways at once                                      24        0               0""",
        )
