"""A nested state dict put together anew: with other leaves, and with leaves that have other names."""

from collections.abc import Callable, Mapping
from typing import Any

from torchshard.checkpoint.entries import Entry
from torchshard.checkpoint.pickles.inert import Counter, OrderedDict
from torchshard.checkpoint.text import printable
from torchshard.checkpoint.trees import Walk, as_step
from torchshard.errors import CheckpointError
from torchshard.keys.containers import modules_renamed

_METADATA = "_metadata"  # of a module's state dict: what is known of each module, by its name


class _Dropped:
    """Stands for a leaf that is taken out."""


DROPPED = _Dropped()


class _Group:
    """A container to be: what it is like, and what it holds, groups and leaves, by key or place.

    Args:
        like: the container that it is a copy of.
        was: dotted beginning of all names in that one.
        now: dotted beginning of all names in this one.
    """

    __slots__ = ("items", "like", "names", "now", "was")

    def __init__(self, like: Any, was: str = "", now: str = "") -> None:
        self.like, self.was, self.now = like, was, now
        self.items: dict[Any, Any] = {}
        # Keys, or all places, as text.
        self.names: dict[str, Any] = {} if isinstance(like, dict) else {str(i): i for i in range(len(like))}

    def put(self, key: Any, item: Any) -> None:
        """Take an item in."""
        place = key if isinstance(self.like, dict) else self.names[as_step(key)]
        self.names.setdefault(as_step(key), place)
        self.items[place] = item

    def takes(self, key: Any) -> bool:
        """Whether there is room for an item of this key, which in a list may be text."""
        name = as_step(key)
        if isinstance(self.like, dict):
            return name not in self.names
        return name in self.names and self.names[name] not in self.items

    def inner(self, name: str) -> tuple[Any, str] | None:
        """Key of the group whose own name is the longest beginning of `name` up to a dot, and what follows the dot."""
        at = name.rfind(".")
        while at > 0:
            if name[:at] in self.names and isinstance(self.items.get(key := self.names[name[:at]]), _Group):
                return key, name[at + 1 :]
            at = name.rfind(".", 0, at)
        return None

    def made(self, moved: Mapping[str, str]) -> Any:
        """The container, or DROPPED.

        Args:
            moved: new to old name of each leaf, in all containers.
        """
        items = {key: item.made(moved) if isinstance(item, _Group) else item for key, item in self.items.items()}
        kept = {key: item for key, item in items.items() if item is not DROPPED}
        if not kept:
            return DROPPED
        if isinstance(self.like, dict):
            return self.dict_of(kept, moved)
        places = [kept.get(i) for i in range(len(self.like))]
        return places if isinstance(self.like, list) else tuple(places)

    def dict_of(self, items: Mapping[Any, Any], moved: Mapping[str, str]) -> dict[Any, Any]:
        """A dict as the old one, with its attributes; those of modules go by their new names."""
        if not isinstance(self.like, OrderedDict):
            return Counter(items) if isinstance(self.like, Counter) else dict(items)
        made = OrderedDict(items)
        made.attributes = self.like.attributes
        modules = (made.attributes or {}).get(_METADATA)
        if isinstance(modules, OrderedDict) and any(old != new for new, old in moved.items()):
            pairs = [
                (old.removeprefix(self.was), new.removeprefix(self.now))
                for new, old in moved.items()
                if old.startswith(self.was) and new.startswith(self.now)
            ]
            names = [name for name in modules if isinstance(name, str)]
            renamed = OrderedDict({new: modules[old] for old, new in modules_renamed(names, pairs)})
            renamed.attributes = modules.attributes
            made.attributes = {**(made.attributes or {}), _METADATA: renamed}
        return made


class Regrouped:
    """A copy of a state dict with other leaves, to which more can be added.

    Args:
        tree: nested as `leaves` goes through it.
        change: takes the dotted name and the leaf, gives the new leaf, or DROPPED. A container that loses all it held
            goes too; in a list or tuple None takes the place.
        where: file, for errors.
    """

    def __init__(self, tree: Any, change: Callable[[str, object], object], where: object) -> None:
        if not isinstance(tree, dict):
            raise CheckpointError("The file holds no state dict.", expected="a dict", got=printable(tree), where=where)
        self.change, self.where, self.walk = change, where, Walk(where)
        self.paths: dict[str, tuple[Any, ...]] = {}  # keys and places on the way to each leaf
        self.moved: dict[str, str] = {}  # new to old name of each leaf
        self.root = _Group(tree)
        self._fill(self.root, ())

    def _fill(self, group: _Group, path: tuple[Any, ...]) -> None:
        self.walk.visit(group.like)
        pairs = group.like.items() if isinstance(group.like, dict) else enumerate(group.like)
        for key, item in pairs:
            at = (*path, key)
            self.walk.check_depth(len(at))
            if item and (
                isinstance(item, dict) or (type(item) in (list, tuple) and self.walk.holds_more(item, len(at)))
            ):
                inner = _Group(item, (below := f"{group.was}{as_step(key)}."), below)
                group.put(key, inner)
                self._fill(inner, at)
                continue
            name = ".".join(map(as_step, at))
            self.paths[name] = at
            if (new := self.change(name, item)) is not DROPPED:
                group.put(key, new)
                self.moved[name] = name

    def add(self, name: str, entry: Entry, old: str | None = None) -> None:
        """Put an entry into the innermost container whose name its own begins with.

        Args:
            name: dotted.
            entry: the leaf.
            old: name of the leaf that it was: the containers that it was in are made anew where they have other names.

        Raises:
            CheckpointError: the place is taken.
        """
        path = self.paths.get(old or "", ())
        group, rest, walked = self.root, name, list[Any]()
        trail = [(group, rest, 0)]
        while (found := group.inner(rest)) is not None:
            key, rest = found
            group = group.items[key]
            walked.append(key)
            trail.append((group, rest, len(walked)))
        for group, rest, depth in reversed(trail):
            same = next((i for i, (a, b) in enumerate(zip(walked[:depth], path, strict=False)) if a != b), depth)
            wide = _as_wide(name, path)
            ways = (wide[depth:] if wide[:depth] == walked[:depth] else [], _ending(rest, path[same + 1 :]))
            steps = next((steps for steps in ways if steps and self._fits(group, steps, path)), [rest])
            if group.takes(steps[0]):
                break
            if isinstance(group.like, dict):
                raise CheckpointError("Two entries have the same name.", got=printable(name), where=self.where)
        for i, like in enumerate(self._containers(steps, path)):
            was = "".join([f"{as_step(key)}." for key in path[: len(path) - len(steps) + 1 + i]])
            inner = _Group(like, was, f"{group.now}{as_step(steps[i])}.")
            group.put(steps[i], inner)
            group = inner
        group.put(steps[-1], entry)
        self.moved[name] = name if old is None else old

    def _containers(self, steps: list[Any], path: tuple[Any, ...]) -> list[Any]:
        """What the steps but the first are steps into, on the old path."""
        found: list[Any] = [self.root.like]
        for key in path[:-1]:
            found.append(found[-1][key])
        return found[len(found) - len(steps) + 1 :]

    def _fits(self, group: _Group, steps: list[Any], path: tuple[Any, ...]) -> bool:
        inner = zip(steps[1:], self._containers(steps, path), strict=True)
        return group.takes(steps[0]) and all(isinstance(like, dict) or isinstance(key, int) for key, like in inner)

    def made(self) -> dict[Any, Any]:
        """The state dict."""
        made = self.root.made(self.moved)
        return self.root.dict_of({}, {}) if made is DROPPED else made


def _as_wide(name: str, path: tuple[Any, ...]) -> list[Any]:
    """A dotted name cut into steps as wide as those of the path; none if it is wider or narrower in all."""
    words, steps = name.split("."), list[Any]()
    widths = [as_step(key).count(".") + 1 for key in path]
    if len(words) != sum(widths):
        return []
    for key, width in zip(path, widths, strict=True):
        text, words = ".".join(words[:width]), words[width:]
        steps.append(key if text == as_step(key) else text)
    return steps


def _ending(name: str, path: tuple[Any, ...]) -> list[Any]:
    """A dotted name as steps: those of the path that it ends with, and one before them for all that it has more."""
    kept: list[Any] = []
    for key in reversed(path):
        text = as_step(key)
        if name == text:
            return [key, *kept]
        if not name.endswith(f".{text}"):
            break
        name = name[: -len(text) - 1]
        kept.insert(0, key)
    return [name, *kept]
