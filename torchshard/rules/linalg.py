"""Products of matrices."""

from collections.abc import Callable

from torchshard.layout.layout import Layout
from torchshard.rules.rule import Rule, named, options, table

_LINES = table("""
    mm       | i k, k j -> i j        | lin=0,1 red=k:sum
    bmm      | b i k, b k j -> b i j  | lin=0,1 red=k:sum
    mv       | i k, k -> i            | lin=0,1 red=k:sum
    dot      | k, k ->                | lin=0,1 red=k:sum
""")


def _added(product: str) -> Callable[..., str]:
    """A product to which a first operand is added that broadcasts to the result."""
    result = product.split("->")[1].split()

    def build(bias: Layout, *_: Layout, **__: object) -> str:
        return f"{' '.join(result[len(result) - bias.ndim :])}, {product}"

    return build


# The bias counts once, not once for every shard of k.
_ADDED = options("lin=0+1,0+2 red=k:sum plus=0")

RULES = {
    **_LINES,
    **named("addmm", Rule(_added("i k, k j -> i j"), _ADDED)),
    **named("baddbmm", Rule(_added("b i k, b k j -> b i j"), _ADDED)),
}
