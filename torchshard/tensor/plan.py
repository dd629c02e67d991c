"""How one call of an operator on certain layouts is run: found once, by rule, decomposition or gathering, then kept.

rule             lifted to the mesh: move the operands that the cheapest way wants elsewhere, run on local tensors
handler          a function of DTensors, for operators that must communicate inside
decomposition    where ATen itself composes the operator of others
gathering        every operand whole on every rank; said once
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import decomposition, in_backward, local_callable
from torchshard.errors import ShardingError, UnsupportedOperatorError
from torchshard.layout.layout import Sharding, contiguous_stride
from torchshard.rules.bind import bind as bind_rule
from torchshard.rules.lift import lift
from torchshard.rules.notation import parse
from torchshard.rules.registry import find
from torchshard.rules.rule import Made
from torchshard.tensor import guards
from torchshard.tensor.codegen import Argument, How, KeyPart, plan_maker
from torchshard.tensor.dtensor import DTensor, new, wrap
from torchshard.tensor.layout import ASSUMED, SEVERED, TensorLayout, global_stride, layout_for
from torchshard.tensor.modes import replicates_plain_tensors, say_replicated
from torchshard.tensor.redistribute import moved, redistribute_local

Plan = Callable[..., Any]


def operator_name(func: Any) -> str:
    """Name and overload, as rules have it: "mm.default", and with the namespace outside of ATen."""
    name = f"{func._overloadpacket.__name__}.{func._overloadname}"
    return name if func.namespace == "aten" else f"{func.namespace}::{name}"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator: what was passed, and of what kind each argument is."""

    func: Any
    name: str
    names: tuple[str, ...]
    positional: int
    parts: tuple[KeyPart, ...]
    values: tuple[Any, ...]

    def with_values(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """These values as positional and keyword arguments."""
        named = dict(zip(self.names[self.positional :], values[self.positional :], strict=True))
        return list(values[: self.positional]), named

    def written(self) -> tuple[int, ...]:
        """Positions of the arguments that the operator writes to."""
        by_name = {a.name: a for a in self.func._schema.arguments}
        chosen = [by_name[n.rstrip("_") if n not in by_name else n] for n in self.names]
        return tuple([i for i, a in enumerate(chosen) if a.alias_info is not None and a.alias_info.is_write])

    def viewed(self) -> bool:
        """Whether results share memory with an argument without being it."""
        return any(r.alias_info is not None and not r.alias_info.is_write for r in self.func._schema.returns)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor among the arguments: where it stands, and its layout. `fixed`: a plain scalar, the same everywhere."""

    at: int
    item: int | None
    layout: TensorLayout
    fixed: bool = False


def make_plan(call: Call) -> tuple[Any, Plan | None]:
    """Run a call for the first time: the result, and what to do with further calls of its kind (None: ask again)."""
    from torchshard.tensor import foreach, handlers

    if (wrapped := _with_plain_wrapped(call)) is not None:
        args, kwargs = call.with_values(wrapped)
        return call.func(*args, **kwargs), None
    operands = _operands(call)
    _refuse_writes_to_severed(call, operands)
    handler = handlers.find(call.name)
    if handler is not None:
        args, kwargs = call.with_values(call.values)
        result = handler(call.func, *args, **kwargs)
        if result is not NotImplemented:
            return result, _of_arguments(call, lambda *a, **k: handler(call.func, *a, **k))
    if foreach.handles(call.name):
        result, plan = foreach.make_plan(call, operands)
    else:
        result, plan = _plan_of_one_mesh(call, operands)
    cut = sorted({o.at for o in operands if o.layout.marks & SEVERED})
    if cut and plan is not None:
        plan = guards.checked(plan, cut, call.name)
    return result, plan


def _plan_of_one_mesh(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan | None]:
    _require_one_mesh(call, operands)
    by_rule = _by_rule(call, operands)
    if by_rule is not None:
        return by_rule
    composed = decomposition(call.func)
    if composed is not None:
        plan = _of_arguments(call, composed)
        return plan(*call.values), plan
    return _by_gathering(call, operands)


# ---------------------------------------------------------------------------------------------------- the arguments


def _operands(call: Call) -> list[Operand]:
    mesh_layout = next(
        x._spec
        for part, value in zip(call.parts, call.values, strict=True)
        for x in (value if part == "tensors" and value is not None else [value])
        if type(x) is DTensor
    )
    found = []
    for at, (part, value) in enumerate(zip(call.parts, call.values, strict=True)):
        if part == "tensors" and value is not None:
            items: list[tuple[int | None, Any]] = list(enumerate(value))
        elif part == "tensor":
            items = [(None, value)]
        else:
            continue
        for item, x in items:
            if type(x) is DTensor:
                found.append(Operand(at, item, x._spec))
            elif x is not None:
                dtype = x.dtype if isinstance(x, Tensor) else torch.get_default_dtype()
                scalar = layout_for(mesh_layout.mesh.replicated(), (), (), dtype)
                found.append(Operand(at, item, scalar, fixed=True))
    return found


def _with_plain_wrapped(call: Call) -> list[Any] | None:
    """The arguments with plain tensors as replicated DTensors, where that is allowed; None where there are none.

    Raises:
        UnsupportedOperatorError: a plain tensor that is no scalar; names the argument.
    """
    plain = [
        (name, x)
        for name, part, value in zip(call.names, call.parts, call.values, strict=True)
        for x in (value if part == "tensors" and value is not None else [value])
        if isinstance(x, Tensor) and type(x) is not DTensor and x.ndim
    ]
    if not plain:
        return None
    # Autograd fills the unused pieces of a split with zeros of its own making, the same on every rank.
    from_autograd = call.name == "cat.default" and in_backward()
    if not (replicates_plain_tensors() or from_autograd):
        name, x = plain[0]
        raise UnsupportedOperatorError(
            f"{call.name}: the argument {name!r} is a plain torch.Tensor among DTensors.",
            expected="DTensors only, or scalars",
            got=f"{type(x).__name__} of shape {tuple(x.shape)}",
            fix="distribute_tensor(it, mesh, placements) or DTensor.from_local(it, mesh, placements); or, if it is the"
            " same on every rank, with torchshard.implicit_replication(): ...",
        )
    mesh = next(o.layout for o in _operands(call) if not o.fixed).mesh

    def wrapped(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [wrapped(item) for item in x]
        if isinstance(x, Tensor) and type(x) is not DTensor and x.ndim:
            return wrap(x, layout_for(mesh.replicated(), tuple(x.shape), x.stride(), x.dtype))
        return x

    return [wrapped(x) for x in call.values]


def _require_one_mesh(call: Call, operands: Sequence[Operand]) -> None:
    first = operands[0].layout
    for operand in operands:
        if operand.layout.mesh is not first.mesh:
            shown = [f"argument {call.names[o.at]}: {o.layout}" for o in (operands[0], operand)]
            raise ShardingError(
                f"{call.name}: the arguments live on different meshes.",
                expected="one mesh",
                got="\n".join(shown),
                fix=f"bring both to one: distribute_tensor({call.names[operand.at]}.full_tensor(), mesh, placements)",
            )


def _refuse_writes_to_severed(call: Call, operands: Sequence[Operand]) -> None:
    written = call.written()
    for operand in operands:
        if operand.at in written and operand.layout.marks & SEVERED:
            value = call.values[operand.at]
            raise guards.refuse_write(value if operand.item is None else value[operand.item], call.name)


def _of_arguments(call: Call, function: Callable[..., Any]) -> Plan:
    """A plan that passes its arguments on to a function of DTensors."""
    count, keywords = call.positional, call.names[call.positional :]

    def plan(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(keywords, values[count:], strict=True)))

    return plan


# --------------------------------------------------------------------------------------------------------- by rule


def _by_rule(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan | None] | None:
    """The call run by its rule; None where there is none, or none for these arguments."""
    rule = find(call.name)
    if rule is None:
        return None
    layouts = [o.layout for o in operands]
    made, options = rule.made(*call.with_values(_with_layouts(call, operands)))
    bound = bind_rule(parse(made.line), [layout.shape for layout in layouts], made.sizes)
    if bound is None:
        _run_on_meta(call)  # raises what eager torch raises for these shapes
        return None
    written = call.written()
    fixed: dict[int, int | None] = {
        k: 0 if o.at in written else None for k, o in enumerate(operands) if o.fixed or o.at in written
    }
    lifted = lift(bound, options, layouts, fixed)
    if lifted is None:
        return None
    targets = [layout.to(sharding) for layout, sharding in zip(layouts, lifted.operands, strict=True)]
    if call.name == "view.default":
        _run_on_meta(call)  # a view that eager torch refuses
    run = _Run(call, operands, made, targets)
    return run.finish(lambda k, local: bound.result_shape(k, tuple(local.shape)), lifted.results)


def _with_layouts(call: Call, operands: Sequence[Operand]) -> list[Any]:
    values = [list(v) if p == "tensors" and v is not None else v for p, v in zip(call.parts, call.values, strict=True)]
    for o in operands:
        if o.item is None:
            values[o.at] = o.layout
        else:
            values[o.at][o.item] = o.layout
    return values


def _by_gathering(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan | None]:
    """The call run with every operand whole on every rank."""
    from torchshard.tensor import handlers

    handlers.refuse_ungatherable(call)
    if call.name not in handlers.QUIET:
        say_replicated(call.name, "no rule for these operands")
    if call.written():
        return _round_trip(call, operands)
    whole = operands[0].layout.mesh.replicated()
    targets = [o.layout.to(whole) for o in operands]
    run = _Run(call, operands, Made(""), targets)
    result, plan = run.finish(lambda k, local: tuple(local.shape), None)
    return result, _said_again(call, plan)


def _said_again(call: Call, plan: Plan | None) -> Plan | None:
    """The plan, asking again what the user wants of operators without a rule."""
    from torchshard.tensor import handlers

    if plan is None or call.name in handlers.QUIET:
        return plan
    kept = plan

    def run(*values: Any) -> Any:
        say_replicated(call.name, "no rule for these operands")
        return kept(*values)

    return run


def _round_trip(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan]:
    """An operator that writes, where its operand cannot be written in place: on gathered copies, then written back."""
    written = call.written()
    whole = operands[0].layout.mesh.replicated()
    pairs = [(o, o.layout.to(whole)) for o in operands]
    returns = len(call.func._schema.returns)

    def plan(*values: Any) -> Any:
        copies = [list(v) if isinstance(v, (list, tuple)) else v for v in values]
        for o, target in pairs:
            if o.fixed:
                continue
            x = values[o.at] if o.item is None else values[o.at][o.item]
            local = redistribute_local(x._local_tensor, o.layout, target)
            local = local.clone() if o.at in written else local
            if o.item is None:
                copies[o.at] = local
            else:
                copies[o.at][o.item] = local
        args, kwargs = call.with_values(copies)
        call.func(*args, **kwargs)
        for o, target in pairs:
            if o.at in written:
                x, local = (
                    (values[o.at], copies[o.at]) if o.item is None else (values[o.at][o.item], copies[o.at][o.item])
                )
                if tuple(local.shape) != tuple(o.layout.shape):
                    raise UnsupportedOperatorError(
                        f"{call.name} would change the shape of a DTensor in place.",
                        expected=f"an output of shape {tuple(local.shape)}",
                        got=f"one of shape {tuple(o.layout.shape)}",
                        fix="use the operator's variant that returns its result",
                    )
                x._local_tensor.copy_(redistribute_local(local, target, o.layout))
        outs = [values[at] for at in written[:returns]]
        return None if not returns else outs[0] if returns == 1 else tuple(outs)

    return plan(*call.values), plan


def _run_on_meta(call: Call) -> Any:
    """The operator on meta tensors of the global shapes: for its errors, and for the strides of its results."""

    def meta(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [meta(item) for item in x]
        if type(x) is DTensor:
            return torch.empty_strided(x._spec.shape, x._spec.stride, dtype=x._spec.dtype, device="meta")
        return x

    args, kwargs = call.with_values([meta(v) for v in call.values])
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    return call.func(*args, **kwargs)


class _Run:
    """The first run of a call on local tensors, from which its plan is made."""

    def __init__(self, call: Call, operands: Sequence[Operand], made: Made, targets: Sequence[TensorLayout]) -> None:
        self.call, self.operands, self.made, self.targets = call, operands, made, targets
        self.mesh = operands[0].layout.mesh
        self.moves = [o.layout.sharding is not t.sharding for o, t in zip(operands, targets, strict=True)]

    def finish(
        self, shape_of: Callable[[int, Tensor], tuple[int, ...]], results: Sequence[Sharding] | None
    ) -> tuple[Any, Plan | None]:
        """Run, wrap, and make the plan.

        Args:
            shape_of: global shape of a result, from its number and its local tensor.
            results: sharding of each result; all whole where None.
        """
        call = self.call
        arguments, bound = self._arguments(shape_of, results)
        function = self.made.local or local_callable(call.func)
        written = call.written()
        if written:
            returns = len(call.func._schema.returns)
            plan = plan_maker(arguments, call.positional, f"argument:{written[0]}" if returns else "none")
            made = plan(function, new, DTensor, (), **bound)
            return made(*call.values), made
        local = plan_maker(arguments, call.positional, "raw")(function, new, DTensor, (), **bound)(*call.values)
        if not isinstance(local, (Tensor, tuple, list)):
            return local, plan_maker(arguments, call.positional, "raw")(function, new, DTensor, (), **bound)
        parts = [local] if isinstance(local, Tensor) else list(local)
        outs = [None if t is None else self._layout(k, t, shape_of, results) for k, t in enumerate(parts)]
        return self._wrapped(local, parts, outs, arguments, bound, function)

    def _arguments(
        self, shape_of: Callable[[int, Tensor], tuple[int, ...]], results: Sequence[Sharding] | None
    ) -> tuple[tuple[Argument, ...], dict[str, Any]]:
        call, bound = self.call, dict[str, Any]()
        how: list[How] = ["given"] * len(call.names)
        lists: dict[int, dict[int, tuple[TensorLayout, TensorLayout]]] = {}
        for o, target, moves in zip(self.operands, self.targets, self.moves, strict=True):
            name = call.names[o.at]
            if o.item is not None:
                lists.setdefault(o.at, {})[o.item] = o.layout, target
            elif not o.fixed:
                how[o.at] = "move" if moves else "local"
                if moves:
                    bound[f"move_{name}"] = _mover(o.layout, target)
        for at, pairs in lists.items():
            still = all(a.sharding is b.sharding for a, b in pairs.values())
            how[at] = "locals" if still else "moves"
            if not still:
                bound[f"move_{call.names[at]}"] = _list_mover(pairs)
        self._constants(how, bound, results)
        return tuple(map(Argument, call.names, how)), bound

    def _constants(self, how: list[How], bound: dict[str, Any], results: Sequence[Sharding] | None) -> None:
        """Arguments that are sizes of the result become those of this rank's part."""
        made, call = self.made, self.call
        if made.local_size is None or results is None:
            return
        size = list(call.values[made.local_size])
        global_size = self._known_size(size)
        part = layout_for(results[0], global_size, contiguous_stride(global_size), torch.float32).local_shape
        how[made.local_size] = "constant"
        bound[f"constant_{call.names[made.local_size]}"] = part
        if made.local_stride is not None:
            how[made.local_stride] = "constant"
            stride = global_stride(part, call.values[made.local_stride])
            bound[f"constant_{call.names[made.local_stride]}"] = stride

    def _known_size(self, size: Sequence[int]) -> tuple[int, ...]:
        rule = bind_rule(parse(self.made.line), [o.layout.shape for o in self.operands], self.made.sizes)
        assert rule is not None, f"{self.call.name}: a rule that was bound before"
        return rule.known_shape(0)

    def _layout(
        self,
        k: int,
        local: Tensor,
        shape_of: Callable[[int, Tensor], tuple[int, ...]],
        results: Sequence[Sharding] | None,
    ) -> TensorLayout:
        """The layout of result k; checked against its local tensor, which a wrong rule would contradict."""
        sharding = self.mesh.replicated() if results is None else results[k]
        shape = shape_of(k, local)
        last = sharding.box(shape, [n - 1 for n in self.mesh.shape]).size
        hidden = any(n <= 1 < whole for n, whole in zip(last, shape, strict=True))
        stride = self._meta_stride(k, shape) if hidden else global_stride(shape, local.stride())
        layout = layout_for(sharding, shape, stride, local.dtype)
        assert self.mesh.coordinate is None or tuple(local.shape) == tuple(layout.local_shape), (
            f"{self.call.name}: the rule {self.made.line!r} gives {layout}, part {tuple(layout.local_shape)}, "
            f"but the operator gave {tuple(local.shape)}"
        )
        kept = any(o.layout.marks & ASSUMED and not moves for o, moves in zip(self.operands, self.moves, strict=True))
        return layout.marked(ASSUMED) if kept and sharding.splits else layout

    def _meta_stride(self, k: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Strides from a run on meta tensors: a piece of length 0 or 1 does not show them, and they must not depend on
        the rank, because autograd formulas branch on them.
        """
        try:
            results = _run_on_meta(self.call)
        except NotImplementedError:
            return contiguous_stride(shape)
        result = results[k] if isinstance(results, (list, tuple)) else results
        return tuple(result.stride())

    def _wrapped(
        self,
        local: Any,
        parts: Sequence[Tensor | None],
        outs: Sequence[TensorLayout | None],
        arguments: tuple[Argument, ...],
        bound: dict[str, Any],
        function: Callable[..., Any],
    ) -> tuple[Any, Plan | None]:
        call = self.call
        base = self.operands[0].at
        is_list = not isinstance(local, Tensor) and len(call.func._schema.returns) == 1
        viewed = call.viewed()
        cut = viewed and (self.moves[0] or bool(self.operands[0].layout.marks & SEVERED))
        if isinstance(local, Tensor):
            kind = f"view:{base}" if call.name == "view.default" and not cut else "tensor"
        else:
            kind = "list" if is_list else "tuple:" + "".join("0" if t is None else "1" for t in parts)
        extra: dict[str, Any] = {}
        if kind.startswith("view"):
            extra = {"copying": torch.reshape, "severed": guards.severed}
        plan = plan_maker(arguments, call.positional, kind)(function, new, DTensor, tuple(outs), **bound, **extra)
        wrapped = [None if t is None else wrap(t, out) for t, out in zip(parts, outs, strict=True)]  # type: ignore[arg-type]
        if cut:
            plan = guards.severing(plan, base)
            for view in wrapped:
                if view is not None:
                    guards.severed(view, call.values[base])
        result = wrapped[0] if isinstance(local, Tensor) else wrapped if is_list else tuple(wrapped)
        return result, plan if self._lasts(outs) else None

    def _lasts(self, outs: Sequence[TensorLayout | None]) -> bool:
        """Whether a plan may be kept: not where the dtype of a result came from torch.get_default_dtype()."""
        dtypes = [o.layout.dtype for o in self.operands if not o.fixed]
        floats_in = any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
        floats_out = any(out is not None and out.dtype.is_floating_point for out in outs)
        return floats_in or not floats_out


def _mover(source: TensorLayout, target: TensorLayout) -> Callable[[Tensor], Tensor]:
    return lambda x: redistribute_local(x, source, target)


def _list_mover(pairs: dict[int, tuple[TensorLayout, TensorLayout]]) -> Callable[[Sequence[Any]], list[Any]]:
    def move(items: Sequence[Any]) -> list[Any]:
        return [
            redistribute_local(x._local_tensor, *pairs[k]) if type(x) is DTensor else x for k, x in enumerate(items)
        ]

    return move


__all__ = ["Call", "Operand", "Plan", "make_plan", "moved", "operator_name"]
