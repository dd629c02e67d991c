"""Operators on lists of tensors (optimizers): one plan for the whole list."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch.autograd.graph import increment_version

from torchshard._torch import memory_of
from torchshard.layout.layout import Sharding
from torchshard.layout.placements import Partial, R
from torchshard.rules.terms import narrowed
from torchshard.tensor import handlers
from torchshard.tensor.calls import linearity, outside
from torchshard.tensor.calls.call import Call, Operand, lasting, refuse_as_eager, require_one_mesh, run_on_meta
from torchshard.tensor.calls.codegen import Argument, How, noting_alike, plan_maker
from torchshard.tensor.calls.first_run import Plan, list_mover, mover, way_of_list
from torchshard.tensor.calls.guards import refuse_unwritable, write_back
from torchshard.tensor.calls.list_numbers import local_function
from torchshard.tensor.dtensor import DTensor, new, wrap
from torchshard.tensor.layout import TensorLayout, kept_stride, layout_for
from torchshard.tensor.moving.redistribute import redistribute_local

# Number of a tensor in a list -> the layout that it has, and the one that it is to have.
_Pairs = dict[int, tuple[TensorLayout, TensorLayout]]

_FAMILIES = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")


def handles(name: str) -> bool:
    """Whether an operator works element by element on lists of tensors, item with item."""
    return name.startswith(_FAMILIES)


def apart(call: Call) -> tuple[Any, Plan] | None:
    """Run a call some of whose items are plain in all lists, for these and for the others; None where it has none.

    An item has nothing to do with the next one, and these are what they are to the operator of one tensor: plain.
    """
    lists = [value for part, value in zip(call.parts, call.values, strict=True) if part == "tensors" and value]
    by_item = handles(call.name) and handlers.find(call.name) is None  # handlers tell of norms: terms of one number
    if not (by_item or call.name.startswith("_amp_foreach_")) or len({len(value) for value in lists}) != 1:
        return None
    own = [any(type(x) is DTensor for x in item) for item in zip(*lists, strict=True)]
    if all(own) or not any(own):  # none: what goes with all items is a DTensor
        return None
    plain, bare, written = [not its for its in own], call.without_values(), call.written()

    def plan(*values: Any) -> Any:
        made = [bare.for_items(values, chosen) for chosen in (plain, own)]
        _count([list(compress(v, plain)) if isinstance(v, (list, tuple)) else v for v in values], written)
        if made[0] is None:
            return None
        results = iter(made[0]), iter(made[1])
        return [next(results[its]) for its in own]

    return plan(*call.values), plan


def make_plan(call: Call, operands: Sequence[Operand]) -> tuple[Any, Plan | None]:
    """Run the call, with all tensors of one place in the lists sharded as the first DTensor there.

    Raises:
        ShardingError: tensors of one place, or one that goes with all, live on different meshes.
        UnsupportedOperatorError: a list that is written to holds a Partial tensor that cannot take its value back.
    """
    together: dict[int | None, list[Operand]] = {}
    for o in operands:
        if not o.fixed:  # a plain scalar goes with any mesh
            together.setdefault(o.item, []).append(o)
    with_all = together.pop(None, [])
    for item in together.values():
        require_one_mesh(call, item + with_all)
    first = next(o.at for o in operands if o.item is not None)
    shapes = _shapes(call, first, operands)
    result, plan = _broadcasting(call, first, shapes) if shapes else _made(call, first, operands)
    if not (written := call.written()):
        of_items = [([o for o in operands if o.item in (k, None)], [x._spec]) for k, x in enumerate(result)]
        return result, lasting(plan, call, of_items)

    def counted(*values: Any) -> Any:
        result = plan(*values)
        _count(values, written)
        return result

    _count(call.values, written)
    return result, counted


def _shapes(call: Call, first: int, operands: Sequence[Operand]) -> dict[int, tuple[int, ...]]:
    """For each item the shape that its tensors, numbers apart, broadcast to; empty where all items have one shape.

    Raises:
        RuntimeError: what the operator says of shapes that do not, and of lists of several lengths.
    """
    lengths = {len(value) for part, value in zip(call.parts, call.values, strict=True) if part == "tensors"}
    if len(lengths) > 1 and call.name.startswith("_foreach_"):
        refuse_as_eager(call)
    found: dict[int, list[tuple[int, ...]]] = {}
    for o in operands:
        own = not o.fixed if o.at == first else o.layout.shape  # what a plain scalar is written to keeps its shape
        if o.item is not None and call.name.startswith("_foreach_") and (own or o.at in call.written()):
            found.setdefault(o.item, []).append(o.layout.shape)
    if all(shape == shapes[0] for shapes in found.values() for shape in shapes):  # symbolic lengths have no hash
        return {}
    refuse_as_eager(call)
    return {k: tuple(torch.broadcast_shapes(*shapes)) for k, shapes in found.items()}


def _broadcasting(call: Call, first: int, shapes: Mapping[int, tuple[int, ...]]) -> tuple[Any, Plan]:
    """Run the call on tensors of the shapes that their items broadcast to."""
    bare = call.without_values()

    def expanded(at: int, items: Any) -> Any:
        if not isinstance(items, (list, tuple)):
            return items
        return [
            x.expand(shapes[k]) if isinstance(x, DTensor) and (x.ndim or at == first) and x.shape != shapes[k] else x
            for k, x in enumerate(items)
        ]

    def plan(*values: Any) -> Any:
        args, kwargs = bare.with_values([expanded(at, value) for at, value in enumerate(values)])
        return bare.func(*args, **kwargs)

    return plan(*call.values), plan


def _count(values: Sequence[Any], written: Iterable[int]) -> None:
    """Move on the versions of what was written: autograd does it for single tensors, not for those in lists."""
    for at in written:
        if isinstance(values[at], (list, tuple)):
            increment_version(values[at])  # passes over inference tensors, which have none


def _made(call: Call, first: int, operands: Sequence[Operand]) -> tuple[Any, Plan]:
    written = call.written()
    items = _leading(first, operands)
    together = _added_together(call, first, items, operands)
    goals = _goals(call, first, items, together)
    if any(layout.mesh.coordinate is None for layout, _ in goals):
        return outside.for_lists(call, _away(call, items, goals))
    how: list[How] = ["given"] * len(call.names)
    bound: dict[str, Any] = {}
    pairs: dict[int, _Pairs] = {}
    for o in operands:
        if o.fixed:
            continue
        alone = o.item is None or o.layout.shape != goals[o.item][0].shape
        sharding = o.layout.mesh.replicated() if alone else goals[o.item or 0][1]
        if o.at != first and (alone or o.item not in together):
            sharding = sharding.without_partial()
        if o.item is None:
            how[o.at] = "local" if o.layout.sharding is sharding else "move"
            bound[f"move_{call.names[o.at]}"] = mover(o.layout, o.layout.to(sharding))
        else:
            pairs.setdefault(o.at, {})[o.item] = o.layout, o.layout.to(sharding)
    moved: dict[int, _Pairs] = {}
    for at, by_item in pairs.items():
        how[at], bound[f"move_{call.names[at]}"] = "locals", list_mover(by_item)
        if away := {k: (a, b) for k, (a, b) in by_item.items() if a.sharding is not b.sharding}:
            moved[at], how[at] = away, "given" if at in written else "moves"  # the given ones: see _giving_back
    ways = {call.names[at]: way_of_list(by_item) for at, by_item in pairs.items()}
    arguments = noting_alike(list(map(Argument, call.names, how)), ways)
    needed = {
        k: v for k, v in bound.items() if any(k == f"move_{a.name}" for a in arguments if a.how in ("move", "moves"))
    }
    function = local_function(call, frozenset([o.layout.dtype for o in operands]))
    if written:
        plan = plan_maker(arguments, call.positional, "none")(function, new, DTensor, (), **needed)
        if back := {at: by_item for at, by_item in moved.items() if at in written}:
            plan = _giving_back(plan, back)
        plan = _in_turn(plan, call, moved) if moved else plan
        return plan(*call.values), plan
    raw = plan_maker(arguments, call.positional, "raw")(function, new, DTensor, (), **needed)
    locals_ = raw(*call.values)
    outs = tuple(
        [
            layout_for(s, layout.shape, kept_stride(layout.shape, layout.stride), t.dtype)
            for (layout, s), t in zip(goals, locals_, strict=True)
        ]
    )
    plan = plan_maker(arguments, call.positional, "list")(function, new, DTensor, outs, **needed)
    return [wrap(t, out) for t, out in zip(locals_, outs, strict=True)], plan


def _leading(first: int, operands: Sequence[Operand]) -> list[Operand]:
    """For each item the tensor that decides about it: the first list's, or the next where that is a plain scalar."""
    found = {o.item: o for o in operands if o.at == first}
    for o in operands:
        if o.item is not None and found[o.item].fixed and not o.fixed:
            found[o.item] = o
    return list(found.values())


def _away(
    call: Call, items: Sequence[Operand], goals: Sequence[tuple[TensorLayout, Sharding]]
) -> list[TensorLayout | None]:
    """For each item, the layout of its result (its own, where it is written to) if this rank is outside of its mesh."""
    dtypes = [] if call.written() else outside.dtypes_of(call, items[0])
    found: list[TensorLayout | None] = []
    for k, (layout, sharding) in enumerate(goals):
        dtype = dtypes[k] if dtypes else layout.dtype
        made = layout_for(sharding, layout.shape, kept_stride(layout.shape, layout.stride), dtype)
        found.append(made if layout.mesh.coordinate is None else None)
    return found


def _giving_back(plan: Plan, back: Mapping[int, _Pairs]) -> Plan:
    """A plan that writes to tensors which had to be moved: to the moved copies, which then are moved back."""

    def run(*values: Any) -> None:
        for at, by_item in back.items():
            for k in by_item:
                refuse_unwritable(values[at][k])
        given = list(values)
        for at, by_item in back.items():
            given[at] = [
                redistribute_local(x._local_tensor, *by_item[k]) if k in by_item else x._local_tensor
                for k, x in enumerate(values[at])
            ]
        plan(*given)
        for at, by_item in back.items():
            for k, (_, moved) in by_item.items():
                write_back(values[at][k], given[at][k], moved)

    return run


def _in_turn(plan: Plan, call: Call, moved: Mapping[int, _Pairs]) -> Plan:
    """A plan that writes, on lists some of whose tensors are moved first; item by item where one needs what was written
    before it, as a moved copy does not see what was written to its original meanwhile.
    """
    bare = call.without_values()
    lists = [at for at, value in enumerate(call.values) if isinstance(value, (list, tuple))]

    def run(*values: Any) -> None:
        memory = {
            at: [memory_of(x._local_tensor) if isinstance(x, DTensor) else None for x in values[at]] for at in lists
        }
        writes: dict[Any, tuple[int, bool]] = {}  # memory that is written to -> by which item first, whether by a copy
        for at in bare.written():
            for k, m in enumerate(memory.get(at, ())):
                writes.setdefault(m, (k, k in moved.get(at, ())))
        used = [(m, k, k in moved.get(at, ())) for at in lists for k, m in enumerate(memory[at]) if m is not None]
        after = [(*writes.get(m, (k, False)), k, by_copy) for m, k, by_copy in used]
        if any(before < k and (copied or by_copy) for before, copied, k, by_copy in after):
            bare.item_by_item(values)
        else:
            plan(*values)

    return run


def _added_together(call: Call, first: int, items: Sequence[Operand], operands: Sequence[Operand]) -> set[int]:
    """Items whose tensors are all to be terms, as the first: of an operator that is linear in all lists together.

    So momentum is added to gradients without a word sent. What is whole goes with terms only where they are written to,
    for terms that are new would have to be added up as well.
    """
    if not any(len(group) > 1 for group in linearity.of_lists(call.name).linear):
        return set()
    found = {o.item for o in items if o.at == first and not o.fixed and o.item is not None}
    for o in operands:
        leading = items[o.item or 0]
        pairs = list(zip(leading.layout.sharding.placements, o.layout.sharding.placements, strict=True))
        kept = all(b == a or (b == R and bool(call.written())) for a, b in pairs if isinstance(a, Partial))
        like = (o.layout.shape, o.layout.dtype) == (leading.layout.shape, leading.layout.dtype)
        if o.fixed or not (kept and like):
            found.discard(o.item)
    return {k for k in found if k is not None}


def _goals(
    call: Call, first: int, operands: Sequence[Operand], together: Collection[int]
) -> list[tuple[TensorLayout, Sharding]]:
    """For each item, of these operands: the layout, and the sharding that all tensors of its place get."""
    goals = []
    options = linearity.of_lists(call.name)
    terms = linearity.dtypes_of_terms(operands)
    results: list[torch.dtype] = []
    if terms and not linearity.finite_numbers(call, terms.values(), options.per)(call.values):
        options = replace(options, linear=())
    elif terms and options.linear and not call.written():
        results = [t.dtype for t in linearity.tensors_of(run_on_meta(call))]
    for o in operands:
        sharding = o.layout.sharding
        ops = {p.op for p in sharding.placements if isinstance(p, Partial)}
        # An item of the results is made of the same item of the list.
        linear = ops and narrowed(options, {0: o.layout.dtype}, [results[o.item or 0]] if results else ()).linear
        if linear and len(linear[0]) > 1 and o.item not in together:
            linear = ()
        if not (linear and o.at == first and ops <= {"sum", "avg"}):
            sharding = sharding.without_partial()
        goals.append((o.layout, sharding))
    return goals
