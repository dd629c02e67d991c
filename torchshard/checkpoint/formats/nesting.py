"""Flat keys back to the nested state dict that was flattened."""

from collections.abc import Mapping
from typing import Any

from torchshard.checkpoint.entries import NESTING, Entry, Steps
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError

_SPARE = 100_000  # places of lists that may stay empty, as an empty dict among dicts leaves one


def nest(entries: Mapping[str, Entry], paths: Mapping[str, Steps], where: object) -> dict[str, object]:
    """The nested dicts and lists, entries as leaves.

    Args:
        entries: by flat key.
        paths: for each key its steps: text is a key of a dict, an integer a place in a list. Places that no key fills
            are None, as torch fills them.
        where: file, for errors.

    Raises:
        CheckpointError: two paths contradict each other, or a place in a list is out of all proportion.
    """
    root: dict[str, object] = {}
    spare = _SPARE + 2 * len(entries)
    for key, entry in entries.items():
        path = paths[key]
        added = _put(root, path, entry, spare)
        if added is None:
            raise CheckpointError(
                "The places of the keys in the state dict (planner_data) contradict each other.",
                got=f"{printable(key)} at {printable(path)}",
                where=where,
            )
        spare -= added
    return root


def _put(container: Any, path: Steps, entry: Entry, spare: int) -> int | None:
    """Put the entry in its place. Returns how many places of lists were added on the way; None if it does not fit."""
    added = 0
    kinds: list[type | None] = [dict if isinstance(step, str) else list for step in path[1:]]
    if not 0 < len(path) <= NESTING:
        return None
    step: Any
    for step, kind in zip(path, [*kinds, None], strict=True):
        if type(container) is list and type(step) is int and 0 <= step <= len(container) + spare - added:
            missing = max(0, step + 1 - len(container))
            container += [None] * missing
            added += missing
        elif type(container) is not dict or type(step) is not str:
            return None
        here = container[step] if type(container) is list else container.get(step)
        if here is None:
            here = container[step] = entry if kind is None else kind()
        elif type(here) is not kind:
            return None
        container = here
    return added
