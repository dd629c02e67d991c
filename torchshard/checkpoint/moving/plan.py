"""Which bytes go where: a target box, the boxes that hold its elements, and a limit, to a list of copies. Pure."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchshard.layout import Box, overlaps

_AT_ONCE = 256  # blocks that are planned together; bounds the memory of a plan for a very large tensor


class Copy(NamedTuple):
    """A part of a block, and the source (by its position) that holds it."""

    source: int
    box: Box


class Block(NamedTuple):
    """A part of a target that is one run in it.

    Args:
        box: in the coordinates of the global tensor, as all boxes here.
        at: elements of the target before it, the last dim fastest.
        copies: what it is put together from.
    """

    box: Box
    at: int
    copies: list[Copy]


def blocks(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into parts of at most `limit` elements that follow one another in its row-major order."""
    if not box.numel:
        return
    size = box.size
    # The first dim whose rows fit: those before are gone through one index at a time, it is cut, the rest stays whole.
    dim = next((d for d in range(len(size)) if math.prod(size[d + 1 :]) <= limit), None)
    if dim is None:  # a scalar
        yield box
        return
    rows = max(1, limit // math.prod(size[dim + 1 :]))
    for prefix in itertools.product(*[range(o, o + n) for o, n in zip(box.offset[:dim], size[:dim], strict=True)]):
        for start in range(0, size[dim], rows):
            offset = (*prefix, box.offset[dim] + start, *box.offset[dim + 1 :])
            yield Box(offset, (1,) * dim + (min(rows, size[dim] - start),) + size[dim + 1 :])


def plan(target: Box, sources: Sequence[Box], limit: int) -> Iterator[Block]:
    """The blocks of a target in order, each with its copies.

    Args:
        target: what is wanted.
        sources: boxes that hold each element once.
        limit: elements a block, at most.
    """
    if len(sources) == 1 and 0 < target.numel <= limit:  # most tensors of a checkpoint with many
        yield Block(target, 0, [Copy(0, target)])
        return
    at = 0
    parts = blocks(target, limit)
    while some := list(itertools.islice(parts, _AT_ONCE)):
        copies: list[list[Copy]] = [[] for _ in some]
        if len(sources) == 1:
            copies = [[Copy(0, box)] for box in some]
        else:
            for one in overlaps(some, sources):
                copies[one.target].append(Copy(one.source, one.box))
        for box, its in zip(some, copies, strict=True):
            yield Block(box, at, its)
            at += box.numel


def run_within(outer: Box, inner: Box) -> int | None:
    """Elements of `outer` before `inner`, if `inner` is one run of it in row-major order; else None."""
    start, step, full = 0, 1, True
    for o, n, base, length in zip(
        reversed(inner.offset), reversed(inner.size), reversed(outer.offset), reversed(outer.size), strict=True
    ):
        if not full and n != 1:
            return None
        start += (o - base) * step
        step *= length
        full = full and n == length
    return start


class Window(NamedTuple):
    """A part of a strided box, and the stretch of storage that holds it.

    Args:
        box: the part, counted from the strided box's own origin.
        start: elements from that origin to its first element.
        span: elements from its first to its last, both included.
    """

    box: Box
    start: int
    span: int


def windows(size: Sequence[int], stride: Sequence[int], limit: int, gap: int) -> Iterator[Window]:
    """Cut a strided box into parts that are each read in one go.

    Args:
        size: of the box; no dim is empty.
        stride: in elements, not negative.
        limit: elements of storage a window, at most.
        gap: elements that are rather read along than skipped by a read of its own.
    """
    order = sorted([d for d, n in enumerate(size) if n > 1 and stride[d]], key=lambda d: -stride[d])
    inner, span = len(order), 1  # the dims from `inner` on are read whole, over `span` elements
    while inner and span + (size[order[inner - 1]] - 1) * stride[order[inner - 1]] <= limit:
        inner -= 1
        span += (size[order[inner]] - 1) * stride[order[inner]]
    if not inner:
        yield _window(size, stride, {}, span)
        return
    cut = order[inner - 1]
    together = max(1, (limit - span) // stride[cut] + 1) if stride[cut] - span <= gap else 1
    outer = order[: inner - 1]
    for prefix in itertools.product(*[range(size[d]) for d in outer]):
        for start in range(0, size[cut], together):
            count = min(together, size[cut] - start)
            chosen = {d: (i, 1) for d, i in zip(outer, prefix, strict=True)} | {cut: (start, count)}
            yield _window(size, stride, chosen, span + (count - 1) * stride[cut])


def _window(size: Sequence[int], stride: Sequence[int], chosen: dict[int, tuple[int, int]], span: int) -> Window:
    ranges = [chosen.get(d, (0, n)) for d, n in enumerate(size)]
    box = Box(tuple([start for start, _ in ranges]), tuple([count for _, count in ranges]))
    return Window(box, sum([o * s for o, s in zip(box.offset, stride, strict=True)]), span)
