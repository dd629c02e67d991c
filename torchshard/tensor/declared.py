"""Plain tensors that say which pieces of a larger one they hold, as torch.distributed.checkpoint reads them."""

from typing import Any

from torch import Tensor

from torchshard.errors import ShardingError
from torchshard.layout.boxes import Box

_NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def declared(x: Tensor) -> tuple[tuple[int, ...], list[tuple[Box, Tensor]]] | None:
    """Shape of the whole, and where in it the parts of this tensor belong; None of a tensor that says nothing.

    A tensor says so by four attributes (torch.distributed.checkpoint.CheckpointableTensor, of torch 2.15): the shape of
    the whole, and of each part its offsets there, its offsets in this tensor, and its sizes.

    Raises:
        ShardingError: the attributes do not go with one another, or with the tensor.
    """
    if not all(hasattr(x, name) for name in _NAMES):
        return None
    said: Any = {name: getattr(x, name) for name in _NAMES}
    shape, there, here, sizes = said.values()
    same = len(there) == len(here) == len(sizes)
    if not same or not all(map(_lies_in, there, sizes, [shape] * len(sizes))):
        raise _unfit(x, said, "parts that lie in global_shape")
    if not all(map(_lies_in, here, sizes, [x.shape] * len(sizes))):
        raise _unfit(x, said, f"parts that lie in {tuple(x.shape)}")
    boxes = [(Box(tuple(o), tuple(n)), Box(tuple(i), tuple(n))) for o, i, n in zip(there, here, sizes, strict=True)]
    return tuple(shape), [(box, x[inside.slices]) for box, inside in boxes]


def _lies_in(offset: Any, size: Any, shape: Any) -> bool:
    return len(offset) == len(size) == len(shape) and all(
        0 <= o <= o + n <= whole for o, n, whole in zip(offset, size, shape, strict=True)
    )


def _unfit(x: Tensor, said: dict[str, Any], expected: str) -> ShardingError:
    return ShardingError(
        "A tensor says of itself that it holds parts which it cannot hold.",
        expected=f"as many local_offsets and local_sizes as global_offsets, and {expected}",
        got=f"a tensor of shape {tuple(x.shape)}, " + ", ".join(f"{name} {value}" for name, value in said.items()),
    )
