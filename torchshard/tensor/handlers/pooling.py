"""Pooling along split dims: each rank makes its rows of the result from its own and its neighbours'. In backward each
gets the gradients of what it holds.

Left to the rule: adaptive pooling, and averages of which windows at the edges have fewer elements.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchshard.layout.layout import Sharding
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import EagerAlone, part
from torchshard.tensor.handlers.sliding import Rows, described, layouts, ordered, rows_of, slides_of, split_dims
from torchshard.tensor.layout import TensorLayout, layout_for
from torchshard.tensor.moving.redistribute import in_memory_order


def _average(
    count: int, func: Any, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, ceil: bool = False,
    pads: bool = True, divisor: int | None = None,
) -> Any:  # fmt: skip
    sharding = _sharding(x, count)
    given = x, kernel, stride, padding, ceil, pads, divisor
    outs = [] if sharding is None or _counts(ceil, pads, padding) else _outs(func, sharding, *given)
    if sharding is None or not outs:
        return NotImplemented
    if sharding.mesh.coordinate is None:
        return ordered(None, outs[0], x._local_tensor)
    rows, left = _rows(sharding, x, outs[0].shape, count, kernel, stride, padding)
    window = in_memory_order(rows.fetched(part(x, sharding)), x._spec)
    made = func(window, kernel, stride, left, ceil, pads, divisor) if _holds(outs[0]) else None
    return ordered(made, outs[0], window)


def _average_backward(
    count: int, func: Any, grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, ceil: bool, pads: bool,
    divisor: int | None,
) -> Any:  # fmt: skip
    if _counts(ceil, pads, padding):
        return NotImplemented

    def local(window: Tensor, grads: Tensor, rows: Rows, left: Sequence[int]) -> Tensor:
        return func(grads, window, kernel, stride, left, ceil, pads, divisor)  # type: ignore[no-any-return]

    return _backward(count, func, grad, x, (kernel, stride, padding), (ceil, pads, divisor), local)


def _counts(ceil: bool, pads: bool, padding: Any) -> bool:
    """Whether windows at the edges are divided by other numbers than those within."""
    return ceil or not (pads or not any([padding] if isinstance(padding, int) else padding))


def _largest(
    count: int, func: Any, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil: bool = False,
) -> Any:  # fmt: skip
    sharding = _sharding(x, count)
    outs = [] if sharding is None else _outs(func, sharding, x, kernel, stride, padding, dilation, ceil)
    if sharding is None or not outs:
        return NotImplemented
    if sharding.mesh.coordinate is None:
        return tuple([ordered(None, out, x._local_tensor) for out in outs])
    rows, left = _rows(sharding, x, outs[0].shape, count, kernel, stride, padding, dilation)
    least = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    window = in_memory_order(rows.fetched(part(x, sharding), least), x._spec)
    made: Sequence[Tensor | None] = None, None
    if _holds(outs[0]):
        found, places = func(window, kernel, stride, left, dilation, ceil)
        made = found, _moved(places, rows.reach.size[-count:], rows.reach.start[-count:], tuple(x.shape[-count:]))
    return tuple([ordered(t, out, window) for t, out in zip(made, outs, strict=True)])


def _largest_backward(
    count: int, func: Any, grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool,
    places: Any,
) -> Any:  # fmt: skip
    if type(places) is not DTensor:
        return NotImplemented

    def local(window: Tensor, grads: Tensor, rows: Rows, left: Sequence[int]) -> Tensor:
        start = [-n for n in rows.reach.start[-count:]]
        index = part(places, x._spec.sharding.without_partial())
        own = _moved(index, tuple(x.shape[-count:]), start, rows.reach.size[-count:])
        return func(grads, window, kernel, stride, left, dilation, ceil, own)  # type: ignore[no-any-return]

    return _backward(count, func, grad, x, (kernel, stride, padding, dilation), (ceil, places), local)


def _moved(places: Tensor, size: Sequence[int], start: Sequence[int], target: Sequence[int]) -> Tensor:
    """Places in a box of this size as places in another one, in which the box starts there.

    What lies beyond the edge was only found where all of a window is -inf; eager torch names the first element within.
    """
    moved, step = torch.zeros_like(places), 1
    for n, offset, length in reversed(list(zip(size, start, target, strict=True))):
        moved += (places % n + offset).clamp_(min=0) * step
        places, step = places // n, step * length
    return moved


def _backward(
    count: int, func: Any, grad: Any, x: Any, windows: tuple[Any, ...], rest: tuple[Any, ...],
    local: Callable[[Tensor, Tensor, Rows, Sequence[int]], Tensor],
) -> Any:  # fmt: skip
    """The gradient of x, of which `local` makes that of a window, with the padding that is left to the kernel."""
    sharding = _sharding(x, count)
    outs = [] if sharding is None or type(grad) is not DTensor else _outs(func, sharding, grad, x, *windows, *rest)
    if sharding is None or not outs:
        return NotImplemented
    if sharding.mesh.coordinate is None:
        return ordered(None, outs[0], x._local_tensor)
    rows, left = _rows(sharding, x, grad.shape, count, *windows)
    grads, size = in_memory_order(part(grad, sharding), grad._spec), rows.reach.size
    window = in_memory_order(grads.new_zeros(size), x._spec)
    share = rows.returned(local(window, grads, rows, left) if grads.numel() else window)
    return ordered(share, outs[0], window)


def _sharding(x: Any, count: int) -> Sharding | None:
    """How x is split, if it is along some of the last dims, and results are to be."""
    return x._spec.sharding.without_partial() if split_dims(x, count) else None


def _outs(func: Any, sharding: Sharding, *args: Any) -> list[TensorLayout]:
    """The layouts of the results; none where the operator refuses its arguments."""
    device = next(a for a in args if type(a) is DTensor).device.type
    return [layout_for(sharding, *told) for told in layouts(sharding, func, device, described(args))]


def _holds(layout: TensorLayout) -> bool:
    """Whether this rank makes any of a result."""
    return 0 not in layout.local_shape


def _rows(
    sharding: Sharding, x: DTensor, result: Sequence[int], count: int, kernel: Any, stride: Any, padding: Any,
    dilation: Any = 1,
) -> tuple[Rows, list[int]]:  # fmt: skip
    """The rows of x, and the padding that is left to the kernel."""
    lengths = [kernel] * count if isinstance(kernel, int) else list(kernel) * (count if len(kernel) == 1 else 1)
    slides, left = slides_of(x, lengths, result[-count:], stride or lengths, padding, dilation)
    return rows_of(sharding, tuple(x.shape), slides), left


HANDLERS: Mapping[str, Callable[..., Any]] = {
    f"{name}{count}d{rest}.default": EagerAlone(partial(function, count))
    for count in (2, 3)
    for name, rest, function in (
        ("avg_pool", "", _average),
        ("avg_pool", "_backward", _average_backward),
        ("max_pool", "_with_indices", _largest),
        ("max_pool", "_with_indices_backward", _largest_backward),
    )
}
