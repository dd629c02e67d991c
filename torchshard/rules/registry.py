"""All rules by the name of their operator."""

from collections.abc import Mapping
from types import MappingProxyType

from torchshard.rules import convolution, indexing, linalg, losses, nn, pointwise, reducing, views
from torchshard.rules.rule import Rule

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **pointwise.RULES,
        **linalg.RULES,
        **reducing.RULES,
        **views.RULES,
        **indexing.RULES,
        **convolution.RULES,
        **nn.RULES,
        **losses.RULES,
    }
)


def find(name: str) -> Rule | None:
    """The rule of an ATen operator such as "mm.default"; None where there is none."""
    return RULES.get(name)
