"""The errors for operators that have no right way to run, of the kind that those who trace know."""

from typing import Any

from torchshard._torch import in_region
from torchshard.errors import UnsupportedOperatorError


class UnsupportedInGraph(UnsupportedOperatorError, NotImplementedError):
    """Dynamo ends a graph at what is not implemented, and goes on in Python; of other errors it makes its own."""


def unsupported(what: str, **parts: Any) -> UnsupportedOperatorError:
    """The error that says so, with the parts of its message; where a graph is made, one that ends it."""
    return (UnsupportedInGraph if in_region() else UnsupportedOperatorError)(what, **parts)
