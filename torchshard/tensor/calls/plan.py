"""How one call of an operator on certain layouts is run: found once, by rule, decomposition or gathering, then kept.

rule             lifted to the mesh: move the operands that the cheapest way wants elsewhere, run on local tensors
handler          a function of DTensors, for operators that must communicate inside
decomposition    where ATen itself composes the operator of others
gathering        every operand whole on every rank; said once
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import decomposition, is_traced, returning, schema, takes_plain_for_replicated
from torchshard.rules.bind import bind as bind_rule
from torchshard.rules.lift import lift
from torchshard.rules.notation import parse
from torchshard.rules.rule import Made
from torchshard.tensor import handlers
from torchshard.tensor.calls import foreach, guards, linearity, list_numbers
from torchshard.tensor.calls.call import (
    Call,
    Operand,
    operands_of,
    refuse_as_eager,
    require_one_mesh,
    rule_of,
    run_on_meta,
)
from torchshard.tensor.calls.first_run import FirstRun, Plan
from torchshard.tensor.calls.plain import replica, with_plain_wrapped
from torchshard.tensor.dtensor import dtensors_in
from torchshard.tensor.gradients import other_kind
from torchshard.tensor.handlers import one_hot, random
from torchshard.tensor.handlers.parts import EagerAlone, ForKind
from torchshard.tensor.layout import SEVERED, TensorLayout
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.modes import implicit_replication, say_replicated
from torchshard.tensor.moving.redistribute import redistribute_local
from torchshard.tensor.observing import tell
from torchshard.unsupported import unsupported

_ASK_FOR_STRIDES = "view.default", "view.dtype", "view_as_complex.default"
"""Views that eager torch refuses by the strides of the whole tensor, which those of a piece may not show."""


def make_plan(call: Call) -> tuple[Any, Plan | None]:
    """Run a call for the first time: the result, and what to do with further calls of its kind (None: ask again)."""
    result, plan = _made(call)
    return result, other_kind.expecting(plan, call)


def _made(call: Call) -> tuple[Any, Plan | None]:
    handlers.refuse_wrappers(call)
    if (result := list_numbers.by_numbers_of_tensor(call)) is not NotImplemented:
        return result, None
    if (parted := foreach.apart(call)) is not None:
        return parted
    if (wrapped := with_plain_wrapped(call)) is not None:
        return _of_wrapped(call, wrapped), _wrapping(call.without_values())
    operands = operands_of(call)
    cut = sorted({o.at for o in operands if o.layout.marks & SEVERED})
    if not cut:
        return _plan_of_operands(call, operands)
    made: list[Plan | None] = []

    def first(*_: Any) -> Any:
        result, plan = _plan_of_operands(call, operands)
        made.append(plan)
        return result

    result = guards.guarded(first, cut, call)(*call.values)
    kept = made[0] if made else None  # none where an operator of lists has gone through them item by item
    return result, None if kept is None else guards.guarded(kept, cut, call)


def _of_wrapped(call: Call, wrapped: Sequence[Any]) -> Any:
    """What a call gives, with these DTensors in place of the plain tensors among its arguments."""
    counted = takes_plain_for_replicated() and one_hot.is_one_hot(call.name, call.values)
    args, kwargs = call.with_values(wrapped)
    made = call.func(*args, **kwargs)
    return made.contiguous() if counted else made  # one_hot lies so, whatever the order of its classes


def _wrapping(bare: Call) -> Plan:
    """The plan of calls with plain tensors among their arguments: whether these are allowed is asked each time."""

    def plan(*values: Any) -> Any:
        call = bare.given(values)
        return _of_wrapped(call, with_plain_wrapped(call) or values)

    return plan


def _plan_of_operands(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan | None]:
    found = handlers.find(call.name)
    if found is not None and call.name not in handlers.SEVERAL_MESHES:
        require_one_mesh(call, operands)
    args, kwargs = call.with_values(call.values)
    handler = found.choose(call.func, *args, **kwargs) if isinstance(found, ForKind) else found
    if handler is not None:
        result = handler(call.func, *args, **kwargs)
        if result is not NotImplemented:
            tell("handler")
            return result, _handled(call, partial(handler, call.func))
        if isinstance(handler, EagerAlone) and handler.leaves(call.values):
            return _plan_without_handler(call, operands)[0], None  # eager calls have the handler
    return _plan_without_handler(call, operands)


def _handled(call: Call, handler: Callable[..., Any]) -> Plan:
    """The plan of a handler; where that leaves a call alone after all, as in a trace, it is planned anew."""
    kept, call = _of_arguments(call, handler), call.without_values()

    def plan(*values: Any) -> Any:
        result = kept(*values)
        return make_plan(call.given(values))[0] if result is NotImplemented else result

    return plan


def _plan_without_handler(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan | None]:
    if foreach.handles(call.name):
        tell("list")
        return linearity.by_numbers(call, linearity.of_lists(call.name), operands, foreach.make_plan)
    return _plan_of_one_mesh(call, operands)


def _plan_of_one_mesh(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan | None]:
    require_one_mesh(call, operands)
    rule = rule_of(call.func)
    if rule is None:
        result, plan = _plan_of_these_numbers(call, operands)
    else:
        result, plan = linearity.by_numbers(call, rule.options, operands, _plan_of_these_numbers)
    return result, guards.filling(plan, call)


def _plan_of_these_numbers(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan | None]:
    by_rule = _by_rule(call, operands)
    if by_rule is not None:
        return by_rule
    if (composed := decomposition(call.func)) is not None:
        tell("decomposition")
        by_parts = _of_arguments(call, _closed(composed))
        return by_parts(*call.values), by_parts
    return _by_returning(call) or _by_gathering(call, operands)


def _by_returning(call: Call) -> tuple[Any, Plan] | None:
    """An operator that writes to outputs by the one that returns them: what it makes is copied there.

    None where there is none, or outputs of other shapes or dtypes are given, on which kernels may decide otherwise.
    """
    written, other = call.written(), returning(call.func)
    if other is None or torch.Tag.nondeterministic_seeded in call.func.tags:
        return None
    rest = [at for at in range(len(call.names)) if at not in written]
    names = [call.names[at] for at in rest[call.positional :]]

    def made(values: Sequence[Any]) -> Sequence[Any]:
        given = [values[at] for at in rest]
        found = other(*given[: call.positional], **dict(zip(names, given[call.positional :], strict=True)))
        return [found] if isinstance(found, Tensor) else found

    def written_to(values: Sequence[Any], found: Sequence[Any]) -> Any:
        outs = tuple([values[at].copy_(x) for at, x in zip(written, found, strict=True)])
        return outs[0] if len(outs) == 1 else outs

    values = call.values
    found = made(values)
    if any(x.shape != values[at].shape or x.dtype != values[at].dtype for at, x in zip(written, found, strict=True)):
        return None
    call = call.without_values()
    return written_to(values, found), lambda *values: written_to(values, made(values))


def _closed(composed: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition, all of whose tensors are DTensors: plain ones among its parts are of its own making, and so the
    same on every rank.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with implicit_replication():
            return composed(*args, **kwargs)

    return run


def _of_arguments(call: Call, function: Callable[..., Any]) -> Plan:
    """A plan that passes its arguments on to a function of DTensors."""
    count, keywords = call.positional, call.names[call.positional :]
    if not keywords:
        return function

    def plan(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(keywords, values[count:], strict=True)))

    return plan


# --------------------------------------------------------------------------------------------------------- by rule


def _by_rule(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan | None] | None:
    """The call run by its rule; None where there is none, or none for these arguments."""
    rule = rule_of(call.func)
    if rule is None:
        return None
    layouts = [o.layout for o in operands]
    try:
        ruled = rule.made(*call.with_values(_with_layouts(call, operands)))
    except (ArithmeticError, LookupError, ValueError):  # it reckons with dims that are not there
        refuse_as_eager(call)
        raise
    if ruled is None:
        return None
    made, options = ruled[0], linearity.for_call(call, ruled[1], operands)
    bound = bind_rule(parse(made.line), [layout.shape for layout in layouts], made.sizes)
    if bound is None:
        refuse_as_eager(call)
        return None
    written = call.written()
    if written == (0,) and not bound.may_have(0, layouts[0].shape):
        return None  # it would grow, as addbmm_ lets it
    fixed: dict[int, int | None] = {
        k: 0 if o.at in written else None for k, o in enumerate(operands) if o.fixed or o.at in written
    }
    lifted = lift(bound, options, layouts, fixed)
    if lifted is None:
        return None
    targets = [layout.to(sharding) for layout, sharding in zip(layouts, lifted.operands, strict=True)]
    if call.name in _ASK_FOR_STRIDES:
        run_on_meta(call)  # a view that eager torch refuses
    tell("rule", made.line, [(call.names[o.at], o.layout, t) for o, t in zip(operands, targets, strict=True)])
    run = FirstRun(call, operands, made, targets, bound.tells_shapes())
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
    handlers.refuse_ungatherable(call)
    if call.name not in handlers.QUIET:
        say_replicated(call.name, "no rule for these operands")
    if torch.Tag.nondeterministic_seeded in call.func.tags:
        return _by_gathering_in_step(call, operands)
    return _gathered(call, operands)


def _by_gathering_in_step(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan | None]:
    """A random operator, on whole operands: every rank draws the same after taking the first rank's generator."""
    mesh = operands[0].layout.mesh
    assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
    device = next(dtensors_in(call.values)).device
    given = call.names.index("generator") if "generator" in call.names else None
    kind = call.without_values()

    def agree(values: Sequence[Any]) -> None:
        if not kind.draws(values):
            return
        _refuse_to_draw_in_traces(kind.name, values)
        random.agree_on_generator(mesh, device, None if given is None else values[given])

    agree(call.values)
    result, plan = _gathered(call, operands)
    if plan is None:
        return result, None
    drawing = plan

    def run(*values: Any) -> Any:
        agree(values)
        return drawing(*values)

    return result, run


def _refuse_to_draw_in_traces(name: str, values: Sequence[Any]) -> None:
    if is_traced(next(dtensors_in(values))._local_tensor):
        raise unsupported(
            f"{name} draws random numbers as no compiled region can: every rank after the first one's generator.",
            expected="rand, randn, randint, bernoulli, dropout, normal_, uniform_ and their kin",
            got=name,
            fix="call it outside of the region",
        )


def _gathered(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan | None]:
    whole = operands[0].layout.mesh.replicated()
    targets = [o.layout.to(whole) for o in operands]
    tell("gathered", "", [(call.names[o.at], o.layout, t) for o, t in zip(operands, targets, strict=True)])
    if call.written() and whole.mesh.coordinate is not None:
        return _round_trip(call, operands)
    run = FirstRun(call, operands, Made(""), targets)
    result, plan = run.finish(lambda k, local: tuple(local.shape), None)
    return result, _said_again(call, plan)


def _said_again(call: Call, plan: Plan | None) -> Plan | None:
    """The plan, asking again what the user wants of operators without a rule."""
    if plan is None or call.name in handlers.QUIET:
        return plan
    name, kept = call.name, plan

    def run(*values: Any) -> Any:
        say_replicated(name, "no rule for these operands")
        return kept(*values)

    return run


def _round_trip(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan]:
    """An operator that writes, where its operand cannot be written in place: on gathered copies, then written back."""
    given, call, written = call.values, call.without_values(), call.written()
    whole = operands[0].layout.mesh.replicated()
    pairs = [(o, o.layout.to(whole)) for o in operands if not o.fixed]  # a plain scalar is written to itself
    # What is returned: an argument that was written, or something new.
    returns = [r.alias_info is not None and r.alias_info.is_write for r in schema(call.func).returns]

    def plan(*values: Any) -> Any:
        copies: list[Any] = [list(v) if isinstance(v, (list, tuple)) else v for v in values]
        for o, target in pairs:
            copy: Any = redistribute_local(_item(values, o)._local_tensor, o.layout, target)
            copy = copy.clone() if o.at in written else copy
            if o.item is None:
                copies[o.at] = copy
            else:
                copies[o.at][o.item] = copy
        args, kwargs = call.with_values(copies)
        made = call.func(*args, **kwargs)
        for o, target in pairs:
            if o.at in written:
                _write_back(call, o, _item(values, o), _item(copies, o), target)
        arguments = iter([values[at] for at in written])
        parts = made if isinstance(made, (list, tuple)) else [made]
        outs = [
            next(arguments) if back else replica(new, whole.mesh) if isinstance(new, Tensor) else new
            for back, new in zip(returns, parts, strict=False)
        ]
        return None if not returns else outs[0] if len(returns) == 1 else tuple(outs)

    return plan(*given), plan


def _item(values: Sequence[Any], o: Operand) -> Any:
    return values[o.at] if o.item is None else values[o.at][o.item]


def _write_back(call: Call, o: Operand, x: Any, local: Tensor, target: TensorLayout) -> None:
    """To the DTensor `x` from the gathered copy of it that the operator has written to."""
    if tuple(local.shape) != tuple(o.layout.shape):
        raise unsupported(
            f"{call.name} would change the shape of a DTensor in place.",
            expected=f"an output of shape {tuple(local.shape)}",
            got=f"one of shape {tuple(o.layout.shape)}",
            fix="use the operator's variant that returns its result",
        )
    guards.write_back(x, local, target)
