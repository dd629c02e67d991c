"""Names in state dicts, with and without what wrappers put in front: `module.`, `_orig_mod.`."""

from collections import Counter
from collections.abc import Iterable

WRAPPERS = frozenset({"module", "_orig_mod"})
"""Attributes by which DistributedDataParallel and torch.compile hold what they wrap."""


def bare(key: str) -> str:
    """The key without the names of wrappers: "module._orig_mod.layers.0.weight" is "layers.0.weight"."""
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def renamed(given: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """Each given key, and which of a module's own keys it means.

    A key that the module knows means itself. Another means the one that differs by names of wrappers only; where there
    is none, or more than one, or more than one of the given keys that mean it, it stays as it is.
    """
    known = set(own)
    by_bare: dict[str, list[str]] = {}
    for key in known:
        by_bare.setdefault(bare(key), []).append(key)
    found = {}
    for key in given:
        candidates = by_bare.get(bare(key), [])
        found[key] = candidates[0] if key not in known and len(candidates) == 1 else key
    times = Counter(found.values())
    return {key: meant if times[meant] == 1 else key for key, meant in found.items()}
