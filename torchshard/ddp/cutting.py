"""Graphs of a wrapper's forward that torch.compile makes for any other backend: cut where buckets are full.

Compiled whole, they would bring all gradients at the end of the backward. What Dynamo does about that for torch's
wrapper, the backend "torchshard" does for ours, in its split mode; it is found by its name, as users find it.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torchshard import _torch
from torchshard.ddp import active
from torchshard.ddp.reducing import traced

Backend = Callable[..., Callable[..., Any]]
_Backend = TypeVar("_Backend", bound=Backend)

_REDUCES = "reduces_gradients"


def reduces_gradients(backend: _Backend) -> _Backend:
    """Mark a backend that sees to a wrapper's gradients itself: graphs come to it whole."""
    setattr(backend, _REDUCES, True)
    return backend


def _are_cut() -> bool:
    """Whether graphs that are compiled now are those of a wrapper, and bring gradients to its hooks."""
    return active.reducer() is not None and not traced.in_use()


def _compile(graph: Any, inputs: Sequence[Any], compiler: Backend) -> Callable[..., Any]:
    """Compile a graph with what torch.compile was given, in pieces unless that sees to gradients itself."""
    if getattr(_torch.given_backend(compiler), _REDUCES, False):
        return compiler(graph, inputs)
    ours = _find_ours()
    return ours(graph, inputs, options={"reduction": "split", "inner": compiler}) if ours else compiler(graph, inputs)


@functools.cache
def _find_ours() -> Backend | None:
    try:
        return _torch.backend_by_name("torchshard")
    except ValueError:
        warnings.warn(
            "torchshard is imported but not installed, so torch.compile does not know its backend: compiled graphs of "
            "DistributedDataParallel stay whole, and gradients are reduced after the whole backward. Install it",
            stacklevel=2,
        )
        return None


stand = _torch.Standing(_are_cut, _compile).stand
"""Called at each forward: have Dynamo ask here what becomes of a graph."""
