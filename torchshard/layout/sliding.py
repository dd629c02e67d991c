"""What windows that slide along split dims read: a rank's own piece, and rows of its neighbours.

A convolution or a pooling makes results [a, b) of a dim from one interval of positions, some of them beyond the edges.
Results are split by the rule of pieces, as operands are; so who needs which rows of whom follows from lengths alone,
for uneven pieces and windows that reach over several of them as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchshard.layout.boxes import Box
from torchshard.layout.layout import Sharding
from torchshard.layout.pieces import Interval


@dataclass(frozen=True, slots=True)
class Slide:
    """How a window goes along one dim, of which it makes `results`."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    results: int

    def reads(self, results: Interval) -> Interval:
        """The positions that these results are made of; they may lie beyond either edge."""
        start, length = results
        if not length:
            return 0, 0
        return start * self.stride - self.padding, (length - 1) * self.stride + self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True, slots=True)
class Reach:
    """What a rank reads.

    Attributes:
        box: the part of the tensor.
        before, after: positions beyond the edges that it reads as well, a dim.
    """

    box: Box
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def start(self) -> tuple[int, ...]:
        """The first position, which may lie before the edge, a dim."""
        return tuple([o - n for o, n in zip(self.box.offset, self.before, strict=True)])

    @property
    def size(self) -> tuple[int, ...]:
        """Positions in all, a dim."""
        return tuple(map(sum, zip(self.box.size, self.before, self.after, strict=True)))


def reach(
    sharding: Sharding, shape: Sequence[int], slides: Mapping[int, Slide], coordinate: Sequence[int]
) -> tuple[Box, Reach]:
    """What the rank at `coordinate` holds of a tensor, and what it reads for its piece of the results.

    Args:
        sharding: of the tensor, and of the results along these dims.
        shape: of the tensor.
        slides: of the dims along which windows slide.
        coordinate: the rank's.
    """
    held = sharding.box(shape, coordinate)
    made = sharding.box([slides[d].results if d in slides else n for d, n in enumerate(shape)], coordinate)
    offset, size = list(held.offset), list(held.size)
    before, after = [0] * len(shape), [0] * len(shape)
    for d, slide in slides.items():
        start, length = slide.reads((made.offset[d], made.size[d]))
        first, last = (min(max(at, 0), shape[d]) for at in (start, start + length))
        before[d] = max(0, min(-start, length))
        offset[d], size[d], after[d] = first, last - first, length - before[d] - (last - first)
    return held, Reach(Box(tuple(offset), tuple(size)), tuple(before), tuple(after))
