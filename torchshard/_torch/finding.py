"""Looking a private name up when it is first used; and doing without, for tests."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_fast_paths = True


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """Run the fallbacks instead of the optional private fast paths (for tests; what was looked up before stays)."""
    global _fast_paths
    _fast_paths = False
    try:
        yield
    finally:
        _fast_paths = True


def find(path: str) -> Any:
    """The object at a dotted path below torch; None where it is missing or fast paths are off."""
    found: Any = torch if _fast_paths else None
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def find_once(path: str) -> Any:
    """find, for what is asked for at every collective: looked up once, as it neither comes nor goes."""
    return _found(path) if _fast_paths else None


_found = functools.cache(find)


def has_fast_paths() -> bool:
    """Whether optional private names may be used."""
    return _fast_paths
