"""Joins, pads and rolls along a split dim, and the gradient of slices: rows go where the result has them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchshard.layout.layout import Sharding
from torchshard.layout.placements import Partial, R, Shard
from torchshard.layout.splicing import Run
from torchshard.rules.slicing import is_all, meet_in_runs, takes_one_of_each
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.handlers.parts import ForKind
from torchshard.tensor.handlers.splicing import (
    Handler,
    Told,
    Way,
    bounds,
    nothing,
    outside,
    parts_of,
    results,
    sending,
    sent,
)
from torchshard.tensor.layout import TensorLayout, known
from torchshard.tensor.moving.redistribute import check_assumed, redistribute_together

aten = torch.ops.aten

First = Callable[[Tensor, Any], Tensor]
"""What is done to a part before, along dims that are not split; it gets what lies between rows as well."""


def _making(
    tell: Callable[..., tuple[Sequence[Told], First | None] | None], value: Callable[..., Any] = lambda *_: 0
) -> Callable[..., Handler | None]:
    """The handler of an operator of one tensor that makes a new one.

    Args:
        tell: of the layout of the tensor and the arguments after it, what happens along each of the split dims that it
            works along, and what is done before.
        value: of these arguments, what lies between rows. Numbers that are equal have one plan, and 0.0 is not -0.0.
    """

    def choose(func: Any, x: Any, *args: Any, **kwargs: Any) -> Handler | None:
        if type(x) is not DTensor or kwargs or not known(x._spec.shape, *args):
            return None
        sharding, told = x._spec.sharding, tell(x._spec, *args)
        if told is None or not told[0]:
            return None
        outs = results(func, sharding, x, *args)
        if not outs:
            return None
        ways, first = [Way.of(t, sharding, [x._spec.shape[t.dim]]) for t in told[0]], told[1]
        if outside(sharding):
            return sending(ways, partial(nothing, outs[0]))

        def make(local: Tensor, *args: Any) -> Tensor:
            between = value(*args)
            local = local if first is None else first(local, between)
            for way in ways:
                (local,) = way.made([local], outs[0].stride, between)
            return local

        return sending(ways, partial(sent, x._spec, outs[0], make))

    return choose


def _may_fill(sharding: Sharding, value: Any) -> bool:
    """Whether a value is the same for terms as for what they stand for: 0 is for those of sums."""
    ops = [p.op for p in sharding.placements if isinstance(p, Partial)]
    return not ops or (not value and all(op in ("sum", "avg") for op in ops))


def _along(x: TensorLayout, dims: Iterable[int]) -> tuple[list[int], list[int]] | None:
    """These dims: those that are split, and the others; None where they are left to the rule."""
    dims = list(dims)
    if not all(-x.ndim <= d < x.ndim for d in dims) or len({d % x.ndim for d in dims}) < len(dims):
        return None
    split = [d % x.ndim for d in dims if parts_of(x.sharding, d % x.ndim) > 1]
    if any(d in x.sharding.cuts for d in split):
        return None
    return split, [d % x.ndim for d in dims if d % x.ndim not in split]


def _roll(x: TensorLayout, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if not dims or len(shifts) != len(dims) or (along := _along(x, dims)) is None:
        return None
    split, others = along
    by = {d % x.ndim: shift for d, shift in zip(dims, shifts, strict=True)}
    told = []
    for d in split:
        n, k = x.shape[d], by[d] % max(x.shape[d], 1)
        told.append(Told(d, [Run(0, 1, k, 1, n - k), Run(n - k, 1, 0, 1, k)], [n]))
    return told, (lambda local, _: local.roll([by[d] for d in others], others)) if others else None


def _pad(x: TensorLayout, pad: Sequence[int], value: Any = 0) -> Any:
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        return None
    sides = {x.ndim - 1 - k: (pad[2 * k], pad[2 * k + 1]) for k in range(len(pad) // 2)}
    if any(x.shape[d] + min(before, 0) + min(after, 0) < 0 for d, (before, after) in sides.items()):
        return None  # refused as the rule does, without a word of torch's log
    along = _along(x, [d for d, added in sides.items() if any(added)])
    if along is None or not _may_fill(x.sharding, value):
        return None
    told = []
    for d in along[0]:
        (before, after), n = sides[d], x.shape[d]
        length, kept = n + before + after, n + min(before, 0) + min(after, 0)
        run = Run(max(-before, 0), 1, max(before, 0), 1, kept)
        told.append(Told(d, [run], [length], kept < length))
    rest = [n for d in range(x.ndim)[::-1] for n in (sides.get(d, (0, 0)) if d in along[1] else (0, 0))]
    return told, (lambda local, value: aten.constant_pad_nd(local, rest, value)) if along[1] else None


def _slice_backward(grad: TensorLayout, size: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    d, n = dim % len(size), size[dim]
    first, count = bounds(n, start, end, step)
    if is_all(n, start, end, step) or takes_one_of_each(n, start, end, step):
        return None
    if step == 1 and meet_in_runs([grad], d, n, first):
        return None
    if (along := _along(grad, [d])) is None or not _may_fill(grad.sharding, 0):
        return None
    return [Told(d, [Run(0, 1, first, step, count)], [n], True) for d in along[0]], None


def _cat(func: Any, tensors: Sequence[Any], dim: int = 0) -> Handler | None:
    if not all(type(t) is DTensor and t.ndim for t in tensors) or len({t.ndim for t in tensors}) > 1:
        return None
    given = [t._spec for t in tensors]
    split = [x for x in given if not x.sharding.cuts and parts_of(x.sharding, dim % x.ndim) > 1]
    if not split or not known(*[x.shape for x in given]) or not -given[0].ndim <= dim < given[0].ndim:
        return None
    d = dim % given[0].ndim
    sharding = max(split, key=lambda x: x.shape[d]).sharding
    if meet_in_runs(given, d):
        return None
    amiss, total = [x for x in given if not _fits(x.sharding, sharding)], _elements(given)
    if amiss and (sharding.partial or 2 * _elements(amiss) > total):
        return None  # to bring those is more than the rule moves, or has to make terms of values
    outs = results(func, sharding, tensors, dim)
    if not outs:
        return None
    lengths = [x.shape[d] for x in given]
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    runs = [Run(0, 1, at, 1, n, k) for k, (at, n) in enumerate(zip(starts, lengths, strict=True))]
    way, moves = Way.of(Told(d, runs, [sum(lengths)]), sharding, lengths), [(x, x.to(sharding)) for x in given]
    if outside(sharding):
        return sending([way], partial(nothing, outs[0]))

    def join(func: Any, tensors: Sequence[DTensor], dim: int = 0) -> DTensor:
        check_assumed(tensors[0]._local_tensor, *[t._spec for t in tensors])
        parts = redistribute_together([t._local_tensor for t in tensors], moves)
        (joined,) = way.made([t.to(outs[0].dtype) for t in parts], outs[0].stride)
        return wrap(joined, outs[0])

    return sending([way], join)


def _elements(layouts: Iterable[TensorLayout]) -> int:
    return sum([math.prod(x.shape) for x in layouts])


def _fits(given: Sharding, wanted: Sharding) -> bool:
    """Whether a rank has its part without anybody else's."""
    if given is wanted:
        return True
    placements = zip(given.placements, wanted.placements, strict=True)
    return all(p is q or (p is R and isinstance(q, Shard)) for p, q in placements) and not given.cuts


HANDLERS: Mapping[str, ForKind] = {
    "slice_backward.default": ForKind(_making(_slice_backward)),
    "constant_pad_nd.default": ForKind(_making(_pad, lambda pad, value=0: value)),
    "roll.default": ForKind(_making(_roll)),
    "cat.default": ForKind(_cat),
}
