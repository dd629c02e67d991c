"""Operators that eliminate dims, or need some of them whole."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torchshard.layout.layout import Layout
from torchshard.rules.rule import Made, Rule, named, options, reduces

Dims = int | Sequence[int] | None


def letters(ndim: int, whole: Sequence[int] = ()) -> list[str]:
    """A factor for each dim: a, b, c, ..., in upper case for dims that must be whole."""
    return [chr(ord("A" if d in whole else "a") + d) for d in range(ndim)]


def broadcasting(names: Iterable[str]) -> list[str]:
    """The same factors of an operand that may be of length 1 where others are longer."""
    return [f"{f}?" for f in names]


def broadcast_shape(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The shape that tensors of these shapes have together, if they have one."""
    dims = zip_longest(*[reversed(shape) for shape in shapes], fillvalue=1)
    return tuple([next((n for n in lengths if n != 1), 1) for lengths in dims])[::-1]


def dims_of(dim: Dims, ndim: int) -> list[int]:
    """Dims as torch means them: negative ones from the end; all for None and for an empty list.

    Raises:
        IndexError: there is no such dim; in eager torch's words.
    """
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return list(range(ndim))
    given, end = [dim] if isinstance(dim, int) else dim, max(ndim, 1)  # a scalar has the dims 0 and -1, too
    for d in given:
        if not -end <= d < end:
            raise IndexError(f"Dimension out of range (expected to be in range of [{-end}, {end - 1}], but got {d})")
    return [d % end for d in given] if ndim else []


def _eliminated(x: Layout, dims: Sequence[int], keepdim: bool, whole: Sequence[int] = ()) -> str:
    names = letters(x.ndim, whole)
    kept = ["1" if d in dims else f for d, f in enumerate(names) if keepdim or d not in dims]
    return f"{' '.join(names)} -> {' '.join(kept)}"


def _reduction(op: str) -> Callable[..., Made]:
    def build(x: Layout, dim: Dims = None, keepdim: bool = False, **_: Any) -> Made:
        dims = dims_of(dim, x.ndim)
        if op == "product" and x.dtype.is_complex:  # no transport multiplies these
            return Made(_eliminated(x, dims, keepdim, whole=dims))
        gone = reduces({f: op for d, f in enumerate(letters(x.ndim)) if d in dims})
        return Made(_eliminated(x, dims, keepdim), options={"reduces": gone})

    return build


def _mean(x: Layout, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Made:
    """A mean over pieces of unequal size: each rank's mean, weighted with its share of the elements, then summed."""
    dims = dims_of(dim, x.ndim)
    count = math.prod([x.shape[d] for d in dims])

    def weighted(op: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
        mean = op(t, *args, **kwargs)  # also of nothing: it refuses whole numbers
        held = math.prod([t.shape[d] for d in dims])
        if held == count:
            return mean
        return mean.mul_(held / count) if held else t.sum(dims, keepdim, dtype=dtype)

    gone = reduces({f: "sum" for d, f in enumerate(letters(x.ndim)) if d in dims})
    return Made(_eliminated(x, dims, keepdim), options={"reduces": gone}, local=weighted if x.ndim else None)


def reduction_of_norms(order: float) -> str:
    """What makes the norm of a tensor of those of its parts. They are not negative, so some orders have a plain one."""
    order = float(order)
    return {0.0: "sum", 1.0: "sum", math.inf: "max", -math.inf: "min"}.get(order, f"norm({order})")


def _vector_norm(x: Layout, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Made:
    dims = dims_of(dim, x.ndim)
    gone = reduces({f: reduction_of_norms(ord) for d, f in enumerate(letters(x.ndim)) if d in dims})
    return Made(_eliminated(x, dims, keepdim), options={"reduces": gone})


def _norm(x: Layout, p: float | None = 2, dim: Dims = None, keepdim: bool = False) -> Made:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim)


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any) -> Any:
    """One of these arguments, by its position (from 1) or by its name."""
    return args[position - 1] if len(args) >= position else kwargs.get(name, default)


def along(
    results: int = 1, *, position: int = 1, name: str = "dim", default: Dims = -1, keeps: bool = True
) -> Callable[..., str]:
    """Lines along some dims are handled as a whole; results have the dims of the operand, and if it `keeps` them, their
    lengths.
    """

    def build(x: Layout, *args: Any, **kwargs: Any) -> str:
        dims = dims_of(argument(args, kwargs, position, name, default), x.ndim)
        operand = letters(x.ndim, dims)
        result = " ".join([f"Z{f}" if d in dims and not keeps else f for d, f in enumerate(operand)])
        return f"{' '.join(operand)} -> {', '.join([result] * results)}"

    return build


def statistic(results: int = 1, *, position: int = 1, default: Dims = None) -> Callable[..., str]:
    """Lines along some dims become one number each, for which they must be whole; `keepdim` follows the dims."""

    def build(x: Layout, *args: Any, **kwargs: Any) -> str:
        dims = dims_of(argument(args, kwargs, position, "dim", default), x.ndim)
        keepdim = argument(args, kwargs, position + 1, "keepdim", False)
        names = letters(x.ndim, dims)
        kept = " ".join(["1" if d in dims else f for d, f in enumerate(names) if keepdim or d not in dims])
        return f"{' '.join(names)} -> {', '.join([kept] * results)}"

    return build


def _renorm(x: Layout, p: Any, dim: int, limit: Any) -> str:
    names = " ".join(letters(x.ndim, [d for d in range(x.ndim) if d != dim % x.ndim]))
    return f"{names} -> {names}"


def _triangle(x: Layout, diagonal: int = 0) -> str:
    names = " ".join(letters(x.ndim, range(x.ndim - 2, x.ndim)))
    return f"{names} -> {names}"


def _histogram(x: Layout, bins: int = 100, min: float = 0, max: float = 0) -> Made | None:
    """Counts of pieces, added up; where no range is told, it is that of all elements."""
    if min == max:
        return None
    names = letters(x.ndim)
    return Made(f"{' '.join(names)} -> B", {"B": bins}, {"reduces": reduces(dict.fromkeys(names, "sum"))})


def _prims_var(x: Layout, dims: Dims, correction: float = 1, **_: Any) -> str:
    return statistic()(x, dims)


RULES = {
    **named("sum sum.dim_IntList", Rule(_reduction("sum"), options("lin=0"))),
    **named("nansum count_nonzero.dim_IntList count_nonzero prims::sum", Rule(_reduction("sum"))),
    **named("mean mean.dim", Rule(_mean, options("lin=0"))),
    **named("amax max", Rule(_reduction("max"), options("exact max=0"))),
    **named("amin min", Rule(_reduction("min"), options("exact min=0"))),
    **named("prod prod.dim_int prims::prod", Rule(_reduction("product"))),
    **named("any any.dim any.dims _is_any_true", Rule(_reduction("bor"))),
    **named("all all.dim all.dims _is_all_true", Rule(_reduction("band"))),
    **named("linalg_vector_norm", Rule(_vector_norm, options("exact reads=ord"))),
    **named("norm.Scalar norm.ScalarOpt_dim", Rule(_norm, options("exact reads=p"))),
    **named("var.correction std.correction logsumexp hash_tensor", Rule(statistic())),
    **named("prims::var", Rule(_prims_var)),
    **named("median nanmedian", Rule(statistic(), options("exact"))),
    **named("var_mean.correction std_mean.correction", Rule(statistic(2))),
    **named("aminmax", Rule(statistic(2), options("exact"))),
    **named("argmax argmin", Rule(statistic(), options("exact"))),
    **named("max.dim min.dim median.dim nanmedian.dim", Rule(statistic(2), options("exact"))),
    **named("mode", Rule(statistic(2, default=-1), options("exact"))),
    **named("kthvalue", Rule(statistic(2, position=2, default=-1), options("exact"))),
    **named("cumsum", Rule(along(), options("lin=0"))),
    **named("flip", Rule(along(name="dims"), options("moves"))),
    **named("roll", Rule(along(position=2, name="dims", default=None), options("moves"))),
    **named("cumprod logcumsumexp", Rule(along())),
    **named("sort cummax cummin", Rule(along(2), options("exact"))),
    **named("sort.stable", Rule(along(2, position=2), options("exact"))),
    **named("topk", Rule(along(2, position=2, keeps=False), options("exact"))),
    **named("renorm", Rule(_renorm)),
    **named("histc", Rule(_histogram, options("exact reads=min,max"))),
    **named("tril triu", Rule(_triangle, options("lin=0"))),
    **named("_fft_c2c _fft_r2c _fft_c2r", Rule(along(keeps=False), options("lin=0 full"))),
}
