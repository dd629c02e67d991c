"""Backward hooks that a compiled forward leaves to compiled autograd, of gradients that are DTensors.

torch's operator stands in a backward graph for a hook, whose code is traced when compiled autograd comes to it. A graph
is of parts: the operator is given these, and its function makes DTensors of them again. Of another trace, the function
knows no symbolic length of this one. So lengths come to it as those of a tensor without memory.
"""

from collections.abc import Callable
from typing import Any

import torch

from torchshard.errors import ShardingError
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.layout import known

Layout = tuple[Any, ...] | None
"""Mesh, placements, shape and stride, or None for the last two where they are symbolic; None: of what is no DTensor."""


def call_hooks(operator: Callable[..., Any], *operands: Any, fn: Callable[..., Any], **also: Any) -> Any:
    """The operator behind backward hooks in compiled forwards, where a DTensor is among the gradients.

    Where the hook of a tensor gives none, the gradient stays; torch's own function loses it, of plain tensors too.

    Args:
        operator: takes the same of plain tensors.
        operands: what `fn` takes: a gradient; or None, a module's gradients, and what else its hooks are given.
        fn: calls the hooks; gives new gradients for the first operand that is not None, of the same shapes and dtypes.
        also: further ones of `fn`.

    Returns:
        The new gradients, laid out as those that they stand for.

    Raises:
        ShardingError: when the graph is run through: a hook gave no DTensor for one, or one of another mesh, shape or
            dtype.
    """
    layouts, lengths = _each(_layout, operands), _each(_lengths, operands)
    count, changed = len(operands), 1 if operands[0] is None else 0

    def of_parts(*given: Any, **also: Any) -> Any:
        made = fn(*_each(_whole, given[:count], layouts, given[count:]), **also)
        if made is None:
            return given[changed]
        return _each(_part, made, given[changed], layouts[changed], given[count + changed])

    parts = operator(*_each(_local, operands), *lengths, fn=of_parts, **also)
    return _each(_whole, parts, layouts[changed], lengths[changed])


def _each(function: Callable[..., Any], *values: Any) -> Any:
    """What a function gives for each of values, in tuples as they are, with those of others in the same places."""
    if isinstance(values[0], (tuple, list)):
        return tuple([_each(function, *found) for found in zip(*values, strict=True)])
    return function(*values)


def _layout(x: Any) -> Layout:
    if type(x) is not DTensor:
        return None
    shape, stride = tuple(x.shape), x.stride()
    return (x.device_mesh, x.placements, *((shape, stride) if known(shape, stride) else (None, None)))


def _lengths(x: Any) -> Any:
    """A tensor that has nothing but the shape and stride of a DTensor, where these are symbolic."""
    if type(x) is not DTensor or known(x.shape, x.stride()):
        return None
    return torch.empty_strided(x.shape, x.stride(), device="meta")


def _local(x: Any) -> Any:
    return x._local_tensor if type(x) is DTensor else x


def _whole(part: Any, layout: Layout, lengths: Any) -> Any:
    if layout is None or part is None:
        return part
    mesh, placements, *_ = layout
    shape, stride = _sizes(layout, lengths)
    return DTensor.from_local(part, mesh, placements, shape=shape, stride=stride)


def _sizes(layout: tuple[Any, ...], lengths: Any) -> tuple[Any, Any]:
    """Shape and stride, which are those of the other tensor where they are symbolic."""
    return layout[2:] if lengths is None else (lengths.shape, lengths.stride())


def _part(x: Any, part: Any, layout: Layout, lengths: Any) -> Any:
    """What a rank has of a new gradient, laid out as the one that it stands for, of which it had a part."""
    if layout is None or x is None:
        return x
    if not isinstance(x, DTensor):
        raise ShardingError(
            "A backward hook of a compiled forward gave no DTensor in the place of one.",
            expected="a DTensor, or None",
            got=f"a {type(x).__name__}",
            fix="make it from the gradient that the hook is given",
        )
    shape, _ = _sizes(layout, lengths)
    if tuple(x.shape) != tuple(shape) or x.dtype != part.dtype:
        raise ShardingError(
            "A backward hook of a compiled forward gave a gradient of another shape or dtype.",
            expected=f"{list(shape)} of {part.dtype}",
            got=f"{list(x.shape)} of {x.dtype}",
            fix="give one like the gradient that the hook is given",
        )
    return x.redistribute(placements=layout[1]).to_local()
