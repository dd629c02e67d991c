"""Operators that only rearrange: views, joins, cuts, and new tensors made after the likeness of others."""

import math
from collections.abc import Sequence
from typing import Any

from torchshard.layout.layout import Layout
from torchshard.rules.reducing import dims_of, letters
from torchshard.rules.rule import Made, Rule, named, options


def _line(operand: Sequence[str], *results: Sequence[str]) -> str:
    return f"{' '.join(operand)} -> {', '.join(' '.join(r) for r in results)}"


def _view(x: Layout, size: Sequence[int]) -> Made:
    """Cut both shapes where their running products meet; within a stretch only the slowest factor may be split.

    (4, 6) viewed as (8, 3) is `(f S) T -> (f U) V`, with f the 4 that the first dims of both have in common.
    """
    source, target = list(x.shape), list(size)
    if -1 in target:
        known = -math.prod(target)
        target[target.index(-1)] = math.prod(source) // known if known else 0
    if 0 in source or math.prod(source) != math.prod(target):
        whole = [f"Z{d}" for d in range(len(target))]
        sizes = {f"Z{d}": n for d, n in enumerate(target)}
        return Made(_line(letters(x.ndim, range(x.ndim)), whole), sizes, local_size=1)
    operand: list[str] = []
    result: list[str] = []
    sizes = {}
    for k, (ins, outs) in enumerate(_stretches(source, target)):
        firsts = [next((shape[d] for d in dims if shape[d] != 1), 1) for dims, shape in ((ins, source), (outs, target))]
        sizes[f"f{k}"] = math.gcd(*firsts)
        operand += _stretch(f"f{k}", "S", [source[d] for d in ins], sizes)
        result += _stretch(f"f{k}", "T", [target[d] for d in outs], sizes)
    return Made(_line(operand, result), sizes, local_size=1)


def _stretch(factor: str, whole: str, lengths: Sequence[int], sizes: dict[str, int]) -> list[str]:
    """The dims of one side of a stretch: the first that is longer than 1 begins with the factor both sides share."""
    names, shared = [], False
    for d, n in enumerate(lengths):
        rest = f"{whole}{factor}_{d}"
        if n == 1:
            names.append("1")
        elif shared:
            sizes[rest] = n
            names.append(rest)
        else:
            shared = True
            sizes[rest] = n // sizes[factor]
            names.append(factor if sizes[rest] == 1 else f"({factor} {rest})")
    return names


def _stretches(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Dims of both shapes, grouped into the shortest stretches of equal product."""
    stretches, i, j = [], 0, 0
    while i < len(source) or j < len(target):
        start = i, j
        a = b = 1
        while (i, j) == start or a != b:
            if i < len(source) and (a <= b or j == len(target)):
                a, i = a * source[i], i + 1
            else:
                b, j = b * target[j], j + 1
        stretches.append((list(range(start[0], i)), list(range(start[1], j))))
    return stretches


def _permute(x: Layout, dims: Sequence[int]) -> str:
    names = letters(x.ndim)
    return _line(names, [names[d] for d in dims_of(dims, x.ndim)] if x.ndim else [])


def _transpose(x: Layout, one: int = 0, other: int = 1) -> str:
    order = list(range(x.ndim))
    if x.ndim > 1:
        one, other = one % x.ndim, other % x.ndim
        order[one], order[other] = order[other], order[one]
    return _permute(x, order)


def _unsqueeze(x: Layout, dim: int) -> str:
    names = letters(x.ndim)
    at = dim % (x.ndim + 1)
    return _line(names, [*names[:at], "1", *names[at:]])


def _squeeze(x: Layout, dim: Any = None) -> Made:
    dropped = [d for d in dims_of(dim, x.ndim) if x.shape[d] == 1]
    names = ["1" if d in dropped else f for d, f in enumerate(letters(x.ndim))]
    # On a local tensor by number: a piece may have length 1 where the whole has not.
    local = lambda t, *_: t.squeeze(dropped)  # noqa: E731
    return Made(_line(names, [f for d, f in enumerate(names) if d not in dropped]), local=local)


def _expand(x: Layout, size: Sequence[int], *, implicit: bool = False) -> Made:
    lead, names = len(size) - x.ndim, letters(x.ndim)
    result, sizes = [], {}
    for d, n in enumerate(size):
        if d >= lead and n in (-1, x.shape[d - lead]):
            result.append(names[d - lead])
        else:
            result.append(f"Z{d}")
            sizes[f"Z{d}"] = n
            if d >= lead:
                names[d - lead] = "1"
    return Made(_line(names, result), sizes, local_size=1)


def _slice(x: Layout, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> str:
    dim %= x.ndim
    names = letters(x.ndim)
    if not start and step == 1 and (end is None or end >= x.shape[dim]):
        return _line(names, names)
    names = letters(x.ndim, [dim])
    return _line(names, [*names[:dim], "Z", *names[dim + 1 :]])


def _select(x: Layout, dim: int, index: int) -> str:
    dim %= x.ndim
    names = letters(x.ndim, [dim])
    return _line(names, [*names[:dim], *names[dim + 1 :]])


def _split(x: Layout, size: int | Sequence[int], dim: int = 0) -> str:
    dim %= x.ndim
    count = max(1, -(-x.shape[dim] // max(size, 1))) if isinstance(size, int) else len(size)
    names = letters(x.ndim, [dim])
    return _line(names, *[[*names[:dim], f"Z{k}", *names[dim + 1 :]] for k in range(count)])


def _unbind(x: Layout, dim: int = 0) -> str:
    dim %= x.ndim
    names = letters(x.ndim, [dim])
    return _line(names, *[[*names[:dim], *names[dim + 1 :]]] * x.shape[dim])


def _slice_backward(grad: Layout, size: Sequence[int], dim: int, *_: Any) -> Made:
    dim %= len(size)
    names = letters(grad.ndim, [dim])
    result = [*names[:dim], "Z", *names[dim + 1 :]]
    return Made(_line(names, result), {"Z": size[dim]}, local_size=1)


def _select_backward(grad: Layout, size: Sequence[int], dim: int, index: int) -> Made:
    dim %= len(size)
    names = letters(grad.ndim)
    return Made(_line(names, [*names[:dim], "Z", *names[dim:]]), {"Z": size[dim]}, local_size=1)


def _cat(tensors: Sequence[Layout], dim: int = 0) -> Made:
    # torch lets an empty 1-D tensor join anything; such a one has no dims to name.
    ndim = max(t.ndim for t in tensors)
    dim %= max(ndim, 1)
    names = letters(ndim)
    operands = []
    for k, t in enumerate(tensors):
        skipped = t.ndim == 1 and ndim > 1
        operands.append(f"W{k}" if skipped else " ".join([*names[:dim], f"W{k}", *names[dim + 1 :]]))
    result = " ".join([*names[:dim], "Z", *names[dim + 1 :]])
    return Made(f"{', '.join(operands)} -> {result}", options={"linear": (tuple(range(len(tensors))),)})


def _stack(tensors: Sequence[Layout], dim: int = 0) -> Made:
    names = letters(tensors[0].ndim)
    dim %= len(names) + 1
    line = f"{', '.join([' '.join(names)] * len(tensors))} -> {' '.join([*names[:dim], 'Z', *names[dim:]])}"
    return Made(line, options={"linear": (tuple(range(len(tensors))),)})


def _new(x: Layout, size: Sequence[int], *_: Any, **__: Any) -> Made:
    """new_zeros and its kin: sharded as the operand where the shape is the same, whole otherwise."""
    if tuple(size) == tuple(x.shape):
        names = letters(x.ndim)
        return Made(_line(names, names), local_size=1)
    whole = [f"Z{d}" for d in range(len(size))]
    return Made(_line(letters(x.ndim, range(x.ndim)), whole), {f"Z{d}": n for d, n in enumerate(size)}, local_size=1)


def _new_strided(x: Layout, size: Sequence[int], stride: Sequence[int], **_: Any) -> Made:
    """new_empty_strided: autograd asks for it where a gradient's strides are not its parameter's."""
    made = _new(x, size)
    return Made(made.line, made.sizes, local_size=1, local_stride=2)


RULES = {
    **named("view _unsafe_view reshape", Rule(_view, options("moves"))),
    **named("permute", Rule(_permute, options("moves"))),
    **named("transpose.int", Rule(_transpose, options("moves"))),
    **named("t", Rule(_transpose, options("moves"))),
    **named("unsqueeze", Rule(_unsqueeze, options("moves"))),
    **named("squeeze squeeze.dim squeeze.dims", Rule(_squeeze, options("moves"))),
    **named("expand", Rule(_expand, options("moves"))),
    **named("slice.Tensor", Rule(_slice, options("moves"))),
    **named("select.int", Rule(_select, options("moves"))),
    **named("split.Tensor split_with_sizes", Rule(_split, options("moves"))),
    **named("unbind.int", Rule(_unbind, options("moves"))),
    **named("slice_backward", Rule(_slice_backward, options("lin=0"))),
    **named("select_backward", Rule(_select_backward, options("lin=0"))),
    **named("cat", Rule(_cat)),
    **named("stack", Rule(_stack)),
    **named("new_zeros new_ones new_empty new_full", Rule(_new, options("like"))),
    **named("new_empty_strided", Rule(_new_strided, options("like"))),
}
