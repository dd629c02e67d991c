"""The buckets of a layout: of which kind each one is."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from torchshard.buckets import Gradient
from torchshard.ddp.buckets.flat import SMALL, FlatBucket, gradient_dtype
from torchshard.ddp.buckets.graphs import GraphBucket
from torchshard.ddp.buckets.layouts import LaidBucket
from torchshard.ddp.buckets.mixed import MixedBucket, MixedGraphBucket
from torchshard.ddp.buckets.reduction import Hooked, Sum
from torchshard.ddp.buckets.sparse import SparseBucket


@dataclass(frozen=True)
class Recipe:
    """What all buckets of a reducer have in common.

    Attributes:
        params: all parameters of the reducer.
        views_stay: as for FlatBucket.
        sparse: numbers of the parameters whose gradients are sparse.
        reduce_dtype: of the reduction of dense gradients, if it is another than the parameters'.
        rows: as for SparseBucket; filled later.
    """

    params: Sequence[torch.nn.Parameter]
    views_stay: bool
    sparse: frozenset[int] = frozenset()
    reduce_dtype: torch.dtype | None = None
    rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def gradient(self, index: int, name: str) -> Gradient:
        """The gradient of one parameter, for the planner: what can share a bucket has equal kinds."""
        p, dtype = self.params[index], gradient_dtype(self.params[index])
        kind: tuple[str, ...] = (str(dtype).removeprefix("torch."), str(p.device))
        if index in self.sparse:
            kind = (*kind, f"sparse, of {name}")
        return Gradient(index, name, p.numel() * dtype.itemsize, kind)

    def make(self, layout: Iterable[LaidBucket], reduction: Sum | Hooked, never: Collection[int]) -> list[FlatBucket]:
        """The buckets of a layout, in its order.

        Args:
            layout: which gradients go where.
            reduction: tells what gradients are multiplied with on their way in. A hook that may do anything with a
                bucket finds its gradients side by side in the order of its parameters: the small ones are not gathered
                at its start, and what a graph fills, with gaps, is copied for it.
            never: numbers of the parameters that are known to get no gradient.
        """
        made: list[FlatBucket] = []
        scale, small = reduction.scale, SMALL if reduction.is_linear else 0
        for laid in layout:
            members = {i: self.params[i] for i in laid.members}
            common = scale, self.views_stay, never
            if laid.segments and self.reduce_dtype is not None:
                bucket = laid.segments, laid.members, self.params, scale, True, never
                made.append(MixedGraphBucket(self.reduce_dtype, *bucket, gaps=reduction.is_linear))
            elif laid.segments:
                made.append(GraphBucket(laid.segments, laid.members, self.params, *common, gaps=reduction.is_linear))
            elif self.sparse and not self.sparse.isdisjoint(members):
                made.append(SparseBucket(members, *common, self.rows))
            elif self.reduce_dtype is not None:
                made.append(MixedBucket(self.reduce_dtype, members, scale, True, never, small=0))
            else:
                made.append(FlatBucket(members, *common, small))
        return made
