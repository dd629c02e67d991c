import pytest

from torchshard.errors import ShardingError
from torchshard.rules.bind import ONE, bind
from torchshard.rules.notation import parse


def bound(line, *shapes, **sizes):
    return bind(parse(line), shapes, sizes)


def test_a_letter_has_one_length():
    assert bound("i k, k j -> i j", (2, 3), (3, 4)).sizes == {"i": 2, "k": 3, "j": 4}
    assert bound("i k, k j -> i j", (2, 3), (1, 4)) is None


def test_a_mark_lets_a_dim_of_one_broadcast():
    found = bound("i? j?, i k, k j -> i j", (1, 4), (2, 3), (3, 4))
    assert found.operands[0] == (ONE, ("j",))
    assert found.known_shape(0) == (2, 4)
    assert bound("i? j?, i k, k j -> i j", (5, 4), (2, 3), (3, 4)) is None
    assert bound("i? j?, i k, k j -> i j", (5, 4), (1, 3), (3, 4)) is None  # the bias is longer than the product


def test_what_is_of_length_one_everywhere_keeps_its_factor():
    assert bound("i? j?, i k, k j -> i j", (1, 4), (1, 3), (3, 4)).operands[0] == (("i",), ("j",))


@pytest.mark.parametrize(("heads", "dim"), [(6, ("h", "r")), (1, ONE), (2, None)])
def test_a_group_broadcasts_as_one_dim(heads, dim):
    found = bound("(h r)?, h -> h r", (heads,), (2,), r=3)
    assert (found and found.operands[0]) == (dim and (dim,))


def test_a_length_that_is_given_stretches_all_operands():
    found = bound("g?, g? -> g", (1,), (1,), g=3)
    assert found.operands == ((ONE,), (ONE,))
    assert found.known_shape(0) == (3,)
    assert bound("g?, g? -> g", (1,), (4,), g=3) is None


def test_a_result_may_have_any_length_where_nothing_is_known():
    found = bound("a B -> a ZB", (5, 4))
    assert found.may_have(0, (5, 4))
    assert not found.may_have(0, (6, 4))
    assert not found.may_have(0, (5,))


def test_dims_at_the_end_of_a_result_that_nobody_knows():
    found = bound("a B -> a ..., ...", (5, 4))
    assert found.result_shape(0, (3, 7, 2)) == (5, 7, 2)  # of a rank that has three of the five
    assert found.result_shape(0, (3,)) == (5,)
    assert found.result_shape(1, ()) == ()
    assert not found.tells_shapes()
    with pytest.raises(ShardingError, match="another number of dims"):
        found.result_shape(0, ())
