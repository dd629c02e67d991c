r"""KeyRules: rules applied to state dicts.

    rules = KeyRules([
        strip_prefix("module."),
        rename(r"layers.(\d+).attention", r"blocks.\1.attn"),
        fuse([r"blocks.(\d+).attn.q.weight", r"blocks.(\d+).attn.k.weight"], r"blocks.\1.attn.qk.weight", dim=0),
    ])
    new = rules(old)
    assert rules.inverse()(new) == old

In a pattern, everything is literal but groups, which hold regular expressions. A pattern fits whole segments between
dots, anywhere in a key; so what follows a parameter's name (`layers.0.weight.exp_avg`) follows its renames. What
becomes of every key is worked out, and checked, before any value is touched.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from torchshard.errors import ShardingError
from torchshard.keys.containers import check_nesting, like, modules_renamed
from torchshard.keys.rules import Fuse, Prefix, Rule, Split, Transpose, Value, Values, listed


class Arrays(Protocol):
    """What rules do to values."""

    def ndim(self, x: Any) -> int | None:
        """Number of dims; None for what is no array."""

    def kind(self, x: Any) -> tuple[Any, tuple[int, ...]]:
        """Dtype and shape."""

    def cut(self, x: Any, dim: int, start: int, length: int) -> Any:
        """Part of an array."""

    def join(self, parts: Sequence[Any], dim: int) -> Any:
        """Arrays joined."""

    def transpose(self, x: Any) -> Any:
        """The last two dims exchanged."""

    def same(self, a: Any, b: Any) -> bool:
        """Whether two values are equal."""


class _Numpy:
    """Arrays of numpy."""

    def ndim(self, x: Any) -> int | None:
        """As of Arrays."""
        return getattr(x, "ndim", None)

    def kind(self, x: Any) -> tuple[Any, tuple[int, ...]]:
        """As of Arrays."""
        return x.dtype, x.shape

    def cut(self, x: Any, dim: int, start: int, length: int) -> Any:
        """As of Arrays."""
        return x[(slice(None),) * dim + (slice(start, start + length),)]

    def join(self, parts: Sequence[Any], dim: int) -> Any:
        """As of Arrays."""
        import numpy as np

        if any(hasattr(part, "__torch_function__") for part in parts):
            raise ShardingError(
                "Key rules of arrays would join tensors of torch.",
                expected="arrays of numpy",
                got=", ".join([type(part).__name__ for part in parts]),
                fix="torchshard.state_dict.KeyRules, which takes the same rules",
            )
        return np.concatenate(list(parts), dim)

    def transpose(self, x: Any) -> Any:
        """As of Arrays."""
        return x.swapaxes(-1, -2)

    def same(self, a: Any, b: Any) -> bool:
        """As of Arrays."""
        import numpy as np

        return bool(np.array_equal(a, b))


class KeyRules:
    """Rules, applied one after another.

    Args:
        rules: made by rename, strip_prefix, add_prefix, fuse, split and transpose.
        strict: whether each rule must fit a key, and each key a rule; "rules" asks that each rule changes a key.
    """

    arrays: Arrays = _Numpy()

    def __init__(self, rules: Iterable[Rule], *, strict: bool | Literal["rules"] = False) -> None:
        self.rules, self.strict = tuple(rules), strict
        self._met: dict[int, set[bool]] = {}  # number of a rule -> whether keys so far fit it

    def __call__(self, sd: Mapping[str, Any]) -> Any:
        """The state dict with new keys.

        Args:
            sd: keys and arrays; or dicts, lists and tuples of such dicts (`{"model": {...}, "optimizers": [{...}]}`),
                whose own keys stay as they are, also those of arrays beside the dicts (a step counter). In the state
                dict of an optimizer ("state" and "param_groups") the names of parameters follow the rules, and what is
                kept for a parameter is cut, joined and transposed as it is.

        Raises:
            ShardingError: keys that collide, parts that are missing, a rename that cannot be undone for a key; with
                `strict`, keys without a rule and rules without a key. All before any value is touched.
        """
        check_nesting(sd)
        levels: list[Mapping[Any, Any]] = []
        self._changed(sd, lambda level: levels.append(level) or level)  # type: ignore[func-returns-value]
        self._check(levels)
        return self._changed(sd, self._of_names)

    def of_flat(self, sd: Mapping[str, Any]) -> Any:
        """As a call, for one dict whose keys are all names, whatever its values are.

        Raises:
            ShardingError: as a call does.
        """
        self._check([sd])
        return self._of_names(sd)

    def renamed(self, keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """New key -> the old keys that its value is made of."""
        values, _ = self._work_out(list(keys))
        return {new: tuple(_sources(value)) for new, value in values.items()}

    def inverse(self, of: Iterable[str] | None = None) -> "KeyRules":
        """The rules that undo these.

        Args:
            of: the keys that these rules were applied to. Needed where a rule drops what it cannot put back: a prefix
                that only some keys had.

        Raises:
            ShardingError: `of` is needed: a prefix was taken away between dots, or has been from some keys and not all.
        """
        undone: list[Rule] = []
        keys = None if of is None else list(of)
        for number, rule in enumerate(self.rules):
            if keys is None and isinstance(rule, Prefix) and not rule.add and False in self._met.get(number, ()):
                raise rule.unknown()
            undone.append(rule.inverse(keys))
            if keys is not None:
                keys = list(rule.apply({key: Value(key) for key in keys})[0])
        return type(self)(reversed(undone), strict=False)

    def _work_out(self, keys: Sequence[str]) -> tuple[Values, list[tuple[bool, set[str]]]]:
        """New keys with what they are made of; and of each rule whether it is of use, and the original keys it fits."""
        values = {key: Value(key) for key in keys}
        fits = []
        for number, rule in enumerate(self.rules):
            before = values
            values, fit = rule.apply(values)
            self._met.setdefault(number, set()).update({True} if fit else (), {False} if len(fit) < len(before) else ())
            used = bool(fit) and (self.strict != "rules" or values != before)
            fits.append((used, {source for key in fit for source in _sources(before[key])}))
        return values, fits

    def _check(self, levels: Sequence[Mapping[Any, Any]]) -> None:
        """Work out all levels once; and that all is covered, where that is asked for."""
        idle, left = set(range(len(self.rules))), []
        for level in levels:
            keys = [key for key in level if isinstance(key, str)]
            _, fits = self._work_out(keys)
            idle -= {k for k, (used, _) in enumerate(fits) if used}
            met = set().union(*[sources for _, sources in fits])
            left += [key for key in keys if key not in met]
            self._check_numbers([key for key in level if not isinstance(key, str)])
        if only_rules := self.strict == "rules":
            left = []
        if self.strict and (idle or left):
            raise ShardingError(
                "Keys and rules do not cover one another.",
                expected=f"{'' if only_rules else 'a rule for each key, and '}a key for each rule to change",
                got="\n".join([f"no rule: {key}" for key in left] + [f"no key: {self.rules[k]}" for k in sorted(idle)]),
                fix="compare with the keys that are there: torchshard inspect FILE, or state_dict.keys()",
            )

    def _check_numbers(self, keys: Sequence[Any]) -> None:
        """Check that parameters which go by numbers are renamed only."""
        if keys and any(isinstance(rule, Fuse | Split | Transpose) for rule in self.rules):
            raise ShardingError(
                "Parameters that go by numbers cannot be joined, taken apart or transposed.",
                expected="an optimizer's state by names of parameters",
                got=keys[:3],
                fix="torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)",
            )

    def _changed(self, tree: Any, change: Callable[[Mapping[Any, Any]], Any]) -> Any:
        """The same containers, in which the dicts whose keys are names of parameters are `change(dict)`."""
        if isinstance(tree, (list, tuple)):
            values = [self._changed(value, change) for value in tree]
            return tree if all(map(operator.is_, tree, values)) else like(tree, values)
        if not isinstance(tree, Mapping):
            return tree
        if _is_optimizer(tree):
            own = {"state": change(tree["state"]), "param_groups": [self._of_group(g) for g in tree["param_groups"]]}
            return like(tree, {key: own[key] if key in own else self._changed(tree[key], change) for key in tree})
        if self._is_names(tree):
            return change(tree)
        return like(tree, {key: self._changed(value, change) for key, value in tree.items()})

    def _is_names(self, tree: Mapping[Any, Any]) -> bool:
        """Whether a dict has arrays, and no dicts of them: but for what a module keeps as its extra state."""
        if all(self.arrays.ndim(value) is None for value in tree.values()):
            return False
        return not any(self._has_arrays(x) for key, x in tree.items() if not str(key).endswith("_extra_state"))

    def _has_arrays(self, tree: Any) -> bool:
        """Whether this is a dict that has arrays, or holds one that has."""
        if isinstance(tree, (list, tuple)):
            return any(map(self._has_arrays, tree))
        if not isinstance(tree, Mapping):
            return False
        return any(self.arrays.ndim(x) is not None or self._has_arrays(x) for x in tree.values())

    def _of_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group of an optimizer's parameters: their numbers or names, and beside numbers their names."""
        own = {what: self._of_list(group[what]) for what in ("params", "param_names") if what in group}
        if len(set(map(len, own.values()))) > 1:
            self._check_numbers(group["params"])
        return {**group, **own}

    def _of_list(self, names: Sequence[Any]) -> list[Any]:
        by_name = all(isinstance(name, str) for name in names)
        return listed(names, self._work_out(names)[0]) if by_name else list(names)

    def _of_names(self, level: Mapping[Any, Any]) -> Any:
        values, _ = self._work_out([key for key in level if isinstance(key, str)])
        numbered = {key: value for key, value in level.items() if not isinstance(key, str)}
        made = like(level, {**numbered, **{new: self._made(value, level) for new, value in values.items()}})
        if isinstance(modules := getattr(made, "_metadata", None), Mapping):
            keys = [(old, new) for new, value in values.items() for old in _sources(value)]
            made._metadata = like(modules, {new: modules[old] for old, new in modules_renamed(modules, keys)})
        return made

    def _made(self, value: Value, level: Mapping[str, Any]) -> Any:
        if value.key is not None:
            return level[value.key]
        parts = [self._made(part, level) for part in value.made_of]
        try:
            return self._combined(value, parts)
        except ShardingError as error:
            where = f"made of {', '.join(_sources(value))}" if error.where is None else error.where
            raise ShardingError(
                error.what, expected=error.expected, got=error.got, where=where, fix=error.fix
            ) from None

    def _combined(self, value: Value, parts: Sequence[Any]) -> Any:
        """Arrays, or dicts of them, cut, joined or transposed."""
        first = parts[0]
        if isinstance(first, Mapping):
            if any(not isinstance(part, Mapping) or set(part) != set(first) for part in parts):
                raise ShardingError(
                    "Dicts of other values cannot be joined.",
                    expected=list(first),
                    got=[list(x) if isinstance(x, Mapping) else x for x in parts],
                )
            return {name: self._combined(value, [part[name] for part in parts]) for name in first}
        ndim = self.arrays.ndim(first)
        if value.how == "transpose":
            return first if ndim is None or ndim < 2 else self.arrays.transpose(first)
        if ndim is None or not -ndim <= value.dim < ndim:
            if not all(self.arrays.same(first, part) for part in parts[1:]):
                raise ShardingError("Values that cannot be joined are not the same.", expected=first, got=parts[1:])
            return first
        dim = value.dim % ndim
        if value.how == "join":
            self._check_parts(value, dim, [self.arrays.kind(part) for part in parts])
            return self.arrays.join(parts, dim)
        length, total = self.arrays.kind(first)[1][dim], sum(value.sizes)
        if length % total:
            raise ShardingError(
                "A tensor cannot be cut in these proportions.",
                expected=f"a length of dim {dim} that {total} divides, in proportions {value.sizes}",
                got=length,
            )
        unit = length // total
        start = unit * sum(value.sizes[: value.place])
        return self.arrays.cut(first, dim, start, unit * value.sizes[value.place])

    def _check_parts(self, value: Value, dim: int, kinds: Sequence[tuple[Any, tuple[int, ...]]]) -> None:
        if len({(dtype, *shape[:dim], "any", *shape[dim + 1 :]) for dtype, shape in kinds}) > 1:
            raise ShardingError(
                "Parts of other dtypes or shapes cannot be joined.",
                expected=f"one dtype, and one shape but for dim {dim}",
                got=", ".join(f"{dtype} {list(shape)}" for dtype, shape in kinds),
            )
        lengths = [shape[dim] for _, shape in kinds]
        if any(n * value.sizes[0] != lengths[0] * size for n, size in zip(lengths, value.sizes, strict=True)):
            raise ShardingError(
                "Parts are not in the proportions that would take them apart again.",
                expected=f"lengths of dim {dim} as {value.sizes}",
                got=tuple(lengths),
                fix=f"fuse(..., sizes={tuple(lengths)})",
            )


def _sources(value: Value) -> Iterator[str]:
    if value.key is not None:
        yield value.key
    for part in value.made_of:
        yield from _sources(part)


def _is_optimizer(tree: Mapping[Any, Any]) -> bool:
    return isinstance(tree.get("state"), Mapping) and isinstance(tree.get("param_groups"), (list, tuple))
