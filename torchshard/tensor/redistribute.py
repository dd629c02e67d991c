"""Transitions carried out: from the local tensor of one layout to that of another.

For each transition a program is made once: a list of functions of the local tensor, one a step, with all lengths and
groups worked out. What a step means is in layout/play.py, which plays it on plain arrays.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torchshard._torch import is_traced
from torchshard.comm import collectives
from torchshard.comm.group import Group
from torchshard.errors import RankMismatchError, ShardingError
from torchshard.layout.boxes import Box
from torchshard.layout.layout import Layout, contiguous_stride
from torchshard.layout.pieces import nested_piece, nested_pieces, piece
from torchshard.layout.placements import Partial, Shard
from torchshard.layout.reductions import reduction
from torchshard.layout.transitions import Step, Transition, transition
from torchshard.tensor.layout import ASSUMED, TensorLayout, dense_stride
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.observing import observers

Run = Callable[[Tensor], Tensor]

MAX_PROGRAMS = 4096  # kept a mesh; when full, all are dropped


def redistribute_local(x: Tensor, source: TensorLayout, target: TensorLayout) -> Tensor:
    """The local tensor of `target` from that of `source`: the same global tensor on the same mesh.

    Returns:
        `x` itself where both shardings are the same, else a new dense tensor, its dims in the memory order of `target`.

    Raises:
        RankMismatchError: from_local was not told the shape, and the ranks hold pieces of different sizes.
    """
    if source.sharding is target.sharding:
        return x
    if source.mesh.coordinate is None:
        return x  # a rank outside of the mesh holds nothing, before and after
    if source.marks & ASSUMED:
        check_assumed(x, source)
    for run in _program(source, target):
        x = run(x)
    return x


def moved(source: TensorLayout, target: TensorLayout) -> TensorLayout:
    """The layout that redistribution really gives: dims that were expanded in memory take up room afterwards."""
    if source.sharding is target.sharding or all(target.stride) or not target.shape:
        return target
    stride = dense_stride(target.shape, target.stride)
    return target.sharding.layout(target.shape, stride, target.dtype)  # type: ignore[return-value]


def _program(source: TensorLayout, target: TensorLayout) -> list[Run]:
    mesh = source.mesh
    assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
    for about_to_move in observers.moved:
        about_to_move(source, target)
    key = source.sharding, target.sharding, source.shape, source.stride, source.dtype
    try:
        found = mesh.programs.get(key)
    except TypeError:  # symbolic sizes
        return _make_program(mesh, source, target)
    if found is None:
        if len(mesh.programs) >= MAX_PROGRAMS:
            mesh.programs.clear()
        found = mesh.programs[key] = _make_program(mesh, source, target)
    return found


def _make_program(mesh: BoundMesh, source: TensorLayout, target: TensorLayout) -> list[Run]:
    if target.mesh is not mesh:
        raise ShardingError(
            "A tensor cannot be redistributed to another mesh yet.",
            expected=f"the mesh {mesh}",
            got=f"the mesh {target.mesh}",
            fix="distribute_tensor(x.full_tensor(), other_mesh, placements)",
        )
    plan = transition(source.sharding, target.sharding, source.shape, source.dtype.itemsize)
    program = [_MAKE[step.kind](step, plan, mesh) for step in plan.steps]
    if not _row_major(source):
        program.append(partial(_in_memory_order, like=source.stride))
    return program


def _row_major(layout: Layout) -> bool:
    return dense_stride(layout.shape, layout.stride) == contiguous_stride(layout.shape)


def _in_memory_order(x: Tensor, like: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(x.shape, dense_stride(x.shape, like), dtype=x.dtype, device=x.device).copy_(x)


def _dim(step: Step, after: bool) -> int:
    placement = (step.after if after else step.before).placements[step.axes[0]]
    assert isinstance(placement, Shard), f"{step} splits nothing"
    return placement.dim


def _op(step: Step) -> str:
    placement = step.before.placements[step.axes[0]]
    assert isinstance(placement, Partial), f"{step} reduces nothing"
    return placement.op


def _line_lengths(step: Step, plan: Transition, mesh: BoundMesh, dim: int) -> list[int]:
    """Lengths of the pieces of `dim` along the line of the step's axes, which are the last that split it."""
    assert mesh.coordinate is not None
    order = step.before.splits[dim]
    outer = order[: len(order) - len(step.axes)]
    place = [mesh.coordinate[a] for a in outer]
    held = nested_piece(plan.shape[dim], [mesh.shape[a] for a in outer], place)[1]
    return [length for _, length in nested_pieces(held, [mesh.shape[a] for a in step.axes])]


def _cuts(step: Step, plan: Transition, mesh: BoundMesh, dim: int) -> list[tuple[int, int]]:
    """The pieces that the step's axis cuts this rank's part of `dim` into."""
    assert mesh.coordinate is not None
    held = step.before.box(plan.shape, mesh.coordinate).size[dim]
    parts = mesh.shape[step.axes[0]]
    return [piece(held, parts, k) for k in range(parts)]


def _all_gather(step: Step, plan: Transition, mesh: BoundMesh) -> Run:
    dim = _dim(step, after=False)
    lengths, group = _line_lengths(step, plan, mesh, dim), mesh.group(step.axes)
    return lambda x: collectives.all_gather(x, dim, lengths, group)


def _slice(step: Step, plan: Transition, mesh: BoundMesh) -> Run:
    assert mesh.coordinate is not None
    dim = _dim(step, after=True)
    start, length = _cuts(step, plan, mesh, dim)[mesh.coordinate[step.axes[0]]]
    return lambda x: x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _all_to_all(step: Step, plan: Transition, mesh: BoundMesh) -> Run:
    join, split = _dim(step, after=False), _dim(step, after=True)
    sent = [length for _, length in _cuts(step, plan, mesh, split)]
    received, group = _line_lengths(step, plan, mesh, join), mesh.group(step.axes)
    return lambda x: collectives.all_to_all(x, split, join, sent, received, group)


def _all_reduce(step: Step, plan: Transition, mesh: BoundMesh) -> Run:
    op, group = _op(step), mesh.group(step.axes)
    return lambda x: collectives.all_reduce(x, op, group)


def _reduce_scatter(step: Step, plan: Transition, mesh: BoundMesh) -> Run:
    op, dim, group = _op(step), _dim(step, after=True), mesh.group(step.axes)
    lengths = [length for _, length in _cuts(step, plan, mesh, dim)]
    return lambda x: collectives.reduce_scatter(x, op, dim, lengths, group)


def _mask(step: Step, plan: Transition, mesh: BoundMesh) -> Run:
    assert mesh.coordinate is not None
    placement = step.after.placements[step.axes[0]]
    assert isinstance(placement, Partial), f"{step} does not mask"
    keeps = reduction(placement.op).mask == "keep" or mesh.coordinate[step.axes[0]] == 0
    return torch.clone if keeps else torch.zeros_like


def _exchange(step: Step, plan: Transition, mesh: BoundMesh) -> Run:
    assert mesh.coordinate is not None
    copies, here, group = step.copies(plan.shape), mesh.coordinate, mesh.group(step.axes)
    places = _places(step, mesh)
    given: list[Box | None] = [None] * len(places)
    taken: list[Box | None] = [None] * len(places)
    for to, box in copies.sends(here):
        given[places[to]] = box
    for origin, box in copies.receives(here):
        taken[places[origin]] = box
    mine, wanted = step.before.box(plan.shape, here), step.after.box(plan.shape, here)
    return partial(_exchanged, given=given, taken=taken, mine=mine, wanted=wanted, group=group)


def _places(step: Step, mesh: BoundMesh) -> dict[tuple[int, ...], int]:
    """Coordinates of this rank's group, with their place along the line."""
    assert mesh.coordinate is not None
    line = [mesh.coordinate]
    for axis in step.axes:
        line = [(*c[:axis], k, *c[axis + 1 :]) for c in line for k in range(mesh.shape[axis])]
    return {coordinate: place for place, coordinate in enumerate(line)}


def _exchanged(
    x: Tensor, given: list[Box | None], taken: list[Box | None], mine: Box, wanted: Box, group: Group
) -> Tensor:
    """What an exchange leaves: parts from others by one collective, the own part by a copy."""
    others = [box if place != group.position else None for place, box in enumerate(given)]
    blocks = [x.new_empty(0) if box is None else x[box.within(mine)] for box in others]
    shapes = [(0,) if box is None or place == group.position else box.size for place, box in enumerate(taken)]
    parts = collectives.exchange(blocks, shapes, group)
    result = x.new_empty(wanted.size)
    for place, (box, part) in enumerate(zip(taken, parts, strict=True)):
        if box is not None:
            result[box.within(wanted)] = x[box.within(mine)] if place == group.position else part
    return result


_MAKE: dict[str, Callable[[Step, Transition, BoundMesh], Run]] = {
    "all_gather": _all_gather,
    "slice": _slice,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "exchange": _exchange,
    "mask": _mask,
}


def check_assumed(x: Tensor, layout: TensorLayout) -> None:
    """Make sure that all ranks hold pieces of one size, as from_local took for granted.

    Raises:
        RankMismatchError: names the ranks and what they hold.
    """
    mesh = layout.mesh
    if is_traced(x) or mesh.size == 1:
        return  # a trace computes nothing; the eager run before it has checked
    assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
    group = mesh.group(tuple(range(mesh.ndim)))
    sizes = torch.tensor([list(x.shape)], device=x.device)
    held = collectives.all_gather(sizes, 0, [1] * group.size, group).tolist()
    if any(size != held[0] for size in held):
        found = ", ".join(f"rank {rank}: {tuple(size)}" for rank, size in zip(mesh.ranks, held, strict=True))
        raise RankMismatchError(
            "from_local was not told the shape of the tensor, and the ranks hold pieces of different sizes.",
            expected="pieces of one size on every rank",
            got=found,
            where=f"a tensor on the mesh {mesh}, placements {layout.placements}",
            fix="DTensor.from_local(..., shape=global_shape, stride=global_stride), or run_check=True",
        )
