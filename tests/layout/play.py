"""The meaning of each step, on plain arrays of all ranks in one process: an executable specification.

    parts = spread(full, sharding)               one array a rank, in the order of mesh.ranks
    parts = play(transition(...), parts)         what the ranks hold afterwards
    assert (assemble(parts, target, full.shape) == full).all()

Arrays are numpy's. Nothing here is fast; what ranks do is in torchshard/tensor/moving/steps.py.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from torchshard.layout.grid import Coordinate
from torchshard.layout.layout import Mesh, Sharding
from torchshard.layout.pieces import piece
from torchshard.layout.placements import Partial
from torchshard.layout.reductions import masking, parse_norm
from torchshard.layout.transitions import Step, Transition

Array = np.ndarray[Any, Any]
Parts = list[Array]

_COMBINE: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def spread(full: Array, sharding: Sharding) -> Parts:
    """The part of every rank; a Partial axis is read as Replicate."""
    return [full[box.slices].copy() for box in sharding.boxes(full.shape)]


def assemble(parts: Parts, sharding: Sharding, shape: tuple[int, ...]) -> Array:
    """The full array from the parts of a sharding without Partial.

    Raises:
        AssertionError: a part has another shape than its box, or two replicas differ.
    """
    full = np.zeros(shape, parts[0].dtype)
    for part, box in zip(parts, sharding.boxes(shape), strict=True):
        assert part.shape == box.size, f"a part of shape {part.shape} for {box}"
        full[box.slices] = part
    for part, box in zip(parts, sharding.boxes(shape), strict=True):
        assert np.array_equal(full[box.slices], part, equal_nan=part.dtype.kind in "fc"), "two replicas differ"
    return full


def play(transition: Transition, parts: Parts) -> Parts:
    """All steps, one after another."""
    for step in transition.steps:
        parts = _PLAY[step.kind](step, parts, transition.shape)
    return parts


def reduce_terms(op: str, terms: Sequence[Array]) -> Array:
    """The value of Partial terms, one a coordinate (NaN in any term of max and min survives)."""
    order = parse_norm(op)
    if order is not None:
        return _norm(order, np.stack(terms))
    total: Array = _COMBINE[op].reduce(np.stack(terms), axis=0, dtype=terms[0].dtype)
    return (total / len(terms)).astype(terms[0].dtype) if op == "avg" else total


def _norm(order: float, terms: Array) -> Array:
    sizes: Array = np.abs(terms)
    if math.isinf(order):
        return np.asarray(sizes.max(0) if order > 0 else sizes.min(0))
    return np.asarray(sizes.sum(0) if order == 0 else (sizes**order).sum(0) ** (1 / order))


def _groups(mesh: Mesh, axes: Sequence[int]) -> Iterator[list[int]]:
    """Positions of the ranks that differ on `axes` only, group by group; within a group the first axis is slowest."""
    for base in itertools.product(*[[0] if a in axes else range(n) for a, n in enumerate(mesh.shape)]):
        coordinate, members = list(base), []
        for place in itertools.product(*[range(mesh.shape[a]) for a in axes]):
            for a, k in zip(axes, place, strict=True):
                coordinate[a] = k
            members.append(mesh.linear(coordinate))
        yield members


def _in_groups(step: Step, parts: Parts, work: Callable[[Parts], Parts]) -> Parts:
    result: list[Array | None] = [None] * len(parts)
    for members in _groups(step.before.mesh, step.axes):
        for at, array in zip(members, work([parts[at] for at in members]), strict=True):
            result[at] = array
    return [array for array in result if array is not None]


def _cut(array: Array, dim: int, parts: int) -> Parts:
    pieces = [piece(array.shape[dim], parts, k) for k in range(parts)]
    return [array.take(range(start, start + length), dim) for start, length in pieces]


def _all_gather(step: Step, parts: Parts, shape: tuple[int, ...]) -> Parts:
    dim = step.dim(step.before)
    return _in_groups(step, parts, lambda group: [np.concatenate(group, dim)] * len(group))


def _slice(step: Step, parts: Parts, shape: tuple[int, ...]) -> Parts:
    dim = step.dim(step.after)
    return _in_groups(step, parts, lambda group: [_cut(a, dim, len(group))[k] for k, a in enumerate(group)])


def _all_to_all(step: Step, parts: Parts, shape: tuple[int, ...]) -> Parts:
    old, new = step.dim(step.before), step.dim(step.after)

    def work(group: Parts) -> Parts:
        blocks = [_cut(a, new, len(group)) for a in group]
        return [np.concatenate([row[k] for row in blocks], old) for k in range(len(group))]

    return _in_groups(step, parts, work)


def _all_reduce(step: Step, parts: Parts, shape: tuple[int, ...]) -> Parts:
    return _in_groups(step, parts, lambda group: [reduce_terms(step.op, group)] * len(group))


def _reduce_scatter(step: Step, parts: Parts, shape: tuple[int, ...]) -> Parts:
    dim, counts = step.dim(step.after), [step.before.mesh.shape[a] for a in step.axes]

    def work(group: Parts) -> Parts:
        pieces = [reduce_terms(step.op, group)]
        for count in counts:  # each axis cuts what the ones before it have left
            pieces = [cut for array in pieces for cut in _cut(array, dim, count)]
        return pieces

    return _in_groups(step, parts, work)


def _exchange(step: Step, parts: Parts, shape: tuple[int, ...]) -> Parts:
    mesh, copies, result = step.before.mesh, step.copies(shape), []
    for coordinate in mesh.coordinates():
        box = step.after.box(shape, coordinate)
        array = np.zeros(box.size, parts[0].dtype)
        for origin, common in copies.receives(coordinate):
            assert _differ_on(coordinate, origin) <= set(step.axes), f"{step} crosses its group"
            array[common.within(box)] = parts[mesh.linear(origin)][common.within(step.before.box(shape, origin))]
        result.append(array)
    return result


def _differ_on(one: Coordinate, other: Coordinate) -> set[int]:
    return {a for a, (j, k) in enumerate(zip(one, other, strict=True)) if j != k}


def _mask(step: Step, parts: Parts, shape: tuple[int, ...]) -> Parts:
    placement = step.after.placements[step.axes[0]]
    assert isinstance(placement, Partial), f"{step} does not mask"
    if masking(placement.op) == "keep":
        return parts
    return _in_groups(step, parts, lambda group: [a if k == 0 else np.zeros_like(a) for k, a in enumerate(group)])


_PLAY: dict[str, Callable[[Step, Parts, tuple[int, ...]], Parts]] = {
    "all_gather": _all_gather,
    "slice": _slice,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "exchange": _exchange,
    "mask": _mask,
}
