"""Guards that Dynamo stores with a compiled function, to be checked in another process."""

import functools
import inspect
from typing import Any

import torch

from torchshard._torch.finding import find


@functools.cache
def store_who_asks(kind: type[torch.Tensor]) -> bool:
    """Have guards that are stored know of tensors of a class whether they require gradients, as parameters do.

    torch makes wrapper subclasses anew of their parts and what their class says of them; parts of ours require none.
    Each parameter would fail its guard in the process that loads them.

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
        if type(given) is kind and reduced is not NotImplemented and reduced[0] == rebuild and given.requires_grad:
            return _asking, reduced
        return reduced

    pickler.reducer_override = with_who_asks
    return True


def _asking(rebuild: Any, given: tuple[Any, ...]) -> torch.Tensor:
    made: torch.Tensor = rebuild(*given)
    return made.requires_grad_()
