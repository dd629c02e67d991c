"""Rules that users register: a custom operator with backward on real ranks, and what is refused."""

import warnings

import expecttest
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.ranks import run_ranks
from tests.tensor.proving.proof import exact
from torchshard import distribute_tensor, fallback, register_rule, validate_rule
from torchshard.errors import ShardingError
from torchshard.rules.registry import find


@torch.library.custom_op("register_rule_test::scaled_product", mutates_args=())
def scaled_product(a: torch.Tensor, b: torch.Tensor, factor: float) -> torch.Tensor:
    return a @ b * factor


@torch.library.custom_op("register_rule_test::scaled_product_backward", mutates_args=())
def scaled_product_backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return grad @ b.T * factor, a.T @ grad * factor


def _backward(ctx, grad):
    return *scaled_product_backward(grad, *ctx.saved_tensors, ctx.factor), None


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.factor = inputs[2]


@torch.library.custom_op("register_rule_test::doubled", mutates_args=())
def doubled(a: torch.Tensor) -> torch.Tensor:
    return 2 * a


@torch.library.custom_op("register_rule_test::with_count", mutates_args=())
def with_count(a: torch.Tensor) -> tuple[torch.Tensor, int]:
    return 2 * a, len(a)


doubled.register_fake(torch.empty_like)
scaled_product.register_autograd(_backward, setup_context=_setup)

LINE = "i k, k j -> i j"
BACKWARD = "i j, i k, k j -> i k, k j"


def full(*shape):
    return exact(shape, torch.Generator().manual_seed(len(shape)))


SAMPLES = [(full(5, 4), full(4, 6), 0.5), (full(6, 3), full(3, 1), 2.0)]


def _on_ranks(rank, world):
    warnings.simplefilter("error")  # gathering would warn
    mesh = init_device_mesh("cpu", (world,))
    register_rule(scaled_product, LINE, lin="0,1", red="k:sum")
    register_rule(scaled_product_backward, BACKWARD, lin=0, red={"i": "sum", "j": "sum"})
    a, b = full(5, 4).requires_grad_(), full(4, 6).requires_grad_()
    want = scaled_product(a, b, 0.5)
    want.sum().backward()
    seen = []
    for pa, pb in ((Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Shard(1))):
        x = distribute_tensor(a.detach(), mesh, [pa]).requires_grad_()
        y = distribute_tensor(b.detach(), mesh, [pb]).requires_grad_()
        got = scaled_product(x, y, 0.5)
        got.sum().backward()
        seen.append(str(got.placements[0]))
        torch.testing.assert_close(got.full_tensor(), want)
        torch.testing.assert_close(x.grad.full_tensor(), a.grad)
        torch.testing.assert_close(y.grad.full_tensor(), b.grad)
    return seen


def test_a_custom_operator_and_its_backward_on_real_ranks():
    expected = [str(p) for p in (Shard(0), Partial(), Shard(1))]
    assert run_ranks(2, _on_ranks) == [expected] * 2


def test_a_rule_is_proved_on_samples_and_later():
    with register_rule("register_rule_test::scaled_product", LINE, lin="0,1", red="k:sum", samples=SAMPLES) as handle:
        assert handle.name == "register_rule_test::scaled_product.default"
        report = validate_rule(scaled_product, SAMPLES)
        assert handle.name in {o.operator for o in report.right}
        with register_rule(scaled_product_backward, BACKWARD, lin=0, red="i:sum,j:sum"):
            report = validate_rule(scaled_product, SAMPLES)
            assert "register_rule_test::scaled_product_backward.default" in {o.operator for o in report.right}
    assert find(handle.name) is None


def test_a_wrong_rule_is_not_registered():
    wrong = [
        {"lin": "0+1", "red": "k:sum"},
        {"lin": "0,1", "red": "k:max"},
        {"mono": True},
    ]
    for options in wrong:
        with pytest.raises(ShardingError, match="is wrong in"):
            register_rule(scaled_product, LINE, samples=SAMPLES, **options)
    with pytest.raises(ShardingError, match="is wrong in"):
        register_rule(scaled_product, "i k, k j -> j i", samples=SAMPLES)
    assert find("register_rule_test::scaled_product.default") is None


def test_a_wrong_rule_is_found_later():
    with register_rule(scaled_product, LINE, lin="0+1"), pytest.raises(ShardingError, match="is wrong in"):
        validate_rule(scaled_product, SAMPLES)


def test_a_rule_replaces_another_only_if_told():
    with register_rule(scaled_product, LINE):
        with pytest.raises(ShardingError, match="has a rule already"):
            register_rule(scaled_product, LINE, red="k:sum")
        before = find("register_rule_test::scaled_product.default")
        with register_rule(scaled_product, LINE, red="k:sum", override=True):
            assert find("register_rule_test::scaled_product.default") is not before
        assert find("register_rule_test::scaled_product.default") is before
    table = find("mm.default")
    with pytest.raises(ShardingError, match="has a rule already"):
        register_rule(torch.ops.aten.mm.default, LINE)
    handle = register_rule("mm", LINE, override=True)
    assert find("mm.default") is handle.rule
    handle.remove()
    handle.remove()
    assert find("mm.default") is table


def test_a_rule_may_be_a_function():
    def line(a, b, factor):
        return "i k, k j -> i j" if factor == 2.0 else "I K, K J -> I J"

    with register_rule(scaled_product, line, reads="factor", samples=[SAMPLES[1]]) as handle:
        report = validate_rule(scaled_product, SAMPLES, backward=False)
        assert {o.line for o in report.right if o.operator == handle.name} == {LINE, "I K, K J -> I J"}
    with pytest.raises(ShardingError, match="depends on the value of factor, and does not say that it reads it"):
        register_rule(scaled_product, line, samples=[SAMPLES[1]])


def _with_one_rule_and_another(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    x = distribute_tensor(full(5, 4), mesh, [Shard(0)])
    compiled = torch.compile(lambda x: doubled(x), backend="aot_eager", fullgraph=True)
    seen = []
    for line in ("i j -> i j", "I j -> I j"):
        with register_rule(doubled, line):
            seen.append((compiled(x).placements, doubled(x).placements))
    with fallback("silent"):
        for _ in range(2):  # the second call runs by the plan of the first
            result, count = with_count(x)
            assert torch.equal(result.full_tensor(), 2 * full(5, 4))
            assert count == 5
        seen.append((compiled(x).placements, doubled(x).placements))
    return seen


def test_graphs_are_made_anew_for_another_rule():
    for seen in run_ranks(2, _with_one_rule_and_another):
        assert [one for one, _ in seen] == [other for _, other in seen]


def test_operators_that_rules_do_not_decide_about():
    for name in ("native_dropout", "_foreach_add.List"):
        with pytest.raises(ShardingError, match="communicates inside"):
            register_rule(name, "... -> ...", override=True)
    with pytest.raises(ShardingError, match="made of other operators"):
        register_rule("matmul", LINE)
    with pytest.raises(ShardingError, match="gives what is no tensor"):
        register_rule(with_count, lambda a: "... -> ..., ")
    with pytest.raises(TypeError, match="expected an operator"):
        register_rule(torch.relu, "... -> ...")
    with pytest.raises(AttributeError, match=r"no operator '.*': expected a name such as 'mm'"):
        register_rule("no_such_operator", "... -> ...")


def _without_fake(rank, world):
    """Pieces of length 1 do not show strides, and the operator cannot be asked: it has no register_fake."""
    mesh = init_device_mesh("cpu", (world,))
    a, b = full(3, 4), full(4, 6)
    with register_rule(scaled_product, LINE):
        got = scaled_product(distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Replicate()]), 0.5)
        assert got.placements == (Shard(0),)
        assert got.stride() == (6, 1)
        torch.testing.assert_close(got.full_tensor(), scaled_product(a, b, 0.5))
        short = distribute_tensor(full(4, 6)[:1], mesh, [Replicate()])  # as long as a rank's piece of k, but not as k
        with fallback("silent"), pytest.raises(RuntimeError, match="cannot be multiplied"):
            scaled_product(distribute_tensor(a[:, :2], mesh, [Shard(1)]), short, 0.5)
    with fallback("silent"), register_rule(scaled_product, "i k b, k j -> i j"):  # fits no matrix: gathered
        got = scaled_product(distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Replicate()]), 0.5)
        torch.testing.assert_close(got.full_tensor(), scaled_product(a, b, 0.5))


def test_an_operator_that_knows_no_meta_tensors():
    run_ranks(2, _without_fake)


def _wrong_shapes(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    a, b = (distribute_tensor(full(*shape), mesh, [Shard(0)]) for shape in ((5, 4), (4, 6)))
    messages = []
    for line in ("i k, k j -> j i", "i k, k j -> i", "i k, k j -> i j k"):
        with register_rule(scaled_product, line), pytest.raises(ShardingError, match=r"rule.* is wrong") as caught:
            scaled_product(a, b, 0.5)
        messages.append(str(caught.value))
    return messages


def test_a_wrong_shape_is_found_at_the_first_call():
    messages = run_ranks(2, _wrong_shapes)
    assert "expected: 2 dims" in messages[0][1]


@torch.library.custom_op("register_rule_test::multiples", mutates_args=())
def multiples(a: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [a * (n + 1) for n in range(count)]


multiples.register_fake(lambda a, count: [torch.empty_like(a) for _ in range(count)])


def _several_results(rank, world):
    a = distribute_tensor(full(5, 4), init_device_mesh("cpu", (world,)), [Shard(0)])
    with register_rule(multiples, "i k -> i k"):
        one = multiples(a, 1)
        with pytest.raises(ShardingError, match=r"rule.* is wrong") as caught:
            multiples(a, 3)
    with register_rule(multiples, lambda a, count: f"i k -> {', '.join(['i k'] * count)}", samples=[(full(5, 4), 3)]):
        assert [x.placements for x in (*one, *multiples(a, 3))] == [(Shard(0),)] * 4
    return str(caught.value)


def test_a_line_for_as_many_results_as_there_are():
    message = run_ranks(2, _several_results)[0]
    assert "got:      3" in message
    assert "function of the arguments" in message


class Messages(expecttest.TestCase):
    def test_what_does_not_fit(self):
        shown = []
        for line, options in (
            ("i k, k j > i j", {}),
            ("i k -> i", {}),
            ("i k, k j -> i, j", {}),
            (LINE, {"lin": "0,2"}),
            (LINE, {"red": "z:sum"}),
            (LINE, {"lin": 0, "plus": 5}),
        ):
            with pytest.raises(ShardingError) as caught:
                register_rule(scaled_product, line, **options)
            shown.append(str(caught.value))
        self.assertExpectedInline(
            "\n".join(shown),
            """\
A rule cannot be read at column 10.
  expected: a factor, 1, '...', ',', '(', ')', '?' or '->'
  got:      '>'
            i k, k j > i j
                     ^
  fix:      a line such as  i k, k j -> i j
The line 'i k -> i' does not fit register_rule_test::scaled_product.default.
  expected: 2 operands
  got:      1
  fix:      left of '->' write the dims of each tensor argument, with commas between
The line 'i k, k j -> i, j' does not fit register_rule_test::scaled_product.default.
  expected: 1 results
  got:      2
  fix:      right of '->' write the dims of each result, with commas between
The line 'i k, k j -> i j' does not fit register_rule_test::scaled_product.default.
  expected: operands from 0 to 1 in lin= and plus=
  got:      [0, 2]
  fix:      count operands from 0
The line 'i k, k j -> i j' does not fit register_rule_test::scaled_product.default.
  expected: factors of the operands in red=
  got:      z
  fix:      red=k:sum, with k a dim that no result has
The line 'i k, k j -> i j' does not fit register_rule_test::scaled_product.default.
  expected: operands from 0 to 1 in lin= and plus=
  got:      [0, 5]
  fix:      count operands from 0""",
        )

    def test_what_fits_no_sample(self):
        with pytest.raises(ShardingError) as caught:
            register_rule(scaled_product, "i k b, k j -> i j", samples=SAMPLES)
        self.assertExpectedInline(
            str(caught.value),
            """\
The rule of register_rule_test::scaled_product.default was proved on no sample.
  expected: a line that fits the shapes of the samples
  got:      register_rule_test::scaled_product.default(float32[5, 4], float32[4, 6]) by 'i k b, k j -> i j': not possible, the rule has no line for these shapes
  fix:      samples=[(torch.randn(5, 4), ...)], with a length for each dim of the line""",
        )


@pytest.mark.parametrize(
    ("red", "got", "fix"),
    [("b:add", "red=b:add", "red=b:sum"), ("sum", "red=sum", "red=k:sum, where k is the factor")],
)
def test_a_reduction_that_does_not_exist(red, got, fix):
    with pytest.raises(ShardingError, match="names, for a factor, a reduction that does not exist") as caught:
        register_rule(scaled_product, LINE, red=red)
    assert (caught.value.got, caught.value.fix) == (got, fix)
