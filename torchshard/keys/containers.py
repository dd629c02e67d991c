"""Containers of a state dict: where values lie, containers made anew, and which module's metadata are whose now."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torchshard.errors import ShardingError

NESTING = 100  # how deep containers may be nested; far more than any state dict, far less than Python's stack


def check_nesting(tree: Any, depth: int = 0) -> None:
    """Refuse what has no end.

    Raises:
        ShardingError: containers nested too deep, as are those that hold themselves.
    """
    if not isinstance(tree, (Mapping, list, tuple)):
        return
    if depth > NESTING:
        raise ShardingError(
            "Containers are nested too deep, or hold themselves.",
            expected=f"at most {NESTING}",
            fix="leave out what refers back",
        )
    for value in tree.values() if isinstance(tree, Mapping) else tree:
        check_nesting(value, depth + 1)


def like(container: Any, values: Any) -> Any:
    """A container of the same class with other values: a mapping of these items, a list or tuple of these values.

    A dict keeps its attributes, such as the _metadata of a module's state dict. The container is left as it is.

    Raises:
        ShardingError: a mapping that is no dict, of a class that takes none.
    """
    if isinstance(container, dict):
        made: Any = copy.copy(container)
        made.clear()
        made.update(values)
        return made
    if not isinstance(container, Mapping):
        return type(container)(*values) if hasattr(container, "_fields") else type(container)(values)
    try:  # a copy might share its items with the container
        return type(container)(dict(values))  # type: ignore[call-arg]
    except TypeError as error:
        raise ShardingError(
            "A mapping of this class cannot be made of other values.",
            expected="a dict, or a mapping whose class takes one",
            got=type(container).__name__,
            fix="give dict(it)",
        ) from error


def places(tree: Any, is_tensor: Callable[[Any], bool], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, container and place in it of each value that torch.distributed.checkpoint keeps by itself.

    Those are the items of dicts, and of lists that hold tensors, dicts or such lists; other lists, tuples and empty
    dicts are values.
    """

    def is_cut(value: Any) -> bool:
        return isinstance(value, list) and any(isinstance(v, Mapping) or is_tensor(v) or is_cut(v) for v in value)

    for step, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        name = f"{path}{step}"
        if is_cut(value) or (isinstance(value, Mapping) and value):
            yield from places(value, is_tensor, f"{name}.")
        else:
            yield name, tree, step


def modules_renamed(modules: Iterable[str], keys: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Old and new name of each module, as far as the old and new keys of what it holds tell; it may have several.

    A module of which no key tells goes with the one that holds it.
    """
    found: dict[tuple[str, ...], dict[tuple[str, ...], None]] = {}
    for old, new in keys:
        before, after = tuple(old.split(".")), tuple(new.split("."))
        for at in range(len(before)):
            tail = len(before) - at
            if before[at:] == after[-tail:]:
                found.setdefault(before[:at], {})[after[:-tail]] = None
            elif before[:at] == after[:at]:
                found.setdefault(before[:at], {})[after[:at]] = None
    renamed = []
    for module in modules:
        path = tuple(module.split(".")) if module else ()
        at = next((k for k in range(len(path), -1, -1) if path[:k] in found), 0)
        renamed += [(module, ".".join((*into, *path[at:]))) for into in found.get(path[:at], {path[:at]: None})]
    return renamed
