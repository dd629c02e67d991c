"""Globs that are said something of: the first that fits a key counts."""

import fnmatch
import re
from collections.abc import Iterable


class Globs:
    """Globs as of fnmatch, in order.

    Names are looked up, and only globs with wildcards are tried: a thousand names cost a key what one does.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._places = {pattern: place for place, pattern in enumerate(dict.fromkeys(patterns))}
        self._wild = [
            (place, pattern, re.compile(fnmatch.translate(pattern)).match)
            for pattern, place in self._places.items()
            if any(sign in pattern for sign in "*?[")
        ]
        self._names = self._places.keys() - {pattern for _, pattern, _ in self._wild}

    def first(self, key: str) -> str | None:
        """The first glob that fits a key."""
        name = key if key in self._names else None
        before = len(self._places) if name is None else self._places[name]
        return next((pattern for place, pattern, fits in self._wild if place < before and fits(key)), name)

    def idle(self, keys: Iterable[str]) -> list[str]:
        """The globs that fit none of the keys."""
        keys = list(keys)
        met = self._names.intersection(keys)
        met |= {pattern for _, pattern, fits in self._wild if any(map(fits, keys))}
        return [pattern for pattern in self._places if pattern not in met]
