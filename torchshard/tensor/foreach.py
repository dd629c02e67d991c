"""Operators on lists of tensors (optimizers): one plan for the whole list."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchshard._torch import local_callable
from torchshard.errors import UnsupportedOperatorError
from torchshard.layout.layout import Sharding
from torchshard.tensor.codegen import Argument, How, plan_maker
from torchshard.tensor.dtensor import DTensor, new, wrap
from torchshard.tensor.layout import TensorLayout, layout_for
from torchshard.tensor.redistribute import redistribute_local

if TYPE_CHECKING:
    from torchshard.tensor.plan import Call, Operand, Plan

_FAMILIES = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")


def handles(name: str) -> bool:
    """Whether an operator works element by element on lists of tensors, item with item."""
    return name.startswith(_FAMILIES)


def make_plan(call: "Call", operands: Sequence["Operand"]) -> tuple[Any, "Plan"]:
    """Run the call, with all tensors of one place in the lists sharded as the first list has it there.

    Raises:
        UnsupportedOperatorError: a list that is written to holds a Partial tensor.
    """
    written = call.written()
    goals = _goals(call, operands, written)
    how: list[How] = ["given"] * len(call.names)
    bound: dict[str, Any] = {}
    pairs: dict[int, dict[int, tuple[TensorLayout, TensorLayout]]] = {}
    for o in operands:
        if o.fixed:
            continue
        alone = o.item is None or o.layout.shape != goals[o.item][0].shape
        sharding = o.layout.mesh.replicated() if alone else goals[o.item or 0][1]
        if o.item is None:
            how[o.at] = "local" if o.layout.sharding is sharding else "move"
            bound[f"move_{call.names[o.at]}"] = _mover(o.layout, o.layout.to(sharding))
        else:
            pairs.setdefault(o.at, {})[o.item] = o.layout, o.layout.to(sharding)
    for at, by_item in pairs.items():
        still = all(a.sharding is b.sharding for a, b in by_item.values())
        how[at] = "locals" if still else "moves"
        bound[f"move_{call.names[at]}"] = _list_mover(by_item)
    arguments = tuple(map(Argument, call.names, how))
    needed = {
        k: v for k, v in bound.items() if any(k == f"move_{a.name}" for a in arguments if a.how in ("move", "moves"))
    }
    function = local_callable(call.func)
    if written:
        plan = plan_maker(arguments, call.positional, "none")(function, new, DTensor, (), **needed)
        return plan(*call.values), plan
    raw = plan_maker(arguments, call.positional, "raw")(function, new, DTensor, (), **needed)
    locals_ = raw(*call.values)
    outs = tuple(
        [layout_for(s, layout.shape, layout.stride, t.dtype) for (layout, s), t in zip(goals, locals_, strict=True)]
    )
    plan = plan_maker(arguments, call.positional, "list")(function, new, DTensor, outs, **needed)
    return [wrap(t, out) for t, out in zip(locals_, outs, strict=True)], plan


def _goals(call: "Call", operands: Sequence["Operand"], written: Sequence[int]) -> list[tuple[TensorLayout, Sharding]]:
    """For each place in the lists: the layout in the first list, and the sharding that all tensors there get."""
    first = next(o.at for o in operands if o.item is not None)
    goals = []
    for o in operands:
        if o.at != first:
            continue
        if o.layout.sharding.partial and first in written:
            raise UnsupportedOperatorError(
                f"{call.name} writes to a list in which tensor {o.item} is Partial.",
                expected="tensors without Partial placements",
                got=o.layout,
                fix="redistribute it to Replicate() or Shard(dim) first",
            )
        goals.append((o.layout, o.layout.sharding.without_partial()))
    return goals


def _mover(source: TensorLayout, target: TensorLayout) -> Any:
    return lambda x: redistribute_local(x, source, target)


def _list_mover(pairs: dict[int, tuple[TensorLayout, TensorLayout]]) -> Any:
    return lambda items: [
        redistribute_local(x._local_tensor, *pairs[k]) if type(x) is DTensor else x for k, x in enumerate(items)
    ]
