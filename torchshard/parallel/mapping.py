"""local_map: a function of local tensors as a function of DTensors."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, overload

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from torchshard._torch import ends_graphs, leaves_of, tree_of
from torchshard.parallel.styles import with_placements
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.mesh import bind
from torchshard.tensor.sizes import asked_layout, even_shape
from torchshard.tensor.torch_placements import from_front, from_torch

Placements = Sequence[Placement] | None
InputPlacements = tuple[Placements, ...] | None
OutputPlacements = Placements | tuple[Placements, ...]
Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def local_map(
    func: None = None,
    out_placements: OutputPlacements = None,
    in_placements: InputPlacements = None,
    in_grad_placements: InputPlacements = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    spmd_types: bool = False,
) -> Callable[[Function], Function]: ...


@overload
def local_map(
    func: Function,
    out_placements: OutputPlacements = None,
    in_placements: InputPlacements = None,
    in_grad_placements: InputPlacements = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    spmd_types: bool = False,
) -> Function: ...


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: OutputPlacements = None,
    in_placements: InputPlacements = None,
    in_grad_placements: InputPlacements = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    spmd_types: bool = False,
) -> Any:
    """A function of DTensors that calls `func` with their parts and makes DTensors of what it returns.

    Positional arguments and results may be nested; placements follow their leaves in order. Without `func`, a
    decorator. Called without any DTensor, the function is called as it is.

    Args:
        func: works on this rank's parts, plain tensors.
        out_placements: of each result: one sequence of placements for one result, a tuple of them for several; None for
            a result that is no tensor. A list of placements is one sequence, a tuple of lists several.
        in_placements: required of each positional argument; None for one that is no DTensor. What is required of a
            plain tensor is not looked at. None to require nothing.
        in_grad_placements: of the gradients that come back for the parts, as for `to_local`; None for those of the
            arguments, which is wrong for a replicated one of whose gradient each rank has a term: Partial().
        device_mesh: of the results; that of the first DTensor argument by default.
        redistribute_inputs: bring arguments of other placements to the required ones, instead of refusing them.
        spmd_types: refused; torch checks the types of parts by it, since 2.15.

    Parts of results are taken to be of one size on all ranks, which the first collective makes sure of. Where pieces of
    an argument are not, ranks ask one another for the sizes of results that are split, which ends a graph.

    Raises:
        NotImplementedError: spmd_types.
        ShardingError: parts of a result are no pieces of one tensor, as torch.chunk cuts it.
        ValueError: an argument of other placements than required.
        AssertionError: placements that do not go with the arguments or results.
    """
    if spmd_types:
        raise NotImplementedError(
            "local_map(spmd_types=True) is not supported: what the gradients of parts are is said by in_grad_placements"
        )
    told = out_placements, in_placements, in_grad_placements, device_mesh, redistribute_inputs
    if func is None:
        return lambda function: functools.partial(_mapped, function, *told)
    return functools.partial(_mapped, func, *told)


def _mapped(
    func: Callable[..., Any],
    out_placements: OutputPlacements,
    in_placements: InputPlacements,
    in_grad_placements: InputPlacements,
    mesh: DeviceMesh | None,
    redistribute_inputs: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    leaves, structure = leaves_of(args)
    for name, given in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements)):
        if given is not None and len(given) != len(leaves):
            raise AssertionError(f"{name} has {len(given)} entries for {len(leaves)} arguments of local_map")
    parts = []
    placed: list[DTensor] = []
    for k, x in enumerate(leaves):
        required = in_placements[k] if in_placements is not None else None
        if isinstance(x, DTensor):
            if in_placements is not None:
                x = _as_required(x, required, redistribute_inputs, k)
            placed.append(x)
            parts.append(_part(x, in_grad_placements, k))
        else:
            if required is not None and not isinstance(x, Tensor):
                raise AssertionError(f"argument {k} of local_map is no tensor: its in_placements must be None")
            parts.append(x)
    result = func(*tree_of(parts, structure), **kwargs)
    if not placed:
        return result
    return _placed(result, out_placements, mesh or placed[0].device_mesh, any(map(_is_uneven, placed)))


def _as_required(x: DTensor, required: Placements, redistribute_inputs: bool, k: int) -> DTensor:
    if required is None:
        raise AssertionError(f"argument {k} of local_map is a DTensor: its in_placements must not be None")
    moved = with_placements(x, tuple(required)) if redistribute_inputs else x
    if not redistribute_inputs and not _same(x, required):
        raise ValueError(
            f"argument {k} of local_map has the placements {x.placements}, and {tuple(required)} are required; "
            "redistribute it, or pass redistribute_inputs=True"
        )
    return moved


def _same(x: DTensor, required: Sequence[Placement]) -> bool:
    """Whether x has these placements, in which dims may be counted from the end."""
    return x.placements == tuple(from_front(p, x.ndim) for p in required)


def _part(x: DTensor, grad_placements: InputPlacements, k: int) -> Tensor:
    if grad_placements is None:
        return x.to_local()
    given = grad_placements[k]
    if given is None:
        raise AssertionError(f"argument {k} of local_map is a DTensor: its in_grad_placements must not be None")
    return x.to_local(grad_placements=tuple(given))


def _is_uneven(x: DTensor) -> bool:
    """Whether ranks hold pieces of different sizes; the same on every rank."""
    parts = [1] * x.ndim
    for axis, placement in enumerate(x.placements):
        if (dim := _split_dim(placement)) is not None:
            parts[dim] *= x.device_mesh.size(axis)
    return any(n % k for n, k in zip(x.shape, parts, strict=True))


def _split_dim(placement: Placement) -> int | None:
    return getattr(placement, "dim", None)  # a strided split is no Shard to torch


def _placed(result: Any, out_placements: OutputPlacements, mesh: DeviceMesh, uneven: bool) -> Any:
    """The results as DTensors; where arguments were uneven, so may they be."""
    leaves, structure = leaves_of(result)
    several = out_placements if isinstance(out_placements, tuple) else (out_placements,)
    if len(leaves) != len(several):
        raise AssertionError(f"local_map got {len(leaves)} results and out_placements for {len(several)}")
    made = []
    for k, (x, placements) in enumerate(zip(leaves, several, strict=True)):
        if isinstance(x, DTensor):
            raise AssertionError(f"result {k} of local_map is a DTensor, and plain tensors are expected")
        if isinstance(x, Tensor):
            made.append(_of_part(x, mesh, cast(Placements, placements), uneven))
        elif placements is not None:
            raise AssertionError(f"result {k} of local_map is no tensor: its out_placements must be None")
        else:
            made.append(x)
    return tree_of(made, structure)


def _of_part(x: Tensor, mesh: DeviceMesh, placements: Placements, uneven: bool) -> DTensor:
    if uneven and placements is not None and any(_split_dim(p) is not None for p in placements):
        return _of_uneven_part(x, mesh, placements)
    return DTensor.from_local(x, mesh, placements)


@ends_graphs("a graph cannot ask the other ranks for the sizes of their parts")
def _of_uneven_part(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A result for whose size ranks ask one another."""
    bound = bind(mesh)
    if bound.coordinate is None:
        return DTensor.from_local(x, mesh, placements)
    sharding = from_torch(placements, bound, even_shape(x, placements, bound), known=False)
    layout = asked_layout(x.detach(), sharding, None, None)
    return DTensor.from_local(x, mesh, placements, shape=layout.shape, stride=layout.stride)
