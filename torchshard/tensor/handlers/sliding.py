"""What convolution and pooling along split dims share: rows of the neighbours are fetched, and their gradients go back.

One exchange brings what this rank's results read and others hold, corners too, and nothing else; where windows do not
reach over the edges of pieces, nothing is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import pretending
from torchshard.comm import collectives
from torchshard.comm.group import Group
from torchshard.layout.boxes import Box
from torchshard.layout.layout import Sharding
from torchshard.layout.sliding import Reach, Slide, reach
from torchshard.tensor.calls.call import operator_name
from torchshard.tensor.calls.strides import lying_alike
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.handlers.parts import decided
from torchshard.tensor.layout import TensorLayout
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.moving.redistribute import in_memory_order
from torchshard.tensor.moving.steps import start_copies

Slides = tuple[tuple[tuple[int, Slide], ...], list[int]]


@dataclass(frozen=True, slots=True)
class Rows:
    """What this rank reads of a tensor, and what the ranks along the axes that split such dims give one another.

    Attributes:
        own: its piece.
        reach: what it reads.
        given: for each of these ranks, the part of the piece that it reads.
        taken: from each, what it has of what this rank reads.
        apart: whether some rank reads what it does not hold.
        group: the ranks.
    """

    own: Box
    reach: Reach
    given: Sequence[Box | None]
    taken: Sequence[Box | None]
    apart: bool
    group: Group

    def fetched(self, x: Tensor, fill: float = 0) -> Tensor:
        """All that this rank reads, from its piece; `fill` beyond the edges."""
        box = self.reach.box
        if self.apart:
            x = start_copies(x, self.given, self.taken, self.own, box, self.group).wait()
        else:
            x = x[box.within(self.own)] if box.numel else x.new_empty(box.size)
        sides = list(zip(self.reach.before, self.reach.after, strict=True))
        return torch.constant_pad_nd(x, [*chain(*reversed(sides))], fill) if any(map(any, sides)) else x

    def returned(self, grad: Tensor) -> Tensor:
        """The gradient of this rank's piece, from that of all that it reads: every rank's share, added up."""
        here, mine = self.reach.box, self.group.position
        for d, (before, n) in enumerate(zip(self.reach.before, here.size, strict=True)):
            grad = grad.narrow(d, before, n)
        shares = [grad[box.within(here)] if box else grad.new_empty(0) for box in self.taken]
        if self.apart:
            kept, shares[mine] = shares[mine], grad.new_empty(0)
            shapes = [box.size if box and k != mine else (0,) for k, box in enumerate(self.given)]
            shares = collectives.exchange(shares, shapes, self.group)
            shares[mine] = kept
        total = grad.new_zeros(self.own.size)
        for box, share in zip(self.given, shares, strict=True):
            if box is not None:
                total[box.within(self.own)] += share
        return total


@decided
def rows_of(sharding: Sharding, shape: tuple[int, ...], slides: tuple[tuple[int, Slide], ...]) -> Rows:
    """The rows for windows that slide along these dims of a tensor of this shape."""
    mesh, along = sharding.mesh, dict(slides)
    assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
    axes = tuple(sorted({a for d in along for a in sharding.splits[d]}))
    group = mesh.group(axes)
    held, read = zip(*[reach(sharding, shape, along, place) for place in mesh.places(axes)], strict=True)
    own, wanted = held[group.position], read[group.position]
    given, taken = [own.meet(r.box) for r in read], [wanted.box.meet(piece) for piece in held]
    apart = any(r.box.numel and r.box.meet(piece) != r.box for piece, r in zip(held, read, strict=True))
    return Rows(own, wanted, given, taken, apart, group)


def split_dims(x: Any, count: int) -> tuple[int, ...]:
    """Which of the last `count` dims of x are split; none where it has to be left to rules."""
    if type(x) is not DTensor or not x.numel() or x._spec.sharding.cuts:
        return ()
    return tuple(sorted([d for d in x._spec.sharding.splits if d >= x.ndim - count]))


@decided
def layouts(sharding: Sharding, func: Any, device: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shape, stride and dtype of each result of an operator; none where it refuses its arguments.

    Args:
        sharding: of some operand.
        func: the operator.
        device: its type, which decides how results lie in memory.
        given: its arguments, layouts in place of tensors.
    """

    def standing_in(x: Any) -> Any:
        if isinstance(x, TensorLayout):
            return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=device)
        return [*map(standing_in, x)] if isinstance(x, tuple) else x

    try:
        with pretending():
            made = lying_alike(operator_name(func), func)(*map(standing_in, given))
    except (RuntimeError, ValueError, TypeError):
        return ()
    results = made if isinstance(made, (tuple, list)) else [made]
    return tuple([None if t is None else (tuple(t.shape), t.stride(), t.dtype) for t in results])


def described(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of an operator as `layouts` takes them."""
    found = [described(a) if isinstance(a, (list, tuple)) else a for a in args]
    return tuple([a._spec if type(a) is DTensor else a for a in found])


def slides_of(
    x: DTensor, kernel: Sequence[int], results: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> Slides:
    """How windows of the last dims go along those that are split, and the padding of each that is left to the kernel.

    Args:
        x: what they slide along.
        kernel: lengths of a window.
        results: how many results there are along each dim.
        stride, padding, dilation: as the operator has them.
    """
    count, found = len(kernel), []
    steps, edges, gaps = (_one_a_dim(numbers, count) for numbers in (stride, padding, dilation))
    left = list(edges)
    for d in split_dims(x, count):
        at = d - x.ndim + count
        found.append((d, Slide(kernel[at], steps[at], edges[at], gaps[at], results[at])))
        left[at] = 0
    return tuple(found), left


def _one_a_dim(numbers: Any, count: int) -> list[int]:
    given = [numbers] if isinstance(numbers, int) else list(numbers)
    return given * count if len(given) == 1 else given


def ordered(made: Tensor | None, layout: TensorLayout, like: Tensor) -> DTensor:
    """The DTensor of this layout, whose part is `made`; None where this rank has made nothing and holds nothing."""
    if made is None:
        made = like.new_empty(layout.local_shape, dtype=layout.dtype)
    return wrap(in_memory_order(made, layout) if made.ndim == layout.ndim else made, layout)
