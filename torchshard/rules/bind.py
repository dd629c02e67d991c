"""A line of notation meets actual shapes: "..." spread out, broadcast dims marked, and the length of every factor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchshard.errors import ShardingError
from torchshard.rules.notation import DOTS, MARK, Dim, Operand, Signature, factors

ONE: Dim = ("1",)


@dataclass(frozen=True, slots=True)
class Bound:
    """A signature for tensors of certain shapes.

    Attributes:
        operands: dims of each operand, one for each dim of its shape.
        results: dims of each result.
        sizes: length of every factor that the operands or the rule tell.
    """

    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    sizes: Mapping[str, int]

    def result_shape(self, which: int, local: Sequence[int]) -> tuple[int, ...]:
        """Global shape of a result: from the factors, and from its local shape for dims that no factor tells.

        Raises:
            ShardingError: the line has another number of dims for it.
        """
        if which >= len(self.results):
            return tuple(local)
        dims = self.result_dims(which, len(local))
        if len(dims) != len(local):
            raise ShardingError(
                f"A rule is wrong: result {which} has another number of dims.",
                expected=f"{len(local)} dims, as the operator gave",
                got=f"{len(self.results[which])}: {' '.join('.'.join(dim) for dim in self.results[which])}",
                fix="mend the rule; torchshard.validate_rule tells where it is wrong",
            )
        return tuple([self._length(dim, n) for dim, n in zip(dims, local, strict=True)])

    def result_dims(self, which: int, ndim: int) -> Operand:
        """The dims of a result that has so many: "..." that no operand tells are those at its end that have no name."""
        dims = self.results[which]
        if not dims or dims[-1] != DOTS:
            return dims
        return (*dims[:-1], *[DOTS] * (ndim - len(dims) + 1))

    def known_shape(self, which: int) -> tuple[int, ...]:
        """Global shape of a result; a factor of which nothing is known counts as 1."""
        return tuple([self._length(dim, 1) for dim in self.results[which]])

    def may_have(self, which: int, shape: Sequence[int]) -> bool:
        """Whether a result may be of this global shape; a factor of which nothing is known has any length."""
        dims = self.results[which]
        return len(dims) == len(shape) and all(self._length(dim, n) == n for dim, n in zip(dims, shape, strict=True))

    def tells_shapes(self) -> bool:
        """Whether the lengths of all results follow from those of the operands."""
        return all(self._size(f) is not None for result in self.results for dim in result for f in dim)

    def _length(self, dim: Dim, local: int) -> int:
        sizes = [self._size(f) for f in dim]
        return local if None in sizes else math.prod([n for n in sizes if n is not None])

    def _size(self, factor: str) -> int | None:
        return 1 if factor == "1" else self.sizes.get(factor)


def bind(signature: Signature, shapes: Sequence[Sequence[int]], given: Mapping[str, int]) -> Bound | None:
    """Match a signature with the shapes of the operands.

    Args:
        signature: may have more operands than there are shapes: optional ones at the end.
        shapes: of the operands.
        given: lengths of factors that the operands do not show.

    Returns:
        None where the shapes contradict the signature, or each other: the operator itself will say why.
    """
    operands = signature.operands[: len(shapes)]
    if len(operands) < len(shapes):
        return None
    dots = [len(shape) - len(dims) + 1 for dims, shape in zip(operands, shapes, strict=True) if DOTS in dims]
    if any(n < 0 for n in dots):
        return None
    spread = [_spread(dims, len(shape) - len(dims) + 1) for dims, shape in zip(operands, shapes, strict=True)]
    if any(len(dims) != len(shape) for dims, shape in zip(spread, shapes, strict=True)):
        return None
    sizes = dict(given)
    for dims, shape in zip(spread, shapes, strict=True):
        for dim, n in zip(dims, shape, strict=True):
            factor, *more = factors(dim)
            if not more and dim != ONE and factor not in given and sizes.get(factor, 1) == 1:
                sizes[factor] = n
    stretched = []
    for dims, shape in zip(spread, shapes, strict=True):
        stretched.append(tuple([_stretched(dim, n, sizes) for dim, n in zip(dims, shape, strict=True)]))
        if any(_contradicts(dim, n, sizes) for dim, n in zip(stretched[-1], shape, strict=True)):
            return None
    results = [tuple(map(factors, _spread(dims, max(dots)) if dots else dims)) for dims in signature.results]
    return Bound(tuple(stretched), tuple(results), sizes)


def _spread(dims: Operand, count: int) -> Operand:
    """`...` as `count` factors that broadcast, named from the right so that they align."""
    if DOTS not in dims:
        return dims
    at = dims.index(DOTS)
    return (*dims[:at], *[(f".{r}", MARK) for r in reversed(range(count))], *dims[at + 1 :])


def _stretched(dim: Dim, n: int, sizes: Mapping[str, int]) -> Dim:
    """The factors of a dim: none where it broadcasts; without the mark all have the one length of their loop."""
    found = factors(dim)
    return ONE if found is not dim and n == 1 and any(sizes.get(f, 1) != 1 for f in found) else found


def _contradicts(dim: Dim, n: int, sizes: Mapping[str, int]) -> bool:
    known = [1 if f == "1" else sizes.get(f) for f in dim]
    return None not in known and math.prod([k for k in known if k is not None]) != n
