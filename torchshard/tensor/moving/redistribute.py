"""Transitions carried out: from the local tensor of one layout to that of another.

For each transition a program is made once: functions of the local tensor, one a step (steps.py), with all lengths and
groups worked out. Between two meshes it is that of crossing.py.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchshard._torch import flatten, is_traced, unflatten
from torchshard.comm.collectives import SMALL
from torchshard.comm.comparing import differing
from torchshard.comm.nearby import by_transport
from torchshard.errors import RankMismatchError
from torchshard.layout.cuts import Hop, rolled_dims, route, unrolled_shape
from torchshard.layout.layout import Layout, contiguous_stride
from torchshard.tensor.layout import TensorLayout, dense_stride, told_stride
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.moving import crossing
from torchshard.tensor.moving.pending import Pending
from torchshard.tensor.moving.steps import Action, Run, Start, actions
from torchshard.tensor.observing import observers
from torchshard.unsupported import unsupported

MAX_PROGRAMS = 4096  # kept a mesh; when full, all are dropped


@dataclass(frozen=True, slots=True)
class Program:
    """A transition on this rank.

    Attributes:
        runs: all of it.
        before: what comes before the last communication.
        last: that communication; None where there is none.
        after: what comes after it.
        by_element: whether it only reduces, element by element, so that it is the same for tensors of any shape.
        views: all of it without copies, where it only takes a part of what is here; else empty.
    """

    runs: Sequence[Run]
    before: Sequence[Run]
    last: Start | None
    after: Sequence[Run]
    by_element: bool = False
    views: Sequence[Run] = ()


def redistribute_local(x: Tensor, source: TensorLayout, target: TensorLayout, reading: bool = False) -> Tensor:
    """The local tensor of `target` from that of `source`: the same global tensor, on the same mesh or another.

    Args:
        x: the local tensor of `source`.
        source: the layout that it has.
        target: the one that it shall have.
        reading: whether it is for one who only reads it, and may get a part of `x` in the memory of `x`.

    Returns:
        `x` itself where both shardings are the same, else a new dense tensor, its dims in the memory order of `target`.
        On a rank outside of the target's mesh, an empty tensor.

    Raises:
        RankMismatchError: from_local was not told the shape, and the ranks hold pieces of different sizes or strides;
            or the ranks of two meshes do not redistribute the same.
    """
    if _stays(source, target):
        return x
    if source.assumed:
        check_assumed(x, source)
    return _carried_out(x, source, target, reading)


def _stays(source: TensorLayout, target: TensorLayout) -> bool:
    """Whether nothing changes; a rank outside of the mesh holds nothing, before and after."""
    outside = source.mesh.coordinate is None and source.mesh is target.mesh
    return source.sharding is target.sharding or outside


def _carried_out(x: Tensor, source: TensorLayout, target: TensorLayout, reading: bool = False) -> Tensor:
    traced = type(x) is not Tensor and is_traced(x)
    program = _program(source, target, traced)
    return _run((reading and program.views) or program.runs, x)


def redistribute_together(parts: Sequence[Tensor], moves: Sequence[tuple[TensorLayout, TensorLayout]]) -> list[Tensor]:
    """redistribute_local of many parts: small ones that are only reduced, and alike, go in one collective.

    Returns:
        What redistribute_local gives; those that went together share memory, and are there to be read.
    """
    found, packs = list(parts), dict[Hashable, tuple[Program, list[int]]]()
    moving = [k for k, move in enumerate(moves) if not _stays(*move)]
    if any(moves[k][0].assumed for k in moving):
        check_assumed(parts[moving[0]], *[moves[k][0] for k in moving])
    for k in moving:
        x, (source, target) = parts[k], moves[k]
        if not (source.sharding.partial and _is_small(x)):
            found[k] = _carried_out(x, source, target)
            continue
        program = _program(source, target, is_traced(x))
        if program.by_element:
            packs.setdefault((source.sharding, target.sharding, x.dtype), (program, []))[1].append(k)
        else:
            found[k] = _run(program.runs, x)
    for program, together in packs.values():
        terms = [parts[k] for k in together]
        made = unflatten(_run(program.runs, flatten(terms)), terms) if len(terms) > 1 else [_run(program.runs, *terms)]
        for k, x in zip(together, made, strict=True):
            found[k] = x
    return found


def _is_small(x: Tensor) -> bool:
    """Whether a part is sent sooner with others than alone. Those that are added up are of one size on all ranks."""
    count = x.numel()
    return type(count) is int and 0 < count * x.itemsize <= SMALL and not (x.is_conj() or x.is_neg())


def redistribute_later(x: Tensor, source: TensorLayout, target: TensorLayout) -> Tensor:
    """redistribute_local, but its last communication is only started: the result waits for it when it is first used.

    `x` must not be written to before.
    """
    if _stays(source, target):
        return x
    if is_traced(x):
        return redistribute_local(x, source, target)
    if source.assumed:
        check_assumed(x, source)
    program = _program(source, target, traced=False)
    if program.last is None:
        return _run(program.runs, x)
    x = _run(program.before, x)
    with by_transport():
        started = program.last(x)
    stride = dense_stride(target.local_shape, target.stride) if target.mesh.coordinate is not None else (1,)
    return Pending.of(lambda: _run(program.after, started.wait()), target.local_shape, stride, x.dtype, x.device)


def _run(runs: Sequence[Run], x: Tensor) -> Tensor:
    for run in runs:
        x = run(x)
    return x


def moved(source: TensorLayout, target: TensorLayout) -> TensorLayout:
    """The layout that redistribution really gives: dims that were expanded in memory take up room afterwards."""
    if source.sharding is target.sharding or all(target.stride) or not target.shape:
        return target
    stride = dense_stride(target.shape, target.stride)
    return target.sharding.layout(target.shape, stride, target.dtype)  # type: ignore[return-value]


def _program(source: TensorLayout, target: TensorLayout, traced: bool) -> Program:
    mesh = source.mesh
    assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
    for about_to_move in observers.moved:
        about_to_move(source, target)
    key = source.sharding, target.sharding, source.shape, source.stride, source.dtype, traced
    try:
        found = mesh.programs.get(key)
    except TypeError:  # symbolic sizes
        return _make_program(mesh, source, target, traced)
    if found is None:
        if len(mesh.programs) >= MAX_PROGRAMS:
            mesh.programs.clear()
        found = mesh.programs[key] = _make_program(mesh, source, target, traced)
    return found


def _make_program(mesh: BoundMesh, source: TensorLayout, target: TensorLayout, traced: bool) -> Program:
    if target.mesh is mesh:
        steps = _actions_within(mesh, source, target, traced)
    elif traced:
        # What a rank sends differs from rank to rank, and graphs that differ wait for one another.
        raise unsupported(
            "A redistribution between two meshes cannot be compiled.",
            expected=f"a target on the mesh {source.mesh}",
            got=f"one on the mesh {target.mesh}",
            fix="redistribute outside of the compiled function",
        )
    else:
        steps = crossing.actions_between(source, target)
    views = [step.view for step in steps if step.view is not None]
    if traced or len(views) < len(steps):
        views = []
    if target.mesh.coordinate is not None and not _row_major(source):
        steps.append(Action(partial(in_memory_order, layout=source)))
    runs = [step.run for step in steps]
    last = max((k for k, step in enumerate(steps) if step.start), default=None)
    if last is None:
        return Program(runs, runs, None, (), views=views)
    return Program(runs, runs[:last], steps[last].start, runs[last + 1 :], all(step.by_element for step in steps))


def _actions_within(mesh: BoundMesh, source: TensorLayout, target: TensorLayout, traced: bool) -> list[Action]:
    steps: list[Action] = []
    for hop in route(source.sharding, target.sharding, source.shape, source.dtype.itemsize, regular=traced).hops:
        inner = actions(hop.transition, mesh)
        if hop.cuts:
            inner = [Action(partial(_unrolled, hop=hop, layout=source)), *inner, Action(partial(_rolled, hop=hop))]
        steps += inner
    return steps


def _unrolled(x: Tensor, hop: Hop, layout: TensorLayout) -> Tensor:
    if all(len(cuts) == 1 for cuts in hop.cuts.values()):
        return x.reshape(unrolled_shape(x.shape, hop.cuts))
    assert layout.mesh.coordinate is not None, "a rank outside of the mesh has no part"
    whole = unrolled_shape(layout.shape, hop.cuts)
    return x.reshape(hop.transition.source.part(whole, layout.mesh.coordinate))


def _rolled(x: Tensor, hop: Hop) -> Tensor:
    for first, last in rolled_dims(hop.cuts):
        x = x.flatten(first, last)
    return x


def _row_major(layout: Layout) -> bool:
    return dense_stride(layout.shape, layout.stride) == contiguous_stride(layout.shape)


def in_memory_order(x: Tensor, layout: Layout) -> Tensor:
    """A local tensor, or a copy of it, whose elements lie in memory in the order that the layout says."""
    stride = dense_stride(x.shape, layout.stride)
    if x.stride() == stride:
        return x
    return x.new_empty_strided(x.shape, stride).copy_(x)


def check_assumed(x: Tensor, *layouts: TensorLayout) -> None:
    """Make sure that all ranks have given from_local pieces of one size, type and memory order, as it took for granted.

    One small exchange a mesh, for however many tensors.

    Args:
        x: one of the tensors.
        layouts: of all of them.

    Raises:
        RankMismatchError: names the ranks and what they hold.
    """
    if is_traced(x):
        return  # a trace computes nothing; the eager run before it has checked
    by_mesh: dict[BoundMesh, list[TensorLayout]] = {}
    for layout in layouts:
        if layout.assumed and layout.mesh.size > 1 and layout.mesh.coordinate is not None:
            by_mesh.setdefault(layout.mesh, []).append(layout)  # type: ignore[arg-type]
    for mesh, together in by_mesh.items():
        held = _differing([layout.assumed for layout in together], x.device, mesh)
        if held is not None:
            raise _not_as_assumed(held, together)


def _not_as_assumed(held: Sequence[tuple[int, str]], layouts: Sequence[TensorLayout]) -> RankMismatchError:
    """Names the first of the tensors of which ranks say other things; all of them where a rank speaks of more."""
    said = [text.split("\n") for _, text in held]
    if len({*map(len, said)}) == 1:
        k = next(k for k, texts in enumerate(zip(*said, strict=True)) if len({*texts}) > 1)
        said, layouts = [[texts[k]] for texts in said], layouts[k:]
    return RankMismatchError(
        "from_local, or local_map, was not told the shape of the tensor, and ranks hold pieces of different sizes "
        "or strides.",
        expected="pieces of one size, type and memory order on every rank",
        got="\n".join(f"rank {rank}: {', '.join(texts)}" for (rank, _), texts in zip(held, said, strict=True)),
        where=f"a tensor on the mesh {layouts[0].mesh}, placements {layouts[0].placements}",
        fix="DTensor.from_local(..., shape=global_shape, stride=global_stride), or run_check=True; in a plan,"
        " use_local_output=False where the piece comes from; not local_map",
    )


def _differing(
    taken: Sequence[frozenset[TensorLayout]], device: torch.device, mesh: BoundMesh
) -> list[tuple[int, str]] | None:
    """What each rank of the mesh says of the layouts that were taken for granted, where not all say the same."""
    everywhere = tuple(range(mesh.ndim))
    text = "\n".join([_said(assumed, mesh) for assumed in taken])
    return differing(text, device, mesh.group(everywhere), mesh.process_group(everywhere))


def _said(assumed: frozenset[TensorLayout], mesh: BoundMesh) -> str:
    found = mesh.said.get(assumed)
    if found is None:
        if len(mesh.said) >= MAX_PROGRAMS:
            mesh.said.clear()
        told = [f"{tuple(a.local_shape)} of {a}, strides {told_stride(a.shape, a.stride)}" for a in assumed]
        found = mesh.said[assumed] = "; ".join(sorted(told))
    return found


def require_same(text: str, device: torch.device, axes: tuple[int, ...], mesh: BoundMesh, what: str) -> None:
    """Raise RankMismatchError, on all ranks along some axes, unless all say the same of what they are about to do."""
    held = differing(text, device, mesh.group(axes), mesh.process_group(axes))
    refuse_others(held or [], axes, mesh, what)


def refuse_others(held: Sequence[tuple[int, str]], axes: tuple[int, ...], mesh: BoundMesh, what: str) -> None:
    """Raise RankMismatchError where some rank says something else than the first."""
    other = next(((rank, told) for rank, told in held if told != held[0][1]), None)
    if other is None:
        return
    (first, expected), (rank, got) = held[0], other
    raise RankMismatchError(
        f"Ranks do not {what} the same tensor.",
        expected=f"rank {first}: {expected}",
        got=f"rank {rank}: {got}",
        where=f"axis {', '.join(mesh.names[axis] for axis in axes)} of {mesh}",
        fix="make the same tensors, in the same order, on every rank",
    )
