"""Globs that are said something of: the first that fits a key counts."""

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

_Wild = tuple[int, str, Callable[[str], object]]  # place, glob, and what says whether it fits


class Globs:
    """Globs as of fnmatch, in order.

    Names are looked up. Of globs with wildcards only those are tried of which the key has a run of whole segments
    between dots, such as `layers.7` of `*.layers.7.*`: a thousand that differ in such a run cost a key what one does.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._places = {pattern: place for place, pattern in enumerate(dict.fromkeys(patterns))}
        runs = {pattern: list(_runs(pattern)) for pattern in self._places if any(sign in pattern for sign in "*?[")}
        frequent = Counter(run for some in runs.values() for run in set(some))
        self._filed: dict[str, list[_Wild]] = {}  # by their rarest run; "" of those without one
        for pattern, some in runs.items():
            fits = re.compile(fnmatch.translate(pattern)).match
            filed = self._filed.setdefault(min(some, key=frequent.__getitem__, default=""), [])
            filed.append((self._places[pattern], pattern, fits))
        self._lengths = sorted({run.count(".") + 1 for run in self._filed if run})
        self._names = self._places.keys() - runs.keys()

    def first(self, key: str) -> str | None:
        """The first glob that fits a key."""
        found = key if key in self._names else None
        before = len(self._places) if found is None else self._places[found]
        for filed in self._near(key):
            for place, pattern, fits in filed:
                if place >= before:
                    break
                if fits(key):
                    before, found = place, pattern
                    break
        return found

    def idle(self, keys: Iterable[str]) -> list[str]:
        """The globs that fit none of the keys."""
        keys = list(keys)
        met = self._names.intersection(keys)
        left = self._filed.copy()
        met |= {pattern for _, pattern, fits in left.pop("", ()) if any(map(fits, keys))}
        for key in keys if left else ():
            for run in self._runs_of(key):
                if filed := left.get(run):
                    left[run] = [wild for wild in filed if not wild[2](key)]
        unmet = {pattern for filed in left.values() for _, pattern, _ in filed}
        met |= {pattern for run in left for _, pattern, _ in self._filed[run]} - unmet
        return [pattern for pattern in self._places if pattern not in met]

    def _near(self, key: str) -> Iterator[list[_Wild]]:
        """The globs that may fit a key, as they are filed."""
        filed = self._filed
        if "" in filed:
            yield filed[""]
        for run in self._runs_of(key):
            if run in filed:
                yield filed[run]

    def _runs_of(self, key: str) -> Iterator[str]:
        """The runs of whole segments of a key that are as long as one that globs are filed by."""
        segments = key.split(".")
        for length in self._lengths:
            for start in range(len(segments) - length + 1):
                yield ".".join(segments[start : start + length])


def _runs(pattern: str) -> Iterator[str]:
    """Whole segments that each key has which a glob fits, as many together as follow one another."""
    segments = re.sub(r"\[.*\]", "*", pattern, flags=re.DOTALL).split(".")  # a set may have dots inside
    for wild, run in groupby(segments, key=lambda segment: any(sign in segment for sign in "*?[")):
        if not wild and (text := ".".join(run)):
            yield text
