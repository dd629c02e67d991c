"""Operators on a rank outside of the mesh: it holds nothing, but knows the layout of every result.

So that such a rank can go through the same program as the others, and meet them again in a redistribution to another
mesh. Shapes come from a run on meta tensors, as there is no local result that could show them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from torchshard._torch import schema
from torchshard.errors import UnsupportedOperatorError
from torchshard.layout.layout import Sharding
from torchshard.tensor.calls import guards
from torchshard.tensor.calls.call import Call, Operand, lasting, run_on_meta
from torchshard.tensor.dtensor import DTensor, dtensors_in
from torchshard.tensor.layout import TensorLayout, layout_for
from torchshard.unsupported import unsupported


def first_run(
    call: Call, operands: Sequence[Operand], results: Sequence[Sharding] | None
) -> tuple[Any, Callable[..., Any]]:
    """What a call gives here, and the plan for further calls of its kind.

    Args:
        call: the operator and its arguments.
        operands: the tensors among them.
        results: sharding of each result; all whole where None.

    Raises:
        UnsupportedOperatorError: the operator gives a number, or a shape, that only ranks of the mesh know.
    """
    returns = schema(call.func).returns
    given = [r.alias_info is not None and r.alias_info.is_write for r in returns]
    plan = _giving(call) if all(given) else _making(call, operands, results)
    result = plan(*call.values)
    return result, lasting(plan, call, [(operands, [x._spec for x in dtensors_in([result])])])


def for_lists(call: Call, away: Sequence[TensorLayout | None]) -> tuple[Any, Callable[..., Any]]:
    """What an operator gives for lists of tensors of which some are on meshes without this rank; and its plan.

    Args:
        call: the operator, which works item with item.
        away: for each item of its lists the layout of the result, where this rank is outside; else None.
    """
    given, call = call.values, call.without_values()
    here, returns = [layout is None for layout in away], bool(schema(call.func).returns)

    def plan(*values: Any) -> Any:
        first = next(value for value in values if isinstance(value, (list, tuple)))
        made: Iterator[Any] = iter(())
        if any(here):
            made = iter(call.for_items(values, here) or ())
        if not returns:
            return None
        return [
            next(made) if layout is None else _empty(x._local_tensor if isinstance(x, DTensor) else x, layout)
            for x, layout in zip(first, away, strict=True)
        ]

    return plan(*given), plan


def dtypes_of(call: Call, operand: Operand) -> list[Any]:
    """The dtypes of the results of an operator on lists.

    Raises:
        UnsupportedOperatorError: they cannot be known without values.
    """
    try:
        return [t.dtype for t in run_on_meta(call) or ()]
    except NotImplementedError as error:
        raise _not_known(call.name, operand.layout, "dtypes that follow from values") from error


def _empty(like: Tensor, layout: TensorLayout) -> DTensor:
    return guards.new_view(DTensor, like.new_empty(0, dtype=layout.dtype), layout, False, like)


def _giving(call: Call) -> Callable[..., Any]:
    """A plan that gives the arguments that are written to, or nothing."""
    written, count = call.written(), len(schema(call.func).returns)
    if count > 1:
        return lambda *values: tuple([values[at] for at in written])
    return lambda *values: values[written[0]] if count else None


def _making(call: Call, operands: Sequence[Operand], results: Sequence[Sharding] | None) -> Callable[..., Any]:
    first, mesh = operands[0], operands[0].layout.mesh
    if not all("Tensor" in str(r.type) for r in schema(call.func).returns):
        raise _not_known(call.name, first.layout, "a number")
    try:
        made = run_on_meta(call)
    except NotImplementedError as error:
        raise _not_known(call.name, first.layout, "a shape that follows from values") from error
    parts = [made] if isinstance(made, Tensor) else list(made)
    shardings = results or [mesh.replicated()] * len(parts)
    outs = [
        None if t is None else layout_for(sharding, tuple(t.shape), tuple(t.stride()), t.dtype)
        for t, sharding in zip(parts, shardings, strict=True)
    ]

    def plan(*values: Any) -> Any:
        x = values[first.at] if first.item is None else values[first.at][first.item]
        local = x._local_tensor
        wrapped = [None if out is None else _empty(local, out) for out in outs]
        return wrapped[0] if isinstance(made, Tensor) else type(made)(wrapped)

    return plan


def whole(x: DTensor, asker: str) -> Tensor:
    """The full tensor, for who wants its values.

    Raises:
        UnsupportedOperatorError: this rank is outside of the mesh, where full_tensor() gives an empty one.
    """
    if x._spec.mesh.coordinate is None:
        raise _not_known(asker, x._spec, "values")
    return x.full_tensor()


def _not_known(name: str, layout: TensorLayout, what: str) -> UnsupportedOperatorError:
    return unsupported(
        f"{name} gives {what}, which a rank outside of the mesh does not know.",
        expected=f"a rank of the mesh {layout.mesh}",
        got=layout,
        fix="call it where mesh.get_coordinate() is not None, or bring the tensor to a mesh of all ranks first",
    )
