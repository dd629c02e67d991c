import contextlib

import expecttest
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchshard.errors import ShardingError
from torchshard.rules.notation import DOTS, parse


def test_lines_are_read():
    product = parse("i k, k j -> i j")
    assert product.operands == ((("i",), ("k",)), (("k",), ("j",)))
    assert product.results == ((("i",), ("j",)),)
    assert parse("(a B) 1 -> a B").operands == ((("a", "B"), ("1",)),)
    assert parse("... K, -> ...").operands == ((DOTS, ("K",)), ())
    assert parse("a -> ").results == ((),)
    assert parse("a? (b c)?, b -> a").operands == ((("a", "?"), ("b", "c", "?")), (("b",),))


names = st.sampled_from(["a", "b", "c", "d2", "Big", "1"])
operands = st.lists(st.one_of(names, st.lists(names, min_size=1, max_size=3).map(tuple)), max_size=4)


@given(st.lists(operands, min_size=1, max_size=3), st.lists(operands, min_size=1, max_size=3))
def test_what_is_written_is_read_back(left, right):
    def side(all_of_them):
        dims = [[f"({' '.join(d)})" if isinstance(d, tuple) else d for d in one] for one in all_of_them]
        return ", ".join(" ".join(one) for one in dims)

    def meaning(all_of_them):
        return tuple(tuple(d if isinstance(d, tuple) else (d,) for d in one) for one in all_of_them)

    read = parse(f"{side(left)} -> {side(right)}")
    assert read.operands == meaning(left)
    assert read.results == meaning(right)


@given(st.text(alphabet="ab1?(),.-> \n@", max_size=12))
def test_anything_else_is_a_sharding_error(text):
    with contextlib.suppress(ShardingError):
        parse(text)


class Messages(expecttest.TestCase):
    def test_errors_point_at_the_column(self):
        shown = []
        for line in (
            "i k, k j",
            "i @ -> i",
            "i ? -> i?",
            "1? -> ",
            "(a? b) ->",
            "(a -> b",
            "() -> a",
            "a) -> a",
            "a -> b -> c",
            "... ... -> a",
        ):
            with pytest.raises(ShardingError) as caught:
                parse(line)
            shown.append(str(caught.value))
        self.assertExpectedInline(
            "\n".join(shown),
            """\
A rule cannot be read at column 9.
  expected: '->' and the results
  got:      the end of the line
            i k, k j
                    ^
  fix:      a line such as  i k, k j -> i j
A rule cannot be read at column 3.
  expected: a factor, 1, '...', ',', '(', ')', '?' or '->'
  got:      '@'
            i @ -> i
              ^
  fix:      a line such as  i k, k j -> i j
A rule cannot be read at column 9.
  expected: '?' behind a factor or a group of an operand
  got:      '?'
            i ? -> i?
                    ^
  fix:      a line such as  i k, k j -> i j
A rule cannot be read at column 2.
  expected: '?' behind a factor or a group of an operand
  got:      '?'
            1? ->
             ^
  fix:      a line such as  i k, k j -> i j
A rule cannot be read at column 3.
  expected: factors, and ')' to close the group
  got:      '?'
            (a? b) ->
              ^
  fix:      a line such as  i k, k j -> i j
A rule cannot be read at column 4.
  expected: factors, and ')' to close the group
  got:      '-'
            (a -> b
               ^
  fix:      a line such as  i k, k j -> i j
A rule cannot be read at column 2.
  expected: a factor in the group
  got:      ')'
            () -> a
             ^
  fix:      a line such as  i k, k j -> i j
A rule cannot be read at column 2.
  expected: a '(' before it
  got:      ')'
            a) -> a
             ^
  fix:      a line such as  i k, k j -> i j
A rule cannot be read at column 8.
  expected: one '->'
  got:      '-'
            a -> b -> c
                   ^
  fix:      a line such as  i k, k j -> i j
A rule cannot be read at column 5.
  expected: one '...' an operand
  got:      '.'
            ... ... -> a
                ^
  fix:      a line such as  i k, k j -> i j""",
        )
