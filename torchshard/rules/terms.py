"""Whether a linear operator may work on the terms of a sum instead of on the sum: what dtypes have to do with it.

Operators are linear in exact numbers. Where whole numbers wrap, are rounded, or become another type, the sum of what
the operator makes of the terms is not what it makes of the sum.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torchshard.rules.rule import Options


def converts_sums(source: Any, target: Any) -> bool:
    """Whether converting each term converts the sum.

    Not from whole numbers, whose sum may have wrapped; not to them; and not to fewer bits, where terms may cancel.
    """
    if source is target:
        return True
    if is_whole_number(source) or is_whole_number(target):
        return False
    return bool(target.itemsize // (1 + target.is_complex) >= source.itemsize // (1 + source.is_complex))


def is_whole_number(dtype: Any) -> bool:
    """Whether a dtype is one of integers or booleans."""
    return not (dtype.is_floating_point or dtype.is_complex)


def narrowed(options: Options, terms: Mapping[int, Any], results: Iterable[Any]) -> Options:
    """The options without the groups of operands whose terms the operator does not add up as their sum.

    Args:
        options: of the rule.
        terms: number of an operand that is Partial -> its dtype.
        results: dtypes of what the operator gives for the whole operands.
    """
    results = list(results)

    def passes(dtype: Any) -> bool:
        rounded = options.rounds and is_whole_number(dtype)
        return not rounded and all(converts_sums(dtype, result) for result in results)

    linear = tuple([group for group in options.linear if all(passes(terms[k]) for k in group if k in terms)])
    return options if linear == options.linear else replace(options, linear=linear)
