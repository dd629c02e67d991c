"""Embeddings whose vocabulary is split: each rank looks up the rows that it holds, and the result is a sum over ranks.

The gradient of the table is made where the table is: each rank adds up the rows that it holds. A row that no rank holds
is an error of the local operator, as in eager torch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchshard._torch import leaf_of_gradient, note_of_input, noted_of_gradient
from torchshard.layout.layout import Sharding, contiguous_stride
from torchshard.layout.placements import Partial, Placement, R, Shard
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import decided, held, in_boxes, made_of, own_numbers, part
from torchshard.tensor.layout import layout_for
from torchshard.unsupported import unsupported


def _embedding(
    func: Any, weight: Any, indices: Any, padding: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Any:
    """Rows of a table; padding and frequency matter to the gradient only."""
    # What is no table is refused there; truth values have no sums.
    if type(weight) is not DTensor or weight.ndim != 2 or weight.dtype is torch.bool:
        return NotImplemented
    note_of_input(weight, weight._spec)
    weight = in_boxes(weight)
    if 0 not in weight._spec.sharding.splits or weight._spec.mesh.coordinate is None:
        return NotImplemented
    if sparse:
        raise unsupported(
            "embedding: the gradient of a table that is split between ranks is not sparse.",
            expected="sparse=False",
            got=f"sparse=True, {weight._spec}",
            fix="nn.Embedding(..., sparse=False): each rank's gradient has the rows that it holds, and no others",
        )
    layout, mesh, n = weight._spec, weight._spec.mesh, indices.ndim
    table_sharding, of_indices = layout.sharding.without_partial(), _sharding(indices, mesh)
    asked: list[Placement] = []
    given: list[Placement] = []
    for w, i in zip(table_sharding.placements, of_indices.placements, strict=True):
        asked.append(i if w is R and isinstance(i, Shard) else R)
        given.append(asked[-1] if w is R else Partial("sum") if w is Shard(0) else Shard(n))
    splits = {d: axes for d, axes in of_indices.splits.items() if d in _dims(asked)}
    splits = {d: tuple([a for a in axes if isinstance(asked[a], Shard)]) for d, axes in splits.items()}
    table = part(weight, table_sharding)
    rows = part(indices, mesh.sharding(asked, splits))
    if 1 in table_sharding.splits:
        splits = {**splits, n: table_sharding.splits[1]}
    start, count = held(layout.to(table_sharding), 0)
    mine, own = own_numbers(rows, start, count, layout.shape[0])
    found = func(table if count else table.new_zeros(1, table.shape[1]), own).masked_fill_(~mine.unsqueeze(-1), 0)
    shape = (*indices.shape, weight.shape[1])
    return made_of(found, mesh.sharding(given, splits), shape)


def _embedding_backward(func: Any, grad: Any, indices: Any, rows: int, padding: int, by_frequency: bool) -> Any:
    """The gradient of a table; its terms are summed over split batches.

    It is split as the table is, if that is a leaf, or an input of a compiled region. Of terms that are larger than the
    table, as of a bias for each pair of positions, terms of the table are made: less is left to be reduced.
    """
    if by_frequency or type(grad) is not DTensor or grad._spec.mesh.coordinate is None:
        return NotImplemented
    grad, indices = in_boxes(grad), in_boxes(indices)
    of_indices = _sharding(indices, grad._spec.mesh)
    given, of_leaf = grad._spec.sharding, _table_sharding(grad, rows)
    few = bool(given.partial) and bool(rows <= math.prod(indices.shape))  # asks the lengths of a trace for terms only
    of_grad, of_index, of_table = _splits(given, of_indices, of_leaf, indices.ndim, few)
    grads, index, shape = part(grad, of_grad), part(indices, of_index), (rows, grad._spec.shape[-1])
    if 0 not in of_table.splits:
        return made_of(func(grads, index, rows, padding, False), of_table, shape)
    start, count = held(layout_for(of_table, shape, contiguous_stride(shape), grad.dtype), 0)
    mine, own = own_numbers(index, start, count, rows)
    dropped = torch.where(mine & (index != padding), own, count)  # a row past the end, cut off below
    return made_of(func(grads, dropped, count + 1, -1, False).narrow(0, 0, count), of_table, shape)


@decided
def _splits(
    grad: Sharding, indices: Sharding, table: Sharding | None, n: int, few: bool
) -> tuple[Sharding, Sharding, Sharding]:
    """How the gradient of the result and the indices, of n dims, are to be, and how the table's gradient then is.

    Terms of a gradient stay terms where the table has few rows: no more than there are indices.
    """
    mesh = grad.mesh
    given: list[Placement] = []
    batch: list[Placement] = []
    terms: dict[int, Placement] = {}
    for axis, g in enumerate(grad.placements):
        w = table.placements[axis] if table is not None else R
        i = indices.placements[axis]
        b = g if isinstance(g, Shard) and g.dim < n else i if isinstance(i, Shard) else R
        columns = w is Shard(1) or (g is Shard(n) and w is R)
        if few and w is R and b is R and g in (Partial("sum"), Partial("avg")):
            terms[axis] = g
        batch.append(R if w is Shard(0) or columns else b)
        summed = Partial("sum") if isinstance(b, Shard) else terms.get(axis, R)
        given.append(w if w is not R else Shard(1) if columns else summed)
    along = {d: tuple([a for a, p in enumerate(batch) if p is Shard(d)]) for d in _dims(batch)}
    columns_of = tuple([a for a, p in enumerate(given) if p is Shard(1)])
    order = table.splits if table is not None else {}
    if columns_of and tuple(sorted(order.get(1, ()))) == columns_of:
        columns_of = order[1]
    of_grad = [Shard(n) if a in columns_of else terms.get(a, p) for a, p in enumerate(batch)]
    splits = {0: order[0]} if 0 in order else {}
    return (
        mesh.sharding(of_grad, {**along, n: columns_of} if columns_of else along),
        mesh.sharding(batch, along),
        mesh.sharding(given, {**splits, 1: columns_of} if columns_of else splits),
    )


def _table_sharding(grad: DTensor, rows: int) -> Sharding | None:
    """How the table is split whose gradient is being made; None where that is not known, or has another mesh."""
    leaf = leaf_of_gradient()
    table = leaf._spec if type(leaf) is DTensor else noted_of_gradient()
    if table is None or table.mesh is not grad._spec.mesh or table.sharding.cuts:
        return None
    return table.sharding.without_partial() if table.shape == (rows, grad.shape[-1]) else None


def _sharding(indices: Any, mesh: Any) -> Sharding:
    """How the indices are split; a plain scalar is the same everywhere."""
    return indices._spec.sharding if type(indices) is DTensor else mesh.replicated()


def _dims(placements: list[Placement]) -> set[int]:
    return {p.dim for p in placements if isinstance(p, Shard)}


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "embedding.default": _embedding,
    "embedding_dense_backward.default": _embedding_backward,
}
