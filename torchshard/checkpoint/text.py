"""Sizes and untrusted names as text, and sizes back from text."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from torchshard import layout
from torchshard.errors import CheckpointError, ShardingError
from torchshard.keys.globs import Globs
from torchshard.layout import Partial, Placement

_T = TypeVar("_T")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 2**10, "m": 2**20, "g": 2**30}
_UNITS |= {"t": 2**40, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(text: str, option: str | None = None) -> int:
    """Bytes from "64MiB", "1.5 GiB", "500MB" or "1048576"; a single letter means the binary unit, as in "64M".

    Args:
        text: what was given.
        option: to which option, for the error.

    Raises:
        CheckpointError: not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise CheckpointError(
            "This is not a size.", expected="a number with a unit, such as 64MiB", got=repr(text), where=option
        )
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def format_size(nbytes: int) -> str:
    """Bytes for reading: "512 B", "1.5 KiB", "64.0 MiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Left-aligned columns below their names and a line; a checkpoint may have many thousand rows."""
    texts = [headers, *[[str(cell) for cell in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    texts.insert(1, ["-" * width for width in widths])
    return "\n".join(["  ".join(map(str.ljust, row, widths)).rstrip() for row in texts])


def printable(value: object, limit: int = 120) -> str:
    """An untrusted value as text that is safe in a message or on a terminal: short, one line, no control characters."""
    if isinstance(value, str):
        text = value[:limit]
        return text + ("..." if len(value) > limit else "") if text.isprintable() else ascii(text)
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 2**64 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, (float, complex)):
        return repr(value)
    if isinstance(value, bytes):
        return repr(value[:limit])
    if isinstance(value, (tuple, list)) and all(type(v) in (int, str, bool) for v in value[:9]) and len(value) < 9:
        return f"({', '.join(printable(v) for v in value)})"
    return f"a {type(value).__name__}"


def listed(names: Sequence[object]) -> str:
    """Untrusted names as text for a message: the first ten, and whether there are more."""
    return ", ".join(map(printable, names[:10])) + (" ..." if len(names) > 10 else "")


def parse_placements(text: str, axes: int, pattern: str) -> tuple[Placement, ...]:
    """Placements as users write them, "S(0),R", or "S(0/3*64),R" for a split of three runs in units of 64.

    Args:
        text: what was given.
        axes: of the mesh.
        pattern: of which keys, for the error.

    Raises:
        CheckpointError: not placements, another number than there are axes, or Partial.
    """
    where = f"placements of {printable(pattern)}"
    try:
        found = layout.parse_placements(text)
    except ShardingError as error:
        raise CheckpointError(error.what, expected=error.expected, got=error.got, where=where) from error
    if len(found) != axes or any(isinstance(p, Partial) for p in found):
        raise CheckpointError(
            "A mesh takes one placement an axis, Shard or Replicate.",
            expected=f"{axes}, such as {','.join(['S(0)', *['R'] * (axes - 1)])}",
            got=repr(text),
            where=where,
        )
    return tuple(found)


def parse_mesh(text: str, option: str) -> tuple[int, ...]:
    """The shape of a mesh from "2x4" or "8".

    Args:
        text: what was given.
        option: to which option, for the error.

    Raises:
        CheckpointError: not that.
    """
    parts = text.split("x")
    if not all(part.isdecimal() and len(part) < 7 and int(part) for part in parts):
        raise CheckpointError(
            "This is not the shape of a mesh.", expected="numbers of ranks, such as 2x4", got=repr(text), where=option
        )
    return tuple(map(int, parts))


def parse_pairs(texts: Sequence[str], option: str, like: str, default: str | None = None) -> dict[str, str]:
    """Patterns and what is said of them, from "PATTERN=VALUE"; a text without "=" is said of `default`.

    Args:
        texts: of an option that may be given several times.
        option: its name, for the error.
        like: an example, for the error.
        default: a pattern.

    Raises:
        CheckpointError: no "=", and no default; or a pattern twice.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        pattern, equals, value = text.rpartition("=")
        if not equals and default is None:
            raise CheckpointError(
                "A pattern and its value are needed, with = between.",
                expected=f"such as '{like}'",
                got=repr(text),
                where=option,
            )
        pattern = pattern if equals else default or ""
        if pattern in pairs:
            raise CheckpointError(
                "A pattern is given twice.",
                got=f"{pairs[pattern]!r} and {value!r}",
                where=f"{option}, {printable(pattern)}",
            )
        pairs[pattern] = value
    return pairs


def said_of(keys: Collection[str], patterns: Mapping[str, _T]) -> dict[str, _T]:
    """What the first glob that matches a key says of it, for all keys that one matches.

    Raises:
        CheckpointError: a glob that says nothing of any key.
    """
    globs = Globs(patterns)
    first = {key: globs.first(key) for key in keys}
    met = set(first.values())
    for pattern in [pattern for pattern in patterns if pattern not in met]:
        check_matches([pattern], keys)
        raise CheckpointError(
            "Other patterns match all keys of this one first.", got=printable(pattern), fix="Give it before them."
        )
    return {key: patterns[pattern] for key, pattern in first.items() if pattern is not None}


def check_matches(patterns: Iterable[str], keys: Iterable[str]) -> None:
    """Raise CheckpointError if one of the globs matches none of the keys."""
    for pattern in Globs(patterns).idle(keys):
        raise CheckpointError(
            "No key matches this pattern.", got=printable(pattern), fix="Look at the keys with inspect."
        )
