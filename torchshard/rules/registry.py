"""All rules by the name of their operator: those of the tables, and before them those that users have registered."""

from collections.abc import Mapping
from types import MappingProxyType

from torchshard.rules import (
    attention,
    convolution,
    indexing,
    linalg,
    losses,
    nn,
    pointwise,
    quantizing,
    reducing,
    slicing,
    views,
)
from torchshard.rules.rule import Rule

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **pointwise.RULES,
        **linalg.RULES,
        **reducing.RULES,
        **views.RULES,
        **slicing.RULES,
        **indexing.RULES,
        **convolution.RULES,
        **nn.RULES,
        **attention.RULES,
        **losses.RULES,
        **quantizing.RULES,
    }
)

_registered: dict[str, list[Rule]] = {}  # the last one counts


def find(name: str) -> Rule | None:
    """The rule of an operator such as "mm.default" or "mylib::scale.default"; None where there is none."""
    mine = _registered.get(name)
    return mine[-1] if mine else RULES.get(name)


def add(name: str, rule: Rule) -> None:
    """Put a rule before the one that the operator has."""
    _registered.setdefault(name, []).append(rule)


def added() -> list[tuple[str, list[Rule]]]:
    """What users have registered, by the names of operators, in order."""
    return sorted(_registered.items())


def remove(name: str, rule: Rule) -> None:
    """Take back what `add` put there; nothing happens where it is gone."""
    kept = [r for r in _registered.pop(name, []) if r is not rule]
    if kept:
        _registered[name] = kept
