"""Who is told, in this thread, how operators are run and what is moved; usually nobody.

`explain` and `debug` listen here. What is asked is asked where something is met for the first time, or is about to be
sent; operators that run from a kept plan on local tensors do not come here.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torchshard.tensor.layout import TensorLayout

Moved = Callable[[TensorLayout, TensorLayout], None]
RanBy = Callable[[str, str, list[tuple[str, TensorLayout, TensorLayout]]], None]


class _Observers(threading.local):
    moved: Moved | None = None
    ran_by: RanBy | None = None


observers = _Observers()


@contextmanager
def observing(moved: Moved | None, ran_by: RanBy | None = None) -> Iterator[None]:
    """Tell these two in place of whoever is told now.

    Args:
        moved: of every redistribution, before it is done: source and target.
        ran_by: of how an operator is run: "rule" and its line, "handler", "list", "decomposition" or "gathered"; and
            which arguments (by name) go from which layout to which.
    """
    before = observers.moved, observers.ran_by
    observers.moved, observers.ran_by = moved, ran_by
    try:
        yield
    finally:
        observers.moved, observers.ran_by = before


def tell(how: str, line: str = "", moves: Iterable[tuple[str, TensorLayout, TensorLayout]] = ()) -> None:
    """Tell how the operator at hand is run."""
    if observers.ran_by is not None:
        observers.ran_by(how, line, list(moves))
