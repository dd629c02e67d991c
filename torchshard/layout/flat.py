"""Intervals of a flattened tensor as boxes, and back: how flat parameters (FSDP1) cut a tensor."""

import math
from collections.abc import Sequence

from torchshard.errors import ShardingError
from torchshard.layout.boxes import Box, whole


def interval_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a row-major tensor, in storage order: at most 2 ndim - 1 boxes.

    Raises:
        ShardingError: the interval does not lie within the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ShardingError(
            "A flat interval lies outside of its tensor.", expected=f"within [0, {numel})", got=f"[{start}, {stop})"
        )
    if start == stop:
        return []
    if not shape:
        return [whole(shape)]
    row = numel // shape[0]
    first, last = start // row, (stop - 1) // row
    head, tail = start - first * row, stop - last * row
    if first == last and (head or tail < row):
        return _in_row(first, interval_boxes(shape[1:], head, tail))
    boxes = []
    if head:
        boxes += _in_row(first, interval_boxes(shape[1:], head, row))
        first += 1
    rest = [] if tail == row else _in_row(last, interval_boxes(shape[1:], 0, tail))
    full = last - first + (tail == row)
    if full:
        boxes.append(Box((first, *[0] * (len(shape) - 1)), (full, *shape[1:])))
    return boxes + rest


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.size)) for box in boxes]


def boxes_interval(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[int, int]:
    """The interval [start, stop) that boxes in storage order make up: the inverse of interval_boxes.

    Raises:
        ShardingError: a box is no interval by itself, or does not follow on the one before.
    """
    start = stop = 0
    for k, box in enumerate(boxes):
        low, high = _interval(shape, box)
        if k == 0:
            start = stop = low
        if low != stop:
            raise ShardingError("Boxes are no interval of the flat tensor.", expected=f"a box from {stop}", got=box)
        stop = high
    return start, stop


def _interval(shape: Sequence[int], box: Box) -> tuple[int, int]:
    low, step, split = 0, 1, False
    for dim in reversed(range(len(shape))):
        if split and box.size[dim] > 1:
            raise ShardingError(
                "A box is no interval of the flat tensor.", expected=f"whole rows of shape {tuple(shape)}", got=box
            )
        split = split or box.size[dim] != shape[dim]
        low += box.offset[dim] * step
        step *= shape[dim]
    return low, low + box.numel
