"""Rows that are split between ranks, of which each rank says a few numbers: what they add up to, mean and spread."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard.comm import collectives
from torchshard.layout.cost import gathered_up_to
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import eliminated, made_of, part, told, wide
from torchshard.tensor.layout import TensorLayout
from torchshard.tensor.mesh import BoundMesh


class Rows:
    """The pieces of rows along split dims, and how ranks that share a row speak to one another.

    Args:
        like: layout of the tensor; its Partials are reduced where a piece is taken.
        dims: along which a row runs, some of them split.
    """

    def __init__(self, like: TensorLayout, dims: tuple[int, ...]) -> None:
        mesh = like.mesh
        assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
        self.dims, self.shape, self.sharding = dims, tuple(like.shape), like.sharding.without_partial()
        self.length = math.prod([like.shape[d] for d in dims])
        self.outside = mesh.coordinate is None  # such a rank holds nothing, but knows the layout of the result
        if not self.outside:
            self._axes = eliminated(self.sharding, dims, True)[1]
            self.group = mesh.group(self._axes)

    def piece(self, x: DTensor) -> Tensor:
        """This rank's piece of a tensor like that one, in the precision to compute in."""
        return wide(part(x, self.sharding))

    def each(self, x: DTensor) -> Tensor:
        """This rank's part of a tensor of one number for each row, in that precision."""
        return wide(part(x, eliminated(self.sharding, self.dims, True)[0]))

    def total(self, x: Tensor) -> Tensor:
        """The sum of each row."""
        return self.added(x.sum(self.dims, keepdim=True))

    def added(self, numbers: Tensor) -> Tensor:
        """The sum over ranks of numbers that each has of its rows."""
        return collectives.all_reduce(numbers, "sum", self.group)

    def gathered(self, *numbers: Tensor) -> Sequence[Tensor]:
        """Numbers that each rank has of its rows, those of all ranks one after another: by one message."""
        return told(self.group, *numbers)

    def at_once(self, number: Tensor, count: int = 2) -> bool:
        """Whether `count` such tensors are sooner gathered together than two reduced one after the other.

        Not where lengths are symbols, unless that holds for all: another rank may know them as numbers.
        """
        limit = gathered_up_to(self.group.size, count)
        return limit == math.inf or (all(type(n) is int for n in self.shape) and number.nbytes <= limit)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of each row, and the sum of the squares of what is left after subtracting it: nothing cancels there.

        Where it is sooner, a rank says these of its piece in one message. A mean is rounded, which counts where it is
        large and differences are small; so what is left of the piece's sum after subtracting it is said as well.
        """
        here = x.sum(self.dims, keepdim=True)
        if not self.at_once(here, 3):
            mean = self.added(here) / self.length
            return mean, self.total(_squares(x - mean))
        counts = self._counts()
        own = here / max(counts[self.group.position], 1)
        left = x - own
        said = [own, left.sum(self.dims, keepdim=True), _squares(left).sum(self.dims, keepdim=True).to(x.dtype)]
        found, rest, squares = self.gathered(*said)
        squares = squares.real
        shares = _numbers(counts, squares)
        start = (found * shares).sum(0) / self.length
        away = found - start
        sums = rest + away * shares
        about = _squares(away) * shares + 2 * (away.conj() * rest).real + squares
        more = sums.sum(0) / self.length
        return start + more, (about.sum(0) - _squares(more) * self.length).clamp_min(0)  # by rounding it may be less

    def _counts(self) -> list[int]:
        """How many elements of a row each rank has."""
        mesh = self.sharding.mesh
        assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
        sizes = [self.sharding.part(self.shape, place) for place in mesh.places(self._axes)]
        return [math.prod([size[d] for d in self.dims]) for size in sizes]

    def wrapped(self, local: Tensor, dtype: torch.dtype) -> DTensor:
        """A DTensor of pieces of rows."""
        return made_of(local.to(dtype), self.sharding, self.shape)

    def of_each(self, local: Tensor, dtype: torch.dtype, keepdim: bool = True) -> DTensor:
        """A DTensor of one number for each row, kept as dims of length 1, from those of this rank's rows."""
        dims = self.dims
        shape = tuple([1 if d in dims else n for d, n in enumerate(self.shape) if keepdim or d not in dims])
        if not keepdim and not self.outside:
            local = local.squeeze(dims)
        return made_of(local.to(dtype), eliminated(self.sharding, dims, keepdim)[0], shape)


def _numbers(counts: Sequence[int], like: Tensor) -> Any:
    """These numbers, one for each row of a tensor; not as a constant, which no trace takes for a plain one."""
    if len(set(counts)) == 1:
        return counts[0]
    return torch.stack([like.new_full([1] * (like.ndim - 1), n) for n in counts])


def _squares(x: Tensor) -> Tensor:
    return x.real.square() + x.imag.square() if x.is_complex() else x.square()
