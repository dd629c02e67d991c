"""What arguments must be, where any other type would only be noticed deep inside."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError
from torchshard.keys import KeyRules


def _is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(one, str) for pair in value.items() for one in pair)


_GLOBS = (_are_texts, 'a list of globs, such as ["model.*"]')
_SIZE = (_is_whole, "a number of bytes, such as 64 * 2**20")
_EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "max_memory": _SIZE,
        "shard_size": _SIZE,
        "select": _GLOBS,
        "exclude": _GLOBS,
        "rename": (lambda value: isinstance(value, KeyRules) or callable(value), "a function of a key, or KeyRules"),
        "dtype": (
            lambda value: isinstance(value, str) or _is_table(value),
            'the name of a type, such as "bfloat16", or globs of keys to names',
        ),
        "mesh": (lambda value: isinstance(value, Sequence) and all(map(_is_whole, value)), "sizes, such as (2, 4)"),
        "placements": (_is_table, 'globs of keys to text, such as {"*.weight": "S(0),R"}'),
    }
)


def check_types(**given: object) -> None:
    """Raise CheckpointError if an argument is of another type than it must be; None is of any."""
    for name, value in given.items():
        fits, expected = _EXPECTED[name]
        if value is not None and not fits(value):
            raise CheckpointError(f"The argument {name} is of another type.", expected=expected, got=printable(value))
