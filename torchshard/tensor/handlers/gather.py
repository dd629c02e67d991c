"""Elements looked up along a dim that is split: each rank looks up those that it holds, and the result is a sum over
ranks. What is looked up is not gathered, as where the scores of a few tokens are taken from a split vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchshard.layout.placements import Partial, Placement, R, Shard
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import held, in_boxes, made_of, own_numbers, part


def _gather(func: Any, x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """Left to the rule, which moves x, where that is not split along the dim, or no longer than what is looked up."""
    if not (type(x) is type(index) is DTensor) or x.ndim != index.ndim or not -x.ndim <= dim < x.ndim:
        return NotImplemented
    dim %= x.ndim
    fits = all(n <= m for n, m in zip(index.shape, x.shape, strict=True))
    if not fits or index.shape[dim] >= x.shape[dim] or index.dtype is not torch.int64 or x.dtype is torch.bool:
        return NotImplemented
    x, index = in_boxes(x), in_boxes(index)
    mesh, split, wanted = x._spec.mesh, x._spec.sharding.without_partial(), index._spec.sharding
    if dim not in split.splits or mesh.coordinate is None:
        return NotImplemented
    even = {d for d in range(x.ndim) if d != dim and x.shape[d] == index.shape[d]}
    searched: list[Placement] = []
    found: list[Placement] = []
    for p, i in zip(split.placements, wanted.placements, strict=True):
        along = p if p is not R else i  # what is whole is cut as the index is
        kept = isinstance(along, Shard) and (along.dim in even or along.dim == dim)
        searched.append(along if kept and (p is not R or along.dim != dim) else R)
        found.append(R if not kept else Partial("sum") if p is Shard(dim) else along)
    asked = [R if isinstance(f, Partial) else f for f in found]
    orders = {**wanted.splits, **split.splits}

    def sharding(placements: list[Placement]) -> Any:
        splits = {d: [a for a in axes if placements[a] is Shard(d)] for d, axes in orders.items()}
        for a, p in enumerate(placements):
            if isinstance(p, Shard) and a not in splits[p.dim]:
                splits[p.dim].append(a)
        return mesh.sharding(placements, {d: tuple(axes) for d, axes in splits.items() if axes})

    target = sharding(searched)
    start, count = held(x._spec.to(target), dim)
    piece, rows = part(x, target), part(index, sharding(asked))
    mine, numbers = own_numbers(rows, start, count, x.shape[dim])
    if not count:
        piece = piece.new_zeros([1 if d == dim else n for d, n in enumerate(piece.shape)])
    local: Tensor = func(piece, dim, numbers, sparse_grad=sparse_grad).masked_fill_(~mine, 0)
    return made_of(local, sharding(found), tuple(index.shape))


HANDLERS: Mapping[str, Callable[..., Any]] = {"gather.default": _gather}
