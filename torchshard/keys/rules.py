"""The rules: each says what becomes of all keys, and which rule undoes it. They know keys, not values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torchshard.errors import ShardingError
from torchshard.keys.patterns import Pattern


@dataclass(frozen=True)
class Value:
    """What a new key's value is made of: one old value, or others cut, joined or transposed.

    Attributes:
        key: of the old value, where it is one as it is; it may be the empty text.
        made_of: the values that it is made of, else.
        how: "join", "cut" or "transpose".
        dim: along which values are joined or cut.
        sizes: proportions of the parts along it; equal ones where empty.
        place: which of the parts is cut out.
    """

    key: str | None = None
    made_of: tuple["Value", ...] = ()
    how: str = ""
    dim: int = 0
    sizes: tuple[int, ...] = ()
    place: int = 0


Values = dict[str, Value]


class Rule(Protocol):
    """One rule: what becomes of all keys."""

    def apply(self, values: Values) -> tuple[Values, set[str]]:
        """The new keys with their values, and which old keys it fits."""

    def inverse(self, keys: Sequence[str] | None) -> "Rule":
        """The rule that undoes this one; `keys` are those that it was applied to, where they are known."""


@dataclass(frozen=True)
class _Rename:
    pattern: Pattern
    replacement: str

    def __str__(self) -> str:
        return f"rename({self.pattern.text!r}, {self.replacement!r})"

    def apply(self, values: Values) -> tuple[Values, set[str]]:
        """As of Rule."""
        fits, back = set(self.pattern.fitting(values)), self._back
        news = {key: self.pattern.replace(key, self.replacement) for key in fits}
        for key in _in_order(values, fits, back.pattern.fitting(values)):
            _check_undone(key, news.get(key, key), back.pattern, back.replacement, self)
        return _replaced(values, {old: [(new, values[old])] for old, new in news.items()}), fits

    @cached_property
    def _back(self) -> "_Rename":
        return self.inverse(None)

    def inverse(self, keys: Sequence[str] | None) -> "_Rename":
        """As of Rule."""
        pattern, replacement = self.pattern.turned_round(self.replacement)
        return _Rename(pattern, replacement)


@dataclass(frozen=True)
class Prefix:
    """Add a prefix, or take it away (where it is); everywhere: between all dots."""

    prefix: str
    add: bool
    everywhere: bool = False

    def apply(self, values: Values) -> tuple[Values, set[str]]:
        """As of Rule."""
        news = self._changed(values)
        return _replaced(values, {old: [(new, values[old])] for old, new in news.items()}), set(news)

    def _changed(self, keys: Iterable[str]) -> dict[str, str]:
        """The new names of the keys that get one."""
        if not self.prefix:
            return {}
        if self.add:
            return {key: self.prefix + key for key in keys}
        if self.everywhere:
            pattern = Pattern.of(self.prefix)
            return {key: pattern.replace(key, "") for key in pattern.fitting(keys)}
        return {key: key.removeprefix(self.prefix) for key in keys if key.startswith(self.prefix)}

    def inverse(self, keys: Sequence[str] | None) -> Rule:
        """As of Rule."""
        if keys is not None:
            news = self._changed(keys)
            return _Table(tuple([(news.get(key, key), key) for key in keys]))
        if self.everywhere:
            raise self.unknown()
        return Prefix(self.prefix, not self.add)

    def unknown(self) -> ShardingError:
        """That more than the rule must be known to undo it."""
        return ShardingError(
            f"Where {self.prefix!r} was taken away cannot be known from the rule alone.",
            fix="rules.inverse(of=old.keys())",
        )


@dataclass(frozen=True)
class _Table:
    """Renames that are listed."""

    pairs: tuple[tuple[str, str], ...]

    def apply(self, values: Values) -> tuple[Values, set[str]]:
        """As of Rule."""
        found = {old: [(new, values[old])] for old, new in self.pairs if old in values}
        return _replaced(values, found), set(found)

    def inverse(self, keys: Sequence[str] | None) -> Rule:
        """As of Rule."""
        return _Table(tuple((new, old) for old, new in self.pairs))


@dataclass(frozen=True)
class Fuse:
    """Parts become one; made by `fuse`."""

    parts: tuple[Pattern, ...]
    whole: str
    dim: int
    sizes: tuple[int, ...]

    def apply(self, values: Values) -> tuple[Values, set[str]]:
        """As of Rule."""
        found: dict[str, dict[int, str]] = {}
        back, taken_as = self._back, [pattern.text for pattern in self.parts]
        fits: dict[str, list[int]] = {}
        for place, pattern in enumerate(self.parts):
            for key in pattern.fitting(values):
                fits.setdefault(key, []).append(place)
        for key in _in_order(values, fits):
            for place in fits[key]:
                parts = found.setdefault(whole := self.parts[place].replace(key, self.whole), {})
                if place in parts:
                    got = f"{parts[place]} and {key} become the part {taken_as[place]} of {whole}"
                    raise ShardingError("Keys collide.", expected="one key for each part of a fused tensor", got=got)
                parts[place] = key
        for whole, parts in found.items():
            if len(parts) < len(self.parts):
                missing = [text for k, text in enumerate(taken_as) if k not in parts]
                raise ShardingError(
                    "Parts of a fused tensor are missing.",
                    expected=f"{len(self.parts)} parts of {whole}",
                    got=", ".join(parts.values()),
                    where=f"nothing fits {', '.join(missing)}",
                )
            for place, key in parts.items():
                _check_undone(key, whole, back.whole, back.parts[place], self)
        home = {key: whole for whole, parts in found.items() for key in parts.values()}
        for key in back.whole.fitting(values):
            if key not in home:
                _check_undone(key, key, back.whole, back.parts[0], self)
        made: dict[str, list[tuple[str, Value]]] = {key: [] for key in home}
        for key, whole in home.items():
            if found[whole][0] == key:
                joined = tuple([values[found[whole][k]] for k in range(len(self.parts))])
                made[key].append((whole, Value(None, joined, "join", self.dim, self.sizes)))
        return _replaced(values, made), set(home)

    @cached_property
    def _back(self) -> "Split":
        return self.inverse(None)

    def __str__(self) -> str:
        return f"fuse({[pattern.text for pattern in self.parts]}, {self.whole!r})"

    def inverse(self, keys: Sequence[str] | None) -> "Split":
        """As of Rule."""
        turned = [pattern.turned_round(self.whole) for pattern in self.parts]
        return Split(turned[0][0], tuple([replacement for _, replacement in turned]), self.dim, self.sizes)


@dataclass(frozen=True)
class Split:
    """One becomes parts; made by `split`."""

    whole: Pattern
    parts: tuple[str, ...]
    dim: int
    sizes: tuple[int, ...]

    def apply(self, values: Values) -> tuple[Values, set[str]]:
        """As of Rule."""
        fits, back = set(self.whole.fitting(values)), self._back
        made: dict[str, list[tuple[str, Value]]] = {key: [] for key in fits}
        for key in _in_order(values, fits, *[pattern.fitting(values) for pattern in back.parts]):
            if key not in fits:
                for pattern in back.parts:
                    _check_undone(key, key, pattern, back.whole, self)
                continue
            sizes = self.sizes or (1,) * len(self.parts)
            for place, part in enumerate(self.parts):
                cut = Value(None, (values[key],), "cut", self.dim, sizes, place)
                made[key].append((new := self.whole.replace(key, part), cut))
                _check_undone(key, new, back.parts[place], back.whole, self)
        return _replaced(values, made), fits

    @cached_property
    def _back(self) -> Fuse:
        return self.inverse(None)

    def __str__(self) -> str:
        return f"split({self.whole.text!r}, {list(self.parts)})"

    def inverse(self, keys: Sequence[str] | None) -> Fuse:
        """As of Rule."""
        turned = [self.whole.turned_round(part) for part in self.parts]
        return Fuse(tuple([pattern for pattern, _ in turned]), turned[0][1], self.dim, self.sizes)


@dataclass(frozen=True)
class Transpose:
    """The last two dims exchanged; made by `transpose`."""

    pattern: Pattern

    def apply(self, values: Values) -> tuple[Values, set[str]]:
        """As of Rule."""
        fits = self.pattern.fitting(values)
        return {**values, **{key: Value(None, (values[key],), "transpose") for key in fits}}, set(fits)

    def inverse(self, keys: Sequence[str] | None) -> Rule:
        """As of Rule."""
        return self


def _check_undone(old: str, new: str, pattern: Pattern, replacement: str, rule: Rule) -> None:
    """Check that what undoes a rule makes the old key of a new one.

    Raises:
        ShardingError: it makes another.
    """
    if (again := pattern.replace(new, replacement)) != old:
        raise ShardingError(
            "A rename cannot be undone for a key.",
            expected=f"{new} to become {old} again where the rename is undone",
            got=again,
            where=rule,
            fix="say more of the key in the pattern, or in the replacement",
        )


def _in_order(values: Values, *some: Iterable[str]) -> list[str]:
    """Some of the keys, in the order of all."""
    wanted = set().union(*some)
    return [key for key in values if key in wanted] if wanted else []


def _replaced(values: Values, made: Mapping[str, Sequence[tuple[str, Value]]]) -> Values:
    """New keys with their values: `made` of a key stands in its place, other keys stay.

    Of a thousand rules most fit few keys, so what does not fit is not gone through one by one.

    Raises:
        ShardingError: two old keys become the same new one; all such are named.
    """
    if not made:
        return values
    result: Values = {}
    for key, value in values.items():
        if key in made:
            result.update(made[key])
        else:
            result[key] = value
    if len(result) < len(values) + sum(map(len, made.values())) - len(made):
        sources: dict[str, list[str]] = {}
        for old in values:
            for new, _ in made.get(old, [(old, values[old])]):
                sources.setdefault(new, []).append(old)
        clashes = [f"{' and '.join(olds)} become {new}" for new, olds in sources.items() if len(olds) > 1]
        raise ShardingError("Keys collide.", expected="a new key for each old one", got="\n".join(clashes))
    return result


def listed(names: Sequence[str], values: Values) -> list[str]:
    """The new names of a list, each once, in the order of the first old one."""
    places = {name: place for place, name in enumerate(names)}

    def first(value: Value) -> int:
        return first(value.made_of[0]) if value.key is None else places[value.key]

    return sorted(values, key=lambda new: first(values[new]))


def rename(pattern: str, replacement: str) -> Rule:
    r"""Replace what fits `pattern` in a key.

    Args:
        pattern: literal text with groups, such as `layers.(\d+).mlp`.
        replacement: text in which each group stands once, as `\1`.

    Raises:
        ShardingError: the rename could not be turned round.
    """
    made = _Rename(Pattern.of(pattern), replacement)
    made.inverse(None)
    return made


def strip_prefix(prefix: str, *, everywhere: bool = False) -> Rule:
    """Take a prefix such as "module." from the keys that have it.

    Args:
        prefix: text, with its dot.
        everywhere: also within keys, where wrappers are nested ("_fsdp_wrapped_module.", "_orig_mod.").
    """
    return Prefix(prefix, add=False, everywhere=everywhere)


def add_prefix(prefix: str) -> Rule:
    """Put a prefix before every key."""
    return Prefix(prefix, add=True)


def fuse(parts: Sequence[str], whole: str, dim: int = 0, *, sizes: Sequence[int] = ()) -> Rule:
    r"""Join tensors into one: query, key and value; gate and up.

    Args:
        parts: a pattern for each part, all with the same groups.
        whole: the new key, in which each group stands once, as `\1`.
        dim: along which parts are joined.
        sizes: lengths of the parts along it, in proportion, where they differ: (8, 2, 2) for 8 heads and 2 of keys and
            values. Needed to take them apart again.

    Values without that dim (step counters of optimizers) must be the same for all parts.

    Raises:
        ShardingError: the rule could not be turned round.
    """
    made = Fuse(tuple(map(Pattern.of, parts)), whole, dim, tuple(sizes) or (1,) * len(parts))
    made.inverse(None)
    return made


def split(whole: str, parts: Sequence[str], dim: int = 0, *, sizes: Sequence[int] = ()) -> Rule:
    """Take a fused tensor apart: the reverse of `fuse`, with a pattern for the whole."""
    pattern = Pattern.of(whole)
    made = Split(pattern, tuple(parts), dim, tuple(sizes) or (1,) * len(parts))
    made.inverse(None)
    return made


def transpose(pattern: str) -> Rule:
    """Exchange the last two dims of what fits `pattern`; values of fewer dims are left as they are."""
    return Transpose(Pattern.of(pattern))
