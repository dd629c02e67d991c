"""Nested state dicts: their leaves under flat names, and flat names back to nested containers."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torchshard.checkpoint.entries import Entry, ObjectEntry, TensorEntry
from torchshard.checkpoint.pickles.inert import Global, OrderedDict, Record, Size
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError
from torchshard.keys.containers import NESTING

_SPARE = 100_000  # places of lists that may stay empty, as an empty dict among dicts leaves one

_LONG = 4000  # bits of an integer of which Python makes decimals in no time

Steps = tuple[str | int, ...]


def leaves(tree: object, where: object, *, as_torch: bool = False) -> Iterator[tuple[Steps, object]]:
    """Steps and value of each leaf of nested containers.

    Dicts are gone into; lists and tuples where they hold a tensor or a dict, however deep. An empty dict is a leaf.
    Steps into dicts are text, as torch.distributed.checkpoint has them, whatever their keys are.

    Args:
        tree: the containers.
        where: file, for errors.
        as_torch: tuples are leaves, and so are lists without tensors whose dicts are all empty, as they are for
            torch.distributed.checkpoint.

    Raises:
        CheckpointError: nested too deep, or the same containers refer to each other so often that there is no end.
    """
    yield from Walk(where, as_torch).leaves(tree, ())


class Walk:
    """Goes through containers that may refer to each other in any way, in time that goes with their number."""

    def __init__(self, where: object, as_torch: bool = False) -> None:
        self.where, self.as_torch = where, as_torch
        self.inside = (list,) if as_torch else (list, tuple)
        self.inner: dict[int, bool] = {}  # by id: does it hold a tensor or a dict?
        self.seen: set[int] = set()
        self.again = 10_000  # visits to containers that were visited before

    def leaves(self, value: object, path: Steps) -> Iterator[tuple[Steps, object]]:
        """Steps and value of each leaf at or below a value that is at `path`."""
        self.check_depth(len(path))
        if isinstance(value, dict) and value:
            self.visit(value)
            for key, item in value.items():
                yield from self.leaves(item, (*path, as_step(key)))
        elif isinstance(value, self.inside) and self.holds_more(value, len(path)):
            self.visit(value)
            for i, item in enumerate(value):
                yield from self.leaves(item, (*path, i))
        else:
            yield path, value

    def visit(self, container: object) -> None:
        """Count a visit; raise CheckpointError if those to the same containers have no end."""
        self.again -= id(container) in self.seen
        self.seen.add(id(container))
        if self.again < 0:
            raise CheckpointError("Containers refer to each other over and over.", where=self.where)

    def holds_more(self, value: object, depth: int) -> bool:
        """Whether this is, or holds anywhere, a tensor or a dict; only in what is gone into."""
        if isinstance(value, dict):
            return bool(value) or not self.as_torch
        if isinstance(value, TensorEntry):
            return True
        if not isinstance(value, self.inside):
            return False
        self.check_depth(depth)
        if id(value) not in self.inner:
            self.inner[id(value)] = False  # what holds nothing but itself holds nothing more
            self.inner[id(value)] = any(self.holds_more(item, depth + 1) for item in value)
        return self.inner[id(value)]

    def check_depth(self, depth: int) -> None:
        """Raise CheckpointError if this is too deep."""
        if depth > NESTING:
            raise CheckpointError("Containers are nested too deep.", expected=f"at most {NESTING}", where=self.where)


def attributes(tree: object, where: object) -> list[str]:
    """Dotted name of each attribute of the dicts of nested containers, such as "model._metadata"."""
    walk, found = Walk(where), list[str]()

    def look(value: object, path: str, depth: int) -> None:
        walk.check_depth(depth)
        if isinstance(value, OrderedDict):
            found.extend([f"{path}{as_step(name)}" for name in value.attributes or ()])
        if isinstance(value, dict) or (isinstance(value, (list, tuple)) and walk.holds_more(value, depth)):
            walk.visit(value)
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                look(item, f"{path}{as_step(key)}.", depth + 1)

    look(tree, "", 0)
    return found


def spread(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Dotted name and value of what an object of this key is made of: itself, or the leaves of a tuple with tensors."""
    for path, leaf in leaves(value, printable(key)):
        yield ".".join([key, *map(str, path)]), leaf


def same(a: object, b: object) -> bool:
    """Whether two values of plain data are of the same types and equal, NaN to NaN; time goes with their number."""
    pending, seen = [(a, b)], set[tuple[int, int]]()
    while pending:
        x, y = pending.pop()
        if type(x) is not type(y):
            return False
        ours, theirs = _inner(x), _inner(y)
        if ours is None or theirs is None:
            if x != y and (x == x or y == y):
                return False
        elif (id(x), id(y)) not in seen:  # containers may refer to each other in any way
            seen.add((id(x), id(y)))
            if ours.keys() != theirs.keys():
                return False
            pending += [(item, theirs[step]) for step, item in ours.items()]
    return True


def _inner(value: Any) -> Mapping[Any, object] | None:
    """What a value of plain data is made of; None where it is made of nothing else."""
    if isinstance(value, OrderedDict):
        return {**value, _itself: value.attributes}
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, Record):
        return {0: value.name, 1: value.args, 2: value.state}
    return {0: value.name} if isinstance(value, Global) else None


def as_step(key: object) -> str:
    """A key of a dict, or a place in a list, as text: what str() makes of torch's own."""
    return key if isinstance(key, str) else _spelled(key)


def _spelled(key: object) -> str:
    if isinstance(key, tuple):
        items = [_spelled(item) for item in key]
        if isinstance(key, Size):
            return f"torch.Size([{', '.join(items)}])"
        return f"({', '.join(items)}{',' * (len(items) == 1)})"
    if isinstance(key, Record):
        return f"{key.name}({', '.join(map(printable, key.args))})"
    if isinstance(key, int) and key.bit_length() > _LONG:
        return hex(key)
    return repr(key)


def _itself(value: object) -> object:
    return value


def as_entry(value: object) -> Entry:
    """A leaf as an entry: a tensor as it is, else an object."""
    return value if isinstance(value, TensorEntry) else ObjectEntry(partial(_itself, value))


def flatten(tree: object, where: object) -> dict[str, Entry]:
    """Entries by dotted name, as torch.distributed.checkpoint names them.

    Raises:
        CheckpointError: two leaves have the same dotted name, or the tree is not a dict.
    """
    if not isinstance(tree, dict):
        raise CheckpointError("The file holds no state dict.", expected="a dict", got=printable(tree), where=where)
    entries: dict[str, Entry] = {}
    for path, value in leaves(tree, where) if tree else ():
        key = ".".join(map(str, path))
        if key in entries:
            raise CheckpointError("Two entries have the same dotted name.", got=printable(key), where=where)
        entry = as_entry(value)
        entry.key = entry.key or key
        entries[key] = entry
    return entries


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
            raise contradiction(key, path, where)
        spare -= added
    return root


def contradiction(key: str, path: Steps, where: object) -> CheckpointError:
    """An error about a key that cannot be at its place."""
    return CheckpointError(
        "The places of the keys in the state dict (planner_data) contradict each other.",
        got=f"{printable(key)} at {printable(path)}",
        where=where,
    )


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
