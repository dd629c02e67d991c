"""Numbers about the values of tensors, read in blocks: for `inspect --stats`."""

import math
from collections.abc import Callable
from typing import NamedTuple

from torchshard.checkpoint.entries import TensorEntry
from torchshard.checkpoint.moving.casting import decoded
from torchshard.checkpoint.moving.reading import arrays


class Statistics(NamedTuple):
    """Of one tensor; smallest, largest and mean are of the values that are not NaN, and None where there are none.

    Args:
        smallest: for complex numbers, of their magnitudes, as all here.
        largest: the largest value.
        mean: in double precision.
        nan: how many values are NaN.
        inf: how many are infinite.
    """

    smallest: float | None
    largest: float | None
    mean: float | None
    nan: int
    inf: int


def statistics(entry: TensorEntry, advance: Callable[[int], object] = lambda nbytes: None) -> Statistics:
    """The numbers of a tensor, in the memory of a few blocks.

    Args:
        entry: the tensor.
        advance: called with the bytes of each block that is read.

    Raises:
        CheckpointError: its file is damaged.
    """
    import numpy as np

    smallest, largest, total, count, nan, inf = math.inf, -math.inf, 0.0, 0, 0, 0
    for raw in arrays(entry):
        advance(raw.nbytes)
        values = decoded(raw, entry.dtype)
        if values.dtype.kind == "c":
            values = np.abs(values)
        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            if not finite.all():
                is_nan = np.isnan(values)
                nan += int(is_nan.sum())
                inf += int((~finite & ~is_nan).sum())
                values = values[~is_nan]
        if values.size:
            smallest, largest = min(smallest, values.min().item()), max(largest, values.max().item())
            with np.errstate(invalid="ignore", over="ignore"):
                total += float(values.sum(dtype=np.float64))
            count += values.size
    if not count:
        return Statistics(None, None, None, nan, inf)
    return Statistics(smallest, largest, total / count, nan, inf)
