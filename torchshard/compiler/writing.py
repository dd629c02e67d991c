"""Gradients that a graph can write to their slots without a copy: those whose operators write where they are told.

A gradient is a sum of terms, seen through views: matrix products, rows that are added up (of an embedding), several of
them where a weight is used more than once. Each term is written to the slot, or added to it, when it can be made. What
inductor generates itself (sums, pointwise operators) and what has no place for its result (convolutions) is copied.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import eq
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchshard import _torch
from torchshard.compiler import ops

_aten = torch.ops.aten
_RESHAPE = _aten.view.default
_Order = Mapping[torch.fx.Node, int]
_View = tuple[Callable[..., Any], Sequence[int]]  # an operator and its argument, besides the tensor


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a gradient.

    Attributes:
        after: the node after which it can be written.
        operator: writes it.
        operands: puts what makes its operands into a graph, and returns them.
        views: what the gradient's slot goes through to become the term's place.
    """

    after: torch.fx.Node
    operator: Callable[..., Any]
    operands: Callable[[torch.fx.Graph], Sequence[Any]]
    views: tuple[_View, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """How a gradient is written.

    Attributes:
        terms: of which it is the sum, in the order in which they can be written.
        unneeded: the nodes that are not needed any more, each before its operands.
    """

    terms: tuple[Term, ...]
    unneeded: tuple[torch.fx.Node, ...]


def written(gradient: torch.fx.Node, strides: Sequence[int], order: _Order) -> Written | None:
    """How to write a gradient that the graph returns once; None if it has to be copied.

    Args:
        gradient: makes it.
        strides: of its slot.
        order: of the nodes of the graph.
    """
    value = gradient.meta["val"]
    terms, unneeded = list[Term](), list[torch.fx.Node]()
    todo: list[tuple[Any, torch.Tensor, tuple[_View, ...]]]
    todo = [(gradient, torch.empty_strided(tuple(value.shape), tuple(strides), device="meta"), ())]
    while todo:
        node, place, views = todo.pop()
        if node in unneeded or not _fits(node, place, value.dtype):
            return None
        unneeded.append(node)
        if node.target in _VIEWS:
            operator, argument = view = _VIEWS[node.target](node)
            if operator is _RESHAPE and not place.is_contiguous():  # inductor would view a copy of it
                return None
            todo.append((node.args[0], operator(place, argument), (*views, view)))
        elif (parts := _TERMS[node.target](node, order) if node.target in _TERMS else None) is not None:
            made, rest = parts
            terms += [replace(term, views=views) for term in made]
            todo += [(x, place, views) for x in rest]
        else:
            return None
    return Written(tuple(sorted(terms, key=lambda term: order[term.after])), tuple(unneeded))


def _fits(node: Any, place: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a node makes just what belongs there, not broadcast or converted later, and for nobody else."""
    if not isinstance(node, torch.fx.Node) or len(node.users) != 1:
        return False
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and all(isinstance(length, int) for length in value.shape)
        and value.shape == place.shape
        and value.dtype == dtype
    )


# How the place of a view becomes that of what it is a view of.


def _permuted(node: Any) -> _View:
    dims = node.args[1]
    return _aten.permute.default, sorted(range(len(dims)), key=lambda at: dims[at] % len(dims))


def _reshaped(node: Any) -> _View:
    return _RESHAPE, list(node.args[0].meta["val"].shape)


_VIEWS: dict[Any, Callable[[Any], _View]] = {
    _aten.permute.default: _permuted,
    _RESHAPE: _reshaped,
    _aten.unsqueeze.default: _reshaped,
    _aten.squeeze.dim: _reshaped,
    _aten.squeeze.dims: _reshaped,
}


# The terms of a node that can be written, and the nodes that make its other terms.

_Parts = tuple[list[Term], Sequence[Any]]


def _product(node: Any, order: _Order) -> _Parts | None:
    """As soon as both factors are there: before the gradient of a layer's input, which autograd makes first."""
    *added, left, right = node.args
    after = max(map(_viewed, (left, right)), key=order.__getitem__)
    term = Term(after, ops.PRODUCT_INTO, lambda graph: [_viewed_again(graph, factor) for factor in (left, right)])
    return None if node.kwargs else ([term], added)


def _viewed(node: Any) -> Any:
    """What a node is a view of."""
    while node.target in _VIEWS and len(node.all_input_nodes) == 1:
        node = node.args[0]
    return node


def _viewed_again(graph: torch.fx.Graph, node: Any) -> Any:
    """The same view, made here."""
    return node if node is _viewed(node) else graph.node_copy(node, lambda below: _viewed_again(graph, below))


def _sum(node: Any, order: _Order) -> _Parts | None:
    return None if node.kwargs else ([], node.args)


def _rows(node: Any, order: _Order) -> _Parts | None:
    """Rows of an embedding's gradient, added up in zeros where the mask is set."""
    zeros, mask, indices, rows = node.args
    weight, [index] = node.meta["val"], indices if len(indices) == 1 else [None]
    if index is None or zeros.target is not _aten.full.default or zeros.args[1] != 0:
        return None
    inner = weight.ndim - 1  # dims of a row; the mask has them with length 1
    if mask.meta["val"].ndim != rows.meta["val"].ndim or rows.meta["val"].ndim != index.meta["val"].ndim + inner:
        return None
    return [Term(node, ops.ROWS_INTO, lambda graph: _unmasked(graph, mask, index, rows, inner))], ()


def _rows_at(node: Any, order: _Order) -> _Parts | None:
    """Rows that an index picked (`weight[index]`; before torch 2.13 an embedding, too), added up in zeros."""
    zeros, indices, rows, *accumulates = node.args
    if accumulates != [True] or len(indices) != 1 or zeros.target is not _aten.full.default or zeros.args[1] != 0:
        return None
    [index], weight = indices, node.meta["val"]
    at, values = index.meta["val"], rows.meta["val"]
    if at.dtype not in (torch.int64, torch.int32) or values.ndim != at.ndim + weight.ndim - 1:
        return None
    if not all(map(statically_known_true, map(eq, values.shape, (*at.shape, *weight.shape[1:])))):
        return None  # one row for several of the index
    return [Term(node, ops.ROWS_INTO, lambda graph: [_from_start(graph, index, weight.shape[0]), rows])], ()


def _from_start(graph: torch.fx.Graph, index: Any, length: int) -> Any:
    """An index into `length` rows that may count from the end, as one that does not."""
    counts_back = graph.call_function(_aten.lt.Scalar, (index, 0))
    wrapped = graph.call_function(_aten.add.Tensor, (index, length))
    return graph.call_function(_aten.where.self, (counts_back, wrapped, index))


def _unmasked(graph: torch.fx.Graph, mask: Any, index: Any, rows: Any, inner: int) -> list[Any]:
    """The same without a mask: where it was not set, zeros for row 0. Inductor makes the rows so in the first place."""
    kept = mask
    for _ in range(inner):
        kept = graph.call_function(_aten.squeeze.dim, (kept, -1))
    return [_where(graph, kept, index), _where(graph, mask, rows)]


def _where(graph: torch.fx.Graph, mask: Any, node: Any) -> Any:
    value = node.meta["val"]
    kind = {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False}
    return graph.call_function(_aten.where.self, (mask, node, graph.call_function(_aten.full.default, ([], 0), kind)))


_TERMS: dict[Any, Callable[[Any, _Order], _Parts | None]] = {
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _product,
    _aten.baddbmm.default: _product,
    _aten.add.Tensor: _sum,
    _aten.index_put.default: _rows_at,
    _torch.masked_index_put(): _rows,
}
