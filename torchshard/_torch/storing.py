"""Guards that Dynamo stores with a compiled function, to be checked in another process."""

import functools
import inspect
from typing import Any

import torch

from torchshard._torch.finding import find


@functools.cache
def store_who_asks(kind: type[torch.Tensor]) -> bool:
    """Have guards that are stored know of tensors of a class whether they require gradients, and those that are read.

    torch makes wrapper subclasses anew of their parts and what their class says of them; parts of ours require none.
    Each parameter would fail its guard in the process that loads them, and guards of a gradient would find none.

    Returns:
        Whether torch had to be told, and can be
        (torch._dynamo.guards.GuardsStatePickler.reducer_override, ._unpickle_traceable_wrapper_subclass, 2.11-2.15).
    """
    pickler = find("_dynamo.guards.GuardsStatePickler")
    reduce: Any = getattr(pickler, "reducer_override", None)
    rebuild: Any = getattr(pickler, "_unpickle_traceable_wrapper_subclass", None)
    if reduce is None or rebuild is None or "requires_grad" in inspect.signature(rebuild).parameters:
        return False

    @functools.wraps(reduce)
    def with_who_asks(self: Any, given: Any) -> Any:
        reduced = reduce(self, given)
        if type(given) is not kind or reduced is NotImplemented or reduced[0] != rebuild:
            return reduced
        gradient = given.grad if given.is_leaf or given.retains_grad else None
        if id(gradient) not in self.guard_tree_values:  # no guard reads it
            gradient = None
        return _asking, (reduced, given.requires_grad, gradient)

    pickler.reducer_override = with_who_asks
    return True


def _asking(reduced: tuple[Any, tuple[Any, ...]], asks: bool, gradient: torch.Tensor | None) -> torch.Tensor:
    rebuild, given = reduced
    made: torch.Tensor = rebuild(*given)
    made.grad = gradient
    return made.requires_grad_(asks)
