"""Convolution along split dims, as of images too large for one device: each rank makes its rows of the result from its
own and from the rows of its neighbours that its kernels reach.

Other axes may split the batch, or the channels that come out. Channels that go in and are split, transposed
convolutions and traces are left to the rule.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchshard.layout.layout import Sharding
from torchshard.layout.placements import Partial, Placement, R, Shard
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import EagerAlone, decided, part
from torchshard.tensor.handlers.sliding import Slides, described, layouts, ordered, rows_of, slides_of, split_dims
from torchshard.tensor.layout import layout_for
from torchshard.tensor.moving.redistribute import in_memory_order


class _Places(NamedTuple):
    """How the operands and results of a convolution are split."""

    x: Sharding
    kernels: Sharding  # and the bias
    result: Sharding
    of_x: Sharding
    of_kernels: Sharding  # and of the bias


@decided
def _places(x: Sharding, kernels: Sharding, groups: int) -> _Places:
    """Kernels are split by the channels that come out where x is whole, and are whole elsewhere."""
    mesh, x = x.mesh, x.without_partial()
    by_channel = [
        p is R and k is Shard(0) and groups == 1 for p, k in zip(x.placements, kernels.placements, strict=True)
    ]
    order = tuple([a for a in kernels.splits.get(0, ()) if by_channel[a]])

    def sharding(of_channels: Placement, others: Callable[[Placement], Placement], dim: int | None) -> Sharding:
        placed = [of_channels if c else others(p) for c, p in zip(by_channel, x.placements, strict=True)]
        splits = {d: axes for d, axes in x.splits.items() if others(Shard(d)) is Shard(d)}
        return mesh.sharding(placed, splits if dim is None or not order else {**splits, dim: order})

    return _Places(
        x,
        sharding(Shard(0), lambda p: R, 0),
        sharding(Shard(1), lambda p: p, 1),
        sharding(Partial("sum"), lambda p: p, None),
        sharding(Shard(0), lambda p: p if p is R else Partial("sum"), 0),
    )


def _slides(x: DTensor, weight: DTensor, result: Sequence[int], *numbers: Any) -> Slides:
    return slides_of(x, weight.shape[2:], result[2:], *numbers)


def _may(x: Any, weight: Any, bias: Any, transposed: bool) -> bool:
    """Whether x is split where kernels slide, and the rest is as this file can have it."""
    if type(x) is not DTensor or not split_dims(x, x.ndim - 2) or type(weight) is not DTensor or transposed:
        return False
    return (bias is None or type(bias) is DTensor) and 1 not in x._spec.sharding.splits and bool(weight.numel())


def _convolution(
    func: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    if not _may(x, weight, bias, transposed):
        return NotImplemented
    args = x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    told = layouts(x._spec.sharding, func, x.device.type, described(args))
    if not told:
        return NotImplemented
    shape, strides, dtype = told[0]
    places = _places(x._spec.sharding, weight._spec.sharding, groups)
    out = layout_for(places.result, shape, strides, dtype)
    if x._spec.mesh.coordinate is None:
        return ordered(None, out, x._local_tensor)
    slides, left = _slides(x, weight, shape, stride, padding, dilation)
    window = rows_of(places.x, tuple(x.shape), slides).fetched(part(x, places.x))
    kernels, biases = part(weight, places.kernels), None if bias is None else part(bias, places.kernels)
    made = None
    if 0 not in out.local_shape:
        images = in_memory_order(window, x._spec)
        made = func(images, kernels, biases, stride, left, dilation, False, output_padding, groups)
    return ordered(made, out, x._local_tensor)


def _convolution_backward(
    func: Any, grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    if type(grad) is not DTensor or not _may(x, weight, None, transposed):
        return NotImplemented
    args = grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask
    told = layouts(x._spec.sharding, func, x.device.type, described(args))
    if not told:
        return NotImplemented
    places = _places(x._spec.sharding, weight._spec.sharding, groups)
    shardings = places.of_x, places.of_kernels, places.of_kernels
    outs = [None if t is None else layout_for(s, *t) for t, s in zip(told, shardings, strict=True)]
    if x._spec.mesh.coordinate is None:
        return tuple([None if out is None else ordered(None, out, x._local_tensor) for out in outs])
    slides, left = _slides(x, weight, grad.shape, stride, padding, dilation)
    rows = rows_of(places.x, tuple(x.shape), slides)
    window = in_memory_order(rows.fetched(part(x, places.x)), x._spec)
    kernels, grads = part(weight, places.kernels), in_memory_order(part(grad, places.result), grad._spec)
    if grads.numel():
        sizes = None if bias_sizes is None else [grads.shape[1]]
        made = func(grads, window, kernels, sizes, stride, left, dilation, False, output_padding, groups, mask)
    else:
        made = window.new_zeros(window.shape), torch.zeros_like(kernels), kernels.new_zeros(kernels.shape[0])
    shares = made if outs[0] is None else (rows.returned(made[0]), *made[1:])
    return tuple([None if o is None else ordered(t, o, grads) for t, o in zip(shares, outs, strict=True)])


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "convolution.default": EagerAlone(_convolution),
    "convolution_backward.default": EagerAlone(_convolution_backward),
}
