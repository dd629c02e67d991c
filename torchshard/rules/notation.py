"""The factor notation: what an operator does to dims, in one line.

    mm          i k, k j -> i j
    layer_norm  b s H, H, H -> b s H, b s 1, b s 1
    view        (a B) -> a B

Operands (the operator's tensor arguments, lists flattened) stand left of the arrow, results right of it, with commas
between. An operand names a factor for each of its dims; factors are the loop dimensions of the operator, and a factor
keeps its name wherever it occurs.

    dim     :=  factor  |  "(" factor+ ")"  |  "..."    and in operands  factor "?"  |  "(" factor+ ")?"
    factor  :=  lower-case name        may be split between ranks
             |  name with an upper-case first letter    must be whole on every rank
             |  "1"                    a dim of length 1

`(a B)` is one dim made of several factors, the first the slowest; only the first may be split, and only evenly. A dim
with `?` broadcasts: it may be of length 1 where others with its factors are longer. `...` stands for leading dims that
broadcast against one another, the last ones aligned; at the end of a result, where no operand has it, for any number of
dims that nobody knows, whole on every rank. An operand without dims (a scalar, or nothing between two commas)
is written as nothing.
"""

import functools
import re
from dataclasses import dataclass

from torchshard.errors import ShardingError

Dim = tuple[str, ...]  # its factors, slowest first; then MARK if it broadcasts
Operand = tuple[Dim, ...]
DOTS: Dim = ("...",)
MARK = "?"

_TOKEN = re.compile(r"[A-Za-z][A-Za-z0-9_]*|1|\.\.\.|->|,|\(|\)|\?")


@dataclass(frozen=True, slots=True)
class Signature:
    """A parsed line: a tuple of dims for each operand and each result."""

    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]


def factors(dim: Dim) -> Dim:
    """The factors of a dim, without the mark."""
    return dim[:-1] if dim[-1] == MARK else dim


def is_whole(factor: str) -> bool:
    """Whether the factor must not be split."""
    return factor[0].isupper() or factor == "1"


@functools.lru_cache(4096)
def parse(text: str) -> Signature:
    """Read a line of the notation.

    Raises:
        ShardingError: says what is wrong and points at the column.
    """
    sides: list[list[Operand]] = [[]]
    dims: list[Dim] = []
    tokens = _Tokens(text)
    while (token := tokens.next()) is not None:
        if token == "(":
            dims.append(_group(tokens))
        elif token == ")":
            raise tokens.error("a '(' before it")
        elif token in (",", "->"):
            sides[-1].append(tuple(dims))
            dims = []
            if token == "->":
                sides.append([])
                if len(sides) > 2:
                    raise tokens.error("one '->'")
        elif token == MARK:
            if len(sides) > 1 or not dims or dims[-1][-1] in ("...", "1", MARK):
                raise tokens.error("'?' behind a factor or a group of an operand")
            dims[-1] = (*dims[-1], MARK)
        elif token == "..." and DOTS in dims:
            raise tokens.error("one '...' an operand")
        else:
            dims.append((token,))
    if len(sides) == 1:
        raise tokens.error("'->' and the results")
    sides[-1].append(tuple(dims))
    return Signature(tuple(sides[0]), tuple(sides[1]))


def _group(tokens: "_Tokens") -> Dim:
    group: list[str] = []
    while (token := tokens.next()) != ")":
        if token is None or token in ("(", ",", "->", "...", MARK):
            raise tokens.error("factors, and ')' to close the group")
        group.append(token)
    if not group:
        raise tokens.error("a factor in the group")
    return tuple(group)


class _Tokens:
    """The words and signs of a line, one after another, with the column of the last one for errors."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.column = text.rstrip(), 0, 0

    def next(self) -> str | None:
        """The next token; None at the end."""
        rest = self.text[self.at :]
        self.column = self.at + len(rest) - len(rest.lstrip())
        if self.column == len(self.text):
            return None
        match = _TOKEN.match(self.text, self.column)
        if match is None:
            raise self.error("a factor, 1, '...', ',', '(', ')', '?' or '->'")
        self.at = match.end()
        return match.group()

    def error(self, expected: str) -> ShardingError:
        """The error at the last token."""
        found = repr(self.text[self.column]) if self.column < len(self.text) else "the end of the line"
        return ShardingError(
            f"A rule cannot be read at column {self.column + 1}.",
            expected=expected,
            got=f"{found}\n{self.text}\n{' ' * self.column}^",
            fix="a line such as  i k, k j -> i j",
        )
