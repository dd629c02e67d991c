"""Operators on a rank outside of the mesh: it holds nothing, but knows the layout of every result.

So that such a rank can go through the same program as the others, and meet them again in a redistribution to another
mesh. Shapes come from a run on meta tensors, as there is no local result that could show them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchshard._torch import schema
from torchshard.errors import UnsupportedOperatorError
from torchshard.layout.layout import Sharding
from torchshard.tensor.call import Call, Operand, run_on_meta
from torchshard.tensor.dtensor import DTensor, new_view
from torchshard.tensor.layout import layout_for


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
    plan = _writing(call) if call.written() else _making(call, operands, results)
    return plan(*call.values), plan


def _writing(call: Call) -> Callable[..., Any]:
    at, returns = call.written()[0], bool(schema(call.func).returns)
    return lambda *values: values[at] if returns else None


def _making(call: Call, operands: Sequence[Operand], results: Sequence[Sharding] | None) -> Callable[..., Any]:
    first, mesh = operands[0], operands[0].layout.mesh
    if not all("Tensor" in str(r.type) for r in schema(call.func).returns):
        raise _not_known(call, first, "a number")
    try:
        made = run_on_meta(call)
    except NotImplementedError as error:
        raise _not_known(call, first, "a shape that follows from values") from error
    parts = [made] if isinstance(made, Tensor) else list(made)
    shardings = results or [mesh.replicated()] * len(parts)
    outs = [
        None if t is None else layout_for(sharding, tuple(t.shape), tuple(t.stride()), t.dtype)
        for t, sharding in zip(parts, shardings, strict=True)
    ]

    def plan(*values: Any) -> Any:
        x = values[first.at] if first.item is None else values[first.at][first.item]
        local = x._local_tensor
        wrapped = [
            None if out is None else new_view(DTensor, local.new_empty(0, dtype=out.dtype), out, False) for out in outs
        ]
        return wrapped[0] if isinstance(made, Tensor) else type(made)(wrapped)

    return plan


def _not_known(call: Call, operand: Operand, what: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"{call.name} gives {what}, which a rank outside of the mesh does not know.",
        expected=f"a rank of the mesh {operand.layout.mesh}",
        got=operand.layout,
        fix="call it where mesh.get_coordinate() is not None, or bring the tensor to a mesh of all ranks first",
    )
