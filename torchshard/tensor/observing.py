"""Who is told, in a thread and the backwards that it calls, how operators are run and what is moved; usually nobody.

`explain` and `debug` listen here. What is told is told where an operator is met for the first time, or where something
is about to be sent; operators that run from a kept plan on local tensors do not come here.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torchshard._torch import Inherited
from torchshard.tensor.layout import TensorLayout

Moved = Callable[[TensorLayout, TensorLayout], None]
RanBy = Callable[[str, str, list[tuple[str, TensorLayout, TensorLayout]]], None]


class _Observers:
    moved = Inherited[tuple[Moved, ...]](())
    ran_by = Inherited[tuple[RanBy, ...]](())


observers = _Observers()


@contextmanager
def observing(moved: Moved, ran_by: RanBy | None = None) -> Iterator[None]:
    """Tell these two as well.

    Args:
        moved: of every redistribution, before it is done: source and target.
        ran_by: of how an operator is run: "rule" and its line, "handler", "list", "decomposition" or "gathered"; and
            which arguments (by name) go from which layout to which.
    """
    before = observers.moved, observers.ran_by
    observers.moved = (*observers.moved, moved)
    if ran_by is not None:
        observers.ran_by = (*observers.ran_by, ran_by)
    try:
        yield
    finally:
        observers.moved, observers.ran_by = before


def tell(how: str, line: str = "", moves: Iterable[tuple[str, TensorLayout, TensorLayout]] = ()) -> None:
    """Tell how the operator at hand is run."""
    for ran_by in observers.ran_by:
        ran_by(how, line, list(moves))
