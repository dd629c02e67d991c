"""What each step of a transition does on this rank: functions of the local tensor, with all lengths worked out.

What a step means is in tests/layout/play.py, which plays it on plain arrays of all ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from torchshard.comm import collectives
from torchshard.comm.collectives import Started
from torchshard.comm.group import Group
from torchshard.layout.boxes import Box
from torchshard.layout.pieces import nested_piece, nested_pieces, piece
from torchshard.layout.placements import Partial
from torchshard.layout.reductions import masking
from torchshard.layout.transitions import Step, Transition
from torchshard.tensor.mesh import BoundMesh

_Who = TypeVar("_Who")  # a coordinate, or a rank
Run = Callable[[Tensor], Tensor]
Start = Callable[[Tensor], Started[Tensor]]


@dataclass(frozen=True, slots=True)
class Action:
    """One step on this rank.

    Attributes:
        run: from the local tensor before to the one after.
        start: where the step communicates: the same without waiting.
        view: where the step only takes a part of what is here: the same as a view.
        by_element: whether each element of the result is made of those at its place alone, whatever the shape.
    """

    run: Run
    start: Start | None = None
    view: Run | None = None
    by_element: bool = False


def actions(plan: Transition, mesh: BoundMesh) -> list[Action]:
    """What this rank, which is one of the mesh, does for each step."""
    return [_action(step, plan, mesh) for step in plan.steps]


def _action(step: Step, plan: Transition, mesh: BoundMesh) -> Action:
    if step.kind == "mask":
        return Action(_mask(step, plan, mesh))
    if step.kind == "slice":
        return taking(_slice(step, plan, mesh))
    if step.kind == "exchange" and not step.nbytes:  # every rank has what it shall hold
        return taking(_kept(step, plan, mesh))
    return communicating(_STARTED[step.kind](step, plan, mesh), step.kind == "all_reduce")


def communicating(start: Start, by_element: bool = False) -> Action:
    """The action that waits for what `start` starts."""
    return Action(lambda x: start(x).wait(), start, by_element=by_element)


def taking(view: Run) -> Action:
    """The action that copies the part which `view` takes."""
    return Action(lambda x: view(x).clone(memory_format=torch.contiguous_format), view=view)


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


def _all_gather(step: Step, plan: Transition, mesh: BoundMesh) -> Start:
    dim = step.dim(step.before)
    lengths, group = _line_lengths(step, plan, mesh, dim), mesh.group(step.axes)
    return lambda x: collectives.start_all_gather(x, dim, lengths, group)


def _slice(step: Step, plan: Transition, mesh: BoundMesh) -> Run:
    assert mesh.coordinate is not None
    dim = step.dim(step.after)
    start, length = _cuts(step, plan, mesh, dim)[mesh.coordinate[step.axes[0]]]
    return lambda x: x.narrow(dim, start, length)


def _all_to_all(step: Step, plan: Transition, mesh: BoundMesh) -> Start:
    join, split = step.dim(step.before), step.dim(step.after)
    sent = [length for _, length in _cuts(step, plan, mesh, split)]
    received, group = _line_lengths(step, plan, mesh, join), mesh.group(step.axes)
    return lambda x: collectives.start_all_to_all(x, split, join, sent, received, group)


def _all_reduce(step: Step, plan: Transition, mesh: BoundMesh) -> Start:
    op, group = step.op, mesh.group(step.axes)
    return lambda x: collectives.start_all_reduce(x, op, group)


def _reduce_scatter(step: Step, plan: Transition, mesh: BoundMesh) -> Start:
    op, dim, group = step.op, step.dim(step.after), mesh.group(step.axes)
    assert mesh.coordinate is not None
    held = step.before.box(plan.shape, mesh.coordinate).size[dim]
    lengths = [length for _, length in nested_pieces(held, [mesh.shape[a] for a in step.axes])]
    return lambda x: collectives.start_reduce_scatter(x, op, dim, lengths, group)


def _mask(step: Step, plan: Transition, mesh: BoundMesh) -> Run:
    assert mesh.coordinate is not None
    placement = step.after.placements[step.axes[0]]
    assert isinstance(placement, Partial), f"{step} does not mask"
    keeps = masking(placement.op) == "keep" or mesh.coordinate[step.axes[0]] == 0
    return torch.clone if keeps else torch.zeros_like


def _exchange(step: Step, plan: Transition, mesh: BoundMesh) -> Start:
    assert mesh.coordinate is not None
    copies, here, group = step.copies(plan.shape), mesh.coordinate, mesh.group(step.axes)
    places = _places(step, mesh)
    given, taken = boxes_of(copies.sends(here), places), boxes_of(copies.receives(here), places)
    mine, wanted = step.before.box(plan.shape, here), step.after.box(plan.shape, here)
    return partial(start_copies, given=given, taken=taken, mine=mine, wanted=wanted, group=group)


def _kept(step: Step, plan: Transition, mesh: BoundMesh) -> Run:
    """What is left of this rank's part by an exchange that brings it nothing."""
    assert mesh.coordinate is not None
    return part_within(*(s.box(plan.shape, mesh.coordinate) for s in (step.before, step.after)))


def part_within(mine: Box | None, wanted: Box | None) -> Run:
    """The view of `wanted` where `mine` holds all of it; None is the box of a rank outside of the mesh."""
    if wanted is None:
        return lambda x: x.new_empty(0)
    if mine is None or not wanted.numel:
        return lambda x: x.new_empty(wanted.size)
    within = wanted.within(mine)
    return lambda x: x[within]


def _places(step: Step, mesh: BoundMesh) -> dict[tuple[int, ...], int]:
    """Coordinates of this rank's group, with their place along the line."""
    return {coordinate: place for place, coordinate in enumerate(mesh.places(step.axes))}


def boxes_of(parts: Iterable[tuple[_Who, Box]], places: Mapping[_Who, int]) -> list[Box | None]:
    """The box of each place of a group, from boxes by whose they are; None where there is none."""
    boxes: list[Box | None] = [None] * len(places)
    for who, box in parts:
        boxes[places[who]] = box
    return boxes


def start_copies(
    x: Tensor,
    given: Sequence[Box | None],
    taken: Sequence[Box | None],
    mine: Box | None,
    wanted: Box | None,
    group: Group,
) -> Started[Tensor]:
    """Start to give and to take boxes: parts from others come by one collective, the own part by a copy.

    Args:
        x: the local tensor.
        given: the box for each rank of the group, in the order of the line; for this rank as well.
        taken: the box from each rank.
        mine: what `x` is; None where this rank holds nothing.
        wanted: what the result is; None where this rank shall hold nothing.
        group: who takes part.
    """
    here, nothing = group.position, x.new_empty(0)
    blocks = [x[box.within(mine)] if box and mine and place != here else nothing for place, box in enumerate(given)]
    shapes = [box.size if box and place != here else (0,) for place, box in enumerate(taken)]
    sent = collectives.start_exchange(blocks, shapes, group)

    def put(got: Sequence[Tensor]) -> Tensor:
        if wanted is None:
            return nothing
        result = x.new_empty(wanted.size)
        for place, (box, part) in enumerate(zip(taken, sent.finish(got), strict=True)):
            if box:
                result[box.within(wanted)] = x[box.within(mine)] if mine and place == here else part
        return result

    return Started(group, sent.coming, put)


_STARTED: Mapping[str, Callable[[Step, Transition, BoundMesh], Start]] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "exchange": _exchange,
}
