"""torch.cond, while_loop, scan and map of DTensors: torch's operators, with functions of parts that make DTensors.

Every rank takes the same branch, and goes round as often: what decides is made whole on every rank first. A result has
one layout whichever branch it comes from, that of the first; what is carried keeps the layout that it came in with. A
dim that scan or map goes along is whole on every rank.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import in_transform, is_traced, keep_operands_of_functions, pretending, skip_methods
from torchshard.comm.transport import read
from torchshard.errors import ShardingError
from torchshard.layout.layout import Mesh, Sharding, contiguous_stride
from torchshard.layout.placements import Partial, R, Shard
from torchshard.tensor.calls.call import one_mesh
from torchshard.tensor.calls.plain import refuse_plain
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.gradients.autograd import over, redistribute
from torchshard.tensor.layout import TensorLayout, layout_for
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.modes import replicates_plain_tensors, say_replicated
from torchshard.tensor.moving.redistribute import check_assumed, in_memory_order
from torchshard.unsupported import unsupported

Function = Callable[..., Any]
Layouts = list[TensorLayout | None]  # None: of what is no DTensor


def cond(operator: Function, pred: Any, true_fn: Function, false_fn: Function, operands: Sequence[Any]) -> Any:
    """The operator behind torch.cond, where `pred` or an operand is a DTensor.

    Args:
        operator: takes the same of plain tensors.
        pred: one truth value; a plain one is the same on every rank, which is not checked.
        true_fn: of the operands; its results are a list or a tuple.
        false_fn: of the operands, with results of the same shapes and dtypes. They are brought to the layouts of those
            of `true_fn`.
        operands: of both.

    Raises:
        UnsupportedOperatorError: the results of one branch are not as those of the other.
        ShardingError: DTensors of several meshes, or a view that had to be moved.
    """
    mesh = _mesh_of("cond", [pred, *operands])
    if mesh.coordinate is None:
        return true_fn(*operands)
    operands = _ready("cond", operands)
    results = _Results("cond", "true_fn")
    if not any(is_traced(x._local_tensor) for x in [pred, *operands] if type(x) is DTensor):
        results.layouts = _layouts_of(true_fn, operands)  # either may run first, or alone
    true, false = [results.inside(function, _layouts(operands)) for function in (true_fn, false_fn)]
    return results.wrapped(operator(_decision("cond", pred), true, false, tuple(_parts(mesh, operands))))


def while_loop(
    operator: Function,
    cond_fn: Function,
    body_fn: Function,
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any],
    mutated_arg_indices: str = "",
) -> Any:
    """The operator behind torch's while_loop; `carried_inputs` or `additional_inputs` have DTensors among them.

    Args:
        operator: takes the same of plain tensors.
        cond_fn: of both inputs; a truth value.
        body_fn: of both; what is carried on, of the same shapes and dtypes.
        carried_inputs: what `body_fn` is given first.
        additional_inputs: what both functions read beside.
        mutated_arg_indices: which of all inputs a function writes to, as torch writes it.

    Raises:
        UnsupportedOperatorError: `body_fn` gives something else than it is given.
        ShardingError: as of `cond`.
    """
    mesh = _mesh_of("while_loop", [*carried_inputs, *additional_inputs])
    if mesh.coordinate is None:
        return body_fn(*carried_inputs, *additional_inputs)
    carried, additional = _carried("while_loop", carried_inputs), _ready("while_loop", additional_inputs)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in [*carried, *additional]):
        carried = [_held_by_all("while_loop", x) for x in carried]
    layouts = _layouts([*carried, *additional])
    results = _Results("while_loop", "what it carries", layouts[: len(carried)])

    def goes_on(_mark: Tensor, *parts: Any) -> Any:
        return _decision("while_loop", cond_fn(*_dtensors(parts, layouts)))

    body, parts, count = results.inside(body_fn, layouts), _parts(mesh, [*carried, *additional]), 1 + len(carried)
    made = operator(goes_on, body, tuple(parts[:count]), tuple(parts[count:]), **_written(mutated_arg_indices, 1))
    return results.wrapped(made)


def scan(
    operator: Function,
    combine_fn: Function,
    init: Sequence[Any],
    xs: Sequence[Any],
    additional_inputs: Sequence[Any],
    mutated_arg_indices: str = "",
) -> Any:
    """The operator behind torch's scan along dim 0 of `xs`; `init`, `xs` or `additional_inputs` have DTensors.

    Raises:
        UnsupportedOperatorError: `combine_fn` carries on something else than it is given.
        ShardingError: as of `cond`.
    """
    mesh = _mesh_of("scan", [*init, *xs, *additional_inputs])
    if mesh.coordinate is None:
        return _outside(combine_fn, init, xs, additional_inputs)
    carried, additional = _carried("scan", init), _ready("scan", additional_inputs)
    whole = _whole("scan", xs)
    results = _Results("scan", "what it carries", _layouts(carried))
    combine = results.inside(combine_fn, [*_layouts(carried), *_slices(whole), *_layouts(additional)])
    parts = _parts(mesh, [*carried, *whole, *additional])
    count, end = 1 + len(carried), 1 + len(carried) + len(whole)
    made = operator(combine, parts[:count], parts[count:end], tuple(parts[end:]), **_written(mutated_arg_indices, 1))
    return results.wrapped(made, len(carried), xs[0].shape[0])


def map_(
    operator: Function, f: Function, xs: Sequence[Any], pos_args: Sequence[Any], mutated_arg_indices: str = ""
) -> Any:
    """The operator behind torch's map along dim 0 of `xs`, where `xs` or `pos_args` have DTensors; raises as `cond`."""
    mesh = _mesh_of("map", [*xs, *pos_args])
    if mesh.coordinate is None:
        return _outside(f, (), xs, pos_args)
    whole, additional = _whole("map", xs, mutated_arg_indices), _ready("map", pos_args)
    results = _Results("map", "f")
    of_parts = results.inside(f, [*_slices(whole), *_layouts(additional)])
    mark, *parts = _parts(mesh, [*whole, *additional])

    def marked(*slices: Any) -> Any:
        return of_parts(slices[-1], *slices[:-1])

    given = parts[: len(whole)], [*parts[len(whole) :], mark]
    made = operator(marked, *given, **_written(mutated_arg_indices, 0))
    return results.wrapped(made, 0, xs[0].shape[0])


class _Results:
    """What functions give that stand for one another, and its layouts: known before, or of those of the first."""

    def __init__(self, name: str, model: str, layouts: Layouts | None = None):
        self.name, self.model, self.layouts = name, model, layouts

    def inside(self, function: Function, layouts: Layouts) -> Function:
        """The function of a mark and of parts, to a mark and parts, that is like one of DTensors of these layouts."""

        def of_parts(mark: Tensor, *parts: Any) -> tuple[Any, ...]:
            if in_transform():  # of torch.func.functionalize, as it takes writes for copies
                raise unsupported(
                    f"In a compiled region a function of {self.name} writes to a tensor that it did not make.",
                    expected="a function that leaves DTensors and others as they are",
                    got="one that writes",
                    where=self.name,
                    fix="return the new value, and write it behind the call: x.copy_(...)",
                )
            results = function(*_dtensors(parts, layouts))
            known = self.layouts or []
            self.layouts = known + _layouts(results[len(known) :])
            return (mark + 1, *map(self._part, results, self.layouts))

        return of_parts

    def wrapped(self, parts: Sequence[Any], carried: int | None = None, times: int = 1) -> tuple[Any, ...]:
        """The DTensors of parts; those behind the first `carried` have a dim more, of `times` elements."""
        layouts = self.layouts or []
        if carried is not None:
            layouts = [*layouts[:carried], *[_stacked(layout, times) for layout in layouts[carried:]]]
        mark, *parts = parts
        if is_traced(mark):
            read(mark)
        return tuple(_dtensors(parts, layouts))

    def _part(self, x: Any, layout: TensorLayout | None) -> Any:
        found = x._spec if type(x) is DTensor else None
        if found is layout is None:
            return x
        if found is None or layout is None or (*found.shape, found.dtype) != (*layout.shape, layout.dtype):
            raise unsupported(
                f"{self.name} of DTensors gives results of the same kinds each time.",
                expected=f"as {self.model}: {_told(layout)}",
                got=_told(found),
                where=self.name,
                fix="return DTensors of the same shapes and dtypes from each function",
            )
        return in_memory_order(redistribute(x, layout.sharding).to_local(), layout)


def _told(layout: TensorLayout | None) -> str:
    return "no DTensor" if layout is None else str(layout)


def _mesh_of(name: str, values: Iterable[Any]) -> Mesh:
    """The one mesh of all DTensors among these."""
    return one_mesh(name, [(f"operands[{k}]", x._spec) for k, x in enumerate(values) if type(x) is DTensor])


def _decision(name: str, pred: Any) -> Any:
    """One truth value, the same on each rank."""
    if type(pred) is DTensor:
        with torch.no_grad():
            return redistribute(pred, pred._spec.mesh.replicated()).to_local()
    if isinstance(pred, Tensor) and pred.ndim and not replicates_plain_tensors():
        raise refuse_plain(name, "pred", pred)
    return pred


def _ready(name: str, operands: Sequence[Any]) -> list[Any]:
    """Operands whose parts may go into a function: it may write to them, and gradients come back in their layout."""
    for x in operands:
        if type(x) is not DTensor:
            continue
        if x._spec.terms:
            raise ShardingError(
                f"{name} takes no parameter under fully_shard(dp_mesh_dims=): terms of its gradient would be lost.",
                expected="a tensor of its own",
                got=x._spec,
                where=name,
                fix="give it a value made of the parameter, as x * 1, and parts that to_local() gives outside of it",
            )
        if x._spec.marks or any(isinstance(p, Partial) and p.op not in ("sum", "avg") for p in x._spec.placements):
            raise ShardingError(
                f"{name} takes no view that had to be moved, no part in another memory order than the whole, and terms"
                " of sums and means only.",
                expected="a tensor of its own, Shard, Replicate, Partial('sum') or Partial('avg')",
                got=x._spec,
                where=name,
                fix="give it x.clone(), or x.redistribute(...) without Partial",
            )
        if x._spec.assumed:
            check_assumed(x._local_tensor, x._spec)
    return [*operands]


def _carried(name: str, operands: Sequence[Any]) -> list[Any]:
    """Values are carried, not terms of them, and with a place in memory for each, as what follows them is put there."""
    reduced = _ready(name, [*map(_reduced, operands)])
    return [x.contiguous() if type(x) is DTensor and x._spec.overlaps else x for x in reduced]


def _reduced(x: Any) -> Any:
    return redistribute(x, x._spec.sharding.without_partial()) if isinstance(x, DTensor) else x


def _whole(name: str, xs: Sequence[Any], written: str = "") -> list[Any]:
    """Values with the first dim whole on every rank."""
    found = []
    for x in _carried(name, xs):
        if type(x) is DTensor and (split := x._spec.sharding.splits.get(0)):
            if written:
                raise unsupported(
                    f"{name} along a split dim is of a copy: what its function writes would be lost.",
                    expected="dim 0 whole on every rank",
                    got=x._spec,
                    fix="x.redistribute(...) to another dim or Replicate first",
                )
            say_replicated(name, "it goes along a split dim")
            sharding = x._spec.sharding
            for axis in split:
                sharding = sharding.replace(axis, R)
            x = redistribute(x, sharding)
        found.append(x)
    return found


def _held_by_all(name: str, x: Any) -> Any:
    """A value of which each rank has elements: torch has no backward of loops that carry none."""
    if type(x) is not DTensor or 0 in x.shape:
        return x
    layout, mesh = x._spec, x._spec.mesh
    if all(0 not in layout.sharding.part(layout.shape, place) for place in mesh.coordinates()):
        return x
    say_replicated(name, "some ranks hold nothing, and torch has no backward for those")
    return redistribute(x, mesh.replicated())


def _slices(xs: Sequence[Any]) -> Layouts:
    """Of what a function is given of each of these: all but the first dim."""
    return [_moved(x._spec, -1, x.shape[1:], x._spec.stride[1:]) if type(x) is DTensor else None for x in xs]


def _stacked(layout: TensorLayout | None, times: int) -> TensorLayout | None:
    if layout is None:
        return None
    shape = (times, *layout.shape)
    return _moved(layout, 1, shape, contiguous_stride(shape))


def _moved(layout: TensorLayout, by: int, shape: Sequence[int], stride: Sequence[int]) -> TensorLayout:
    """A layout with the same split of dims that have other numbers."""
    sharding: Sharding = layout.sharding
    placements = [p.at(p.dim + by) if isinstance(p, Shard) else p for p in sharding.placements]
    order = {dim + by: axes for dim, axes in sharding.order}
    return layout_for(sharding.mesh.sharding(placements, order), tuple(shape), tuple(stride), layout.dtype)


def _parts(mesh: Mesh, values: Iterable[Any]) -> list[Any]:
    """A mark, and the parts of DTensors."""
    parts = [x.to_local() if type(x) is DTensor else x for x in values]
    if any(is_traced(x) for x in parts if isinstance(x, Tensor)):
        keep_operands_of_functions()
    assert isinstance(mesh, BoundMesh), "DTensors of a mesh that belongs to no DeviceMesh"
    device = mesh.device_mesh.device_type
    if not torch.is_grad_enabled():
        return [torch.zeros(1, device=device), *parts]
    return list(_Marked.apply(device, *parts))  # type: ignore[no-untyped-call]


@skip_methods()
class _Marked(torch.autograd.Function):
    """Tensors, and a mark that goes through an operator with them: something of it that is read, and its gradient.

    A graph drops an operator of which it reads nothing, with all that its functions send. A rank that holds nothing
    reads nothing else of it.
    """

    @staticmethod
    def forward(ctx: Any, device: str, *values: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        return torch.zeros(1, device=device), *[x.view_as(x) if isinstance(x, Tensor) else x for x in values]

    @staticmethod
    def backward(ctx: Any, mark: Tensor | None, *grads: Any) -> tuple[Any, ...]:
        if mark is not None and is_traced(mark):
            read(mark)
        return None, *grads


def _written(indices: str, before: int) -> dict[str, str]:
    """Which inputs a function writes to, as torch numbers them, behind a mark or before one."""
    found = [str(int(index) + before) for index in indices.split(",") if index]
    return {"mutated_arg_indices": ",".join(found)} if found else {}


def _layouts(values: Iterable[Any]) -> Layouts:
    return [x._spec.plain if type(x) is DTensor else None for x in values]


def _dtensors(parts: Sequence[Any], layouts: Layouts) -> list[Any]:
    if torch.is_grad_enabled():
        parts = [
            x if layout is None else _Ordered.apply(x, layout)  # type: ignore[no-untyped-call]
            for x, layout in zip(parts, layouts, strict=True)
        ]
    return [x if layout is None else over(x, layout) for x, layout in zip(parts, layouts, strict=True)]


@skip_methods()
class _Ordered(torch.autograd.Function):
    """A part whose gradient lies in memory as itself.

    torch compares the strides of gradients from each function; and inductor carries on in the memory of what came
    first, which may be one number for all.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: TensorLayout) -> Tensor:
        ctx.layout = layout
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return in_memory_order(grad, ctx.layout), None


def _outside(function: Function, init: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any]) -> tuple[Any, ...]:
    """The results on a rank outside of the mesh, which holds nothing."""
    made = function(*init, *[x.select(0, 0) for x in xs], *additional)
    times = xs[0].shape[0]
    stacked = [y.unsqueeze(0).expand(times, *y.shape).clone() for y in made[len(init) :]]
    return (*made[: len(init)], *stacked)


_known: "weakref.WeakKeyDictionary[Function, dict[Any, Layouts]]" = weakref.WeakKeyDictionary()


def _layouts_of(function: Function, operands: Sequence[Any]) -> Layouts:
    """How the results of a function are laid out, which is not run for that."""
    known = _known.setdefault(function, {})
    key = tuple([x._spec if type(x) is DTensor else type(x) for x in operands])
    if key not in known:
        with pretending():
            known[key] = _layouts(function(*map(_fake, operands)))
    return known[key]


def _fake(x: Any) -> Any:
    if type(x) is DTensor:
        return wrap(_fake(x._local_tensor), x._spec)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if isinstance(x, Tensor) else x


OPERATORS = {"cond": cond, "while_loop": while_loop, "scan": scan, "map_impl": map_}
