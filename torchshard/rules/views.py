"""Operators that only rearrange: views, joins, cuts, and new tensors made after the likeness of others."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchshard.layout.layout import Layout, contiguous_stride
from torchshard.rules.reducing import dims_of, letters
from torchshard.rules.rule import Made, Rule, named, options, table


def _line(operand: Sequence[str], *results: Sequence[str]) -> str:
    return f"{' '.join(operand)} -> {', '.join(' '.join(r) for r in results)}"


def _view(x: Layout, size: Sequence[int]) -> Made:
    """Factors that both shapes are made of, the slowest first; where they share none, dims are whole.

    (4, 6) viewed as (8, 3) is `f0 (f1 f2) -> (f0 f1) f2`, with lengths 4, 2 and 3; (6, 4) as (4, 6) is
    `(f0 S0) S1 -> (f0 T0) T1`, with f0 the 2 that the first dims of both have in common. A split dim of length 1 goes
    on in the next such dim, counted from the end.
    """
    source, target = list(x.shape), list(size)
    if -1 in target:
        known = -math.prod(target)
        target[target.index(-1)] = math.prod(source) // known if known else 0
    if 0 in source or math.prod(source) != math.prod(target):
        whole = [f"Z{d}" for d in range(len(target))]
        sizes = {f"Z{d}": n for d, n in enumerate(target)}
        return Made(_line(letters(x.ndim, range(x.ndim)), whole), sizes, local_size=1)
    operand: list[list[str]] = [[] for _ in source]
    result: list[list[str]] = [[] for _ in target]
    sizes = {}
    for ins, outs in _stretches(source, target):
        _name_factors(source, ins, target, outs, operand, result, sizes)
    free = [d - len(target) for d, n in enumerate(target) if n == 1]
    for d in [d - len(source) for d in x.sharding.splits if source[d] == 1]:
        if free:
            _, at = min([(abs(at - d), at) for at in free])
            free.remove(at)
            factor = f"f{len(sizes)}"
            sizes[factor] = 1
            operand[d].append(factor)
            result[at].append(factor)
    return Made(_line(*[list(map(_dim, side)) for side in (operand, result)]), sizes, local_size=1)


def _name_factors(
    source: Sequence[int],
    ins: Sequence[int],
    target: Sequence[int],
    outs: Sequence[int],
    operand: list[list[str]],
    result: list[list[str]],
    sizes: dict[str, int],
) -> None:
    """Name the factors of the dims of one stretch, as long as one side's dim divides the other's."""
    rest_in, rest_out = {d: source[d] for d in ins if source[d] != 1}, {d: target[d] for d in outs if target[d] != 1}
    while rest_in and rest_out:
        (i, n), (j, m) = next(iter(rest_in.items())), next(iter(rest_out.items()))
        shared = _common(n, m)
        if shared > 1:
            factor = f"f{len(sizes)}"
            sizes[factor] = shared
            operand[i].append(factor)
            result[j].append(factor)
        for rest, d in ((rest_in, i), (rest_out, j)):
            rest[d] //= shared
            if rest[d] == 1:
                del rest[d]
        if shared not in (n, m):
            break
    for rest, names, letter in ((rest_in, operand, "S"), (rest_out, result, "T")):
        for d, n in rest.items():
            whole = f"{letter}{len(sizes)}"
            sizes[whole] = n
            names[d].append(whole)


def _common(n: int, m: int) -> int:
    """The greatest common divisor; of symbolic lengths it stays symbolic where one divides the other."""
    if type(n) is int and type(m) is int:
        return math.gcd(n, m)
    if m % n == 0:
        return n
    return m if n % m == 0 else math.gcd(n, m)


def _dim(factors: Sequence[str]) -> str:
    return "1" if not factors else factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


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
    dropped = [d for d in ([] if dim == [] else dims_of(dim, x.ndim)) if x.shape[d] == 1]
    names = ["1" if d in dropped else f for d, f in enumerate(letters(x.ndim))]
    # On a local tensor by number: a piece may have length 1 where the whole has not.
    local = lambda _, t, *__: t.squeeze(dropped)  # noqa: E731
    return Made(_line(names, [f for d, f in enumerate(names) if d not in dropped]), local=local)


def _squeeze_copy(x: Layout, dim: Any = None) -> Made:
    made = _squeeze(x, dim)
    view: Any = made.local
    return replace(made, local=lambda *given: view(*given).clone(memory_format=torch.contiguous_format))


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
    grows = any(type(n) is not int or n > 1 for n in sizes.values())  # sooner reduced before than afterwards
    return Made(_line(names, result), sizes, local_size=1, options={"moves": not grows})


def _select(x: Layout, dim: int, index: int) -> str:
    dim %= x.ndim
    names = letters(x.ndim, [dim])
    return _line(names, [*names[:dim], *names[dim + 1 :]])


def _unbind(x: Layout, dim: int = 0) -> str:
    dim %= x.ndim
    names = letters(x.ndim, [dim])
    return _line(names, *[[*names[:dim], *names[dim + 1 :]]] * x.shape[dim])


def _select_backward(grad: Layout, size: Sequence[int], dim: int, index: int) -> Made:
    dim %= len(size)
    names = letters(grad.ndim)
    return Made(_line(names, [*names[:dim], "Z", *names[dim:]]), {"Z": size[dim]}, local_size=1)


def _stack(tensors: Sequence[Layout], dim: int = 0) -> Made:
    names = letters(tensors[0].ndim)
    dim %= len(names) + 1
    line = f"{', '.join([' '.join(names)] * len(tensors))} -> {' '.join([*names[:dim], 'Z', *names[dim:]])}"
    return Made(line, {"Z": len(tensors)}, {"linear": (tuple(range(len(tensors))),)})


def _block_diag(tensors: Sequence[Layout]) -> Made:
    operands = [" ".join([f"{f}{k}" for f in "RC"[2 - t.ndim :]]) for k, t in enumerate(tensors)]
    return Made(f"{', '.join(operands)} -> Y Z", options={"linear": (tuple(range(len(tensors))),)})


def _pad(x: Layout, pad: Sequence[int], value: Any = 0) -> Made:
    names = letters(x.ndim)
    for k in range(len(pad) // 2):
        if pad[2 * k] or pad[2 * k + 1]:
            names[x.ndim - 1 - k] = f"W{k}"
    result = [f"Z{f}" if f[0] == "W" else f for f in names]
    if all(isinstance(n, int) and n <= 0 for n in pad):
        return Made(_line(names, result), options={"moves": True})
    extremes = {"max": ((0,),), "min": ((0,),)}  # of one value on all ranks, the extreme is that value
    return Made(_line(names, result), options=extremes if value else {"linear": ((0,),), **extremes})


def _view_dtype(x: Layout, dtype: Any) -> str | Made | None:
    """The same bits as numbers of another type, of which a row may hold more or fewer."""
    if dtype.itemsize == x.dtype.itemsize:
        return "... -> ..."
    return Made("... Z -> ... W", local=_with_strides_that_count) if x.ndim else None


def _with_strides_that_count(view: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """A view for which torch asks for strides of dims of length 0 and 1 as well; those of a part may be any."""
    rows, empty = contiguous_stride(x.shape), 0 in x.shape
    stride = tuple([row if empty or n == 1 else old for n, old, row in zip(x.shape, x.stride(), rows, strict=True)])
    return view(x if stride == x.stride() else x.as_strided(x.shape, stride), *args)


def _repeat(x: Layout, repeats: Sequence[int]) -> str:
    names, lead = letters(x.ndim), len(repeats) - x.ndim
    result = [f"N{d}" for d in range(lead)]
    for d, n in enumerate(repeats[lead:]):
        names[d] = names[d] if n == 1 else f"W{d}"
        result.append(names[d] if n == 1 else f"Z{d}")
    return _line(names, result)


def _diagonal(x: Layout, offset: int = 0, one: int = 0, other: int = 1) -> str:
    dims = one % x.ndim, other % x.ndim
    names = letters(x.ndim, dims)
    return _line(names, [*[f for d, f in enumerate(names) if d not in dims], "Z"])


def _diagonal_backward(grad: Layout, size: Sequence[int], offset: int, one: int, other: int) -> Made:
    dims = one % len(size), other % len(size)
    names = letters(len(size), dims)
    operand = [*[f for d, f in enumerate(names) if d not in dims], "Z"]
    return Made(_line(operand, names), {names[d]: size[d] for d in dims}, local_size=1)


def _diag_embed(x: Layout, offset: int = 0, one: int = -2, other: int = -1) -> str:
    dims = one % (x.ndim + 1), other % (x.ndim + 1)
    names = letters(x.ndim, [x.ndim - 1])
    rest = iter(names[:-1])
    return _line(names, [f"Z{d}" if d in dims else next(rest) for d in range(x.ndim + 1)])


def _unfold(x: Layout, dim: int, size: int, step: int) -> str:
    names = letters(x.ndim, dims_of(dim, x.ndim))
    return _line(names, [*[f"Z{f}" if f.isupper() else f for f in names], "W"])


def _unfold_backward(grad: Layout, sizes: Sequence[int], dim: int, size: int, step: int) -> Made:
    names = letters(len(sizes), dims_of(dim, len(sizes)))
    operand = [*[f"Z{f}" if f.isupper() else f for f in names], "W"] if sizes else ["W"]
    return Made(_line(operand, names), {f: n for f, n in zip(names, sizes, strict=True) if f.isupper()}, local_size=1)


def _rot90(x: Layout, k: int = 1, dims: Sequence[int] = (0, 1)) -> str:
    one, other = dims_of(dims, x.ndim)
    names = letters(x.ndim, [one, other])
    result = list(names)
    if k % 2:
        result[one], result[other] = names[other], names[one]
    return _line(names, result)


_LINES = table("""
    pixel_shuffle          | ... C H W -> ... D P Q  | moves full
    pixel_unshuffle        | ... C H W -> ... D P Q  | moves full
    im2col                 | ... C H W -> ... K L    | lin=0 full
    reflection_pad1d replication_pad1d                    | ... W -> ... Z              | lin=0 full
    reflection_pad2d replication_pad2d                    | ... H W -> ... P Q          | lin=0 full
    reflection_pad3d replication_pad3d                    | ... D H W -> ... O P Q      | lin=0 full
    reflection_pad1d_backward replication_pad1d_backward  | ... Z, ... W -> ... W       | lin=0 full
    reflection_pad2d_backward replication_pad2d_backward  | ... P Q, ... H W -> ... H W | lin=0 full
    reflection_pad3d_backward replication_pad3d_backward  | ... O P Q, ... D H W -> ... D H W | lin=0 full
""")


def _channel_shuffle(x: Layout, groups: int) -> str:
    names = letters(x.ndim, [1])
    return _line(names, names)


def _new(x: Layout, size: Sequence[int], *_: Any, **__: Any) -> Made:
    """new_zeros and its kin: sharded as the operand where the shape is the same, whole otherwise."""
    if tuple(size) == tuple(x.shape):
        names = letters(x.ndim)
        return Made(_line(names, names), local_size=1)
    whole = [f"Z{d}" for d in range(len(size))]
    return Made(_line(letters(x.ndim, range(x.ndim)), whole), {f"Z{d}": n for d, n in enumerate(size)}, local_size=1)


def _new_strided(x: Layout, size: Sequence[int], stride: Sequence[int], **_: Any) -> Made | None:
    """new_empty_strided: autograd asks for it where a gradient's strides are not its parameter's."""
    if len(stride) != len(size) or any(step < 0 for step in stride):  # the kernel refuses them
        return None
    made, same = _new(x, size), {"like": False, "moves": True}  # terms stay terms
    return Made(made.line, made.sizes, same if tuple(size) == tuple(x.shape) else {}, local_size=1, local_stride=2)


RULES = {
    **_LINES,
    **named("view view_copy _unsafe_view reshape", Rule(_view, options("moves"))),
    **named("permute permute_copy", Rule(_permute, options("moves"))),
    **named("transpose.int transpose_copy.int t t_copy", Rule(_transpose, options("moves"))),
    **named("unsqueeze unsqueeze_copy", Rule(_unsqueeze, options("moves"))),
    **named("squeeze squeeze.dim squeeze.dims", Rule(_squeeze, options("moves"))),
    **named("squeeze_copy squeeze_copy.dim squeeze_copy.dims", Rule(_squeeze_copy, options("moves"))),
    **named("expand expand_copy", Rule(_expand, options("moves"))),
    **named("select.int select_copy.int", Rule(_select, options("moves"))),
    **named("unbind.int unbind_copy.int", Rule(_unbind, options("moves"))),
    **named("diagonal diagonal_copy", Rule(_diagonal, options("moves"))),
    **named("unfold unfold_copy", Rule(_unfold, options("moves"))),
    **named("rot90", Rule(_rot90, options("moves"))),
    **named("repeat", Rule(_repeat, options("moves"))),
    **named("channel_shuffle native_channel_shuffle", Rule(_channel_shuffle, options("moves full"))),
    **named("diag_embed", Rule(_diag_embed, options("lin=0"))),
    **named("view.dtype view_copy.dtype", Rule(_view_dtype)),
    **named("constant_pad_nd", Rule(_pad, options("reads=value"))),
    **named("select_backward", Rule(_select_backward, options("lin=0"))),
    **named("diagonal_backward", Rule(_diagonal_backward, options("lin=0"))),
    **named("unfold_backward", Rule(_unfold_backward, options("lin=0"))),
    **named("stack", Rule(_stack)),
    **named("block_diag", Rule(_block_diag)),
    **named("new_zeros new_ones new_empty new_full", Rule(_new, options("like"))),
    **named("new_empty_strided", Rule(_new_strided, options("like"))),
}
