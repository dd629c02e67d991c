"""Operators that eliminate dims, or need some of them whole."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torchshard.layout.layout import Layout
from torchshard.rules.rule import Made, Rule, named, options, reduces

Dims = int | Sequence[int] | None


def letters(ndim: int, whole: Sequence[int] = ()) -> list[str]:
    """A factor for each dim: a, b, c, ..., in upper case for dims that must be whole."""
    return [chr(ord("A" if d in whole else "a") + d) for d in range(ndim)]


def dims_of(dim: Dims, ndim: int) -> list[int]:
    """Dims as torch means them: negative ones from the end; all for None and for an empty list."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return list(range(ndim))
    return [d % max(ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)] if ndim else []


def _eliminated(x: Layout, dims: Sequence[int], keepdim: bool) -> str:
    names = letters(x.ndim)
    kept = ["1" if d in dims else f for d, f in enumerate(names) if keepdim or d not in dims]
    return f"{' '.join(names)} -> {' '.join(kept)}"


def _reduction(op: str) -> Callable[..., Made]:
    def build(x: Layout, dim: Dims = None, keepdim: bool = False, **_: Any) -> Made:
        dims = dims_of(dim, x.ndim)
        gone = reduces({f: op for d, f in enumerate(letters(x.ndim)) if d in dims})
        return Made(_eliminated(x, dims, keepdim), options={"reduces": gone})

    return build


def _mean(x: Layout, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Made:
    """A mean over pieces of unequal size: each rank's mean, weighted with its share of the elements, then summed."""
    dims = dims_of(dim, x.ndim)
    count = math.prod([x.shape[d] for d in dims])

    def weighted(t: Any, *_: Any, **__: Any) -> Any:
        held = math.prod([t.shape[d] for d in dims])
        if held == count:
            return t.mean(dims, keepdim, dtype=dtype)
        return t.mean(dims, keepdim, dtype=dtype) * (held / count) if held else t.sum(dims, keepdim, dtype=dtype)

    gone = reduces({f: "sum" for d, f in enumerate(letters(x.ndim)) if d in dims})
    return Made(_eliminated(x, dims, keepdim), options={"reduces": gone}, local=weighted if x.ndim else None)


def _vector_norm(x: Layout, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Made:
    dims = dims_of(dim, x.ndim)
    # Norms are not negative, so these orders have a plain reduction; max and min of nothing are taken care of there.
    op = {0.0: "sum", 1.0: "sum", math.inf: "max", -math.inf: "min"}.get(float(ord), f"norm({float(ord)})")
    gone = reduces({f: op for d, f in enumerate(letters(x.ndim)) if d in dims})
    return Made(_eliminated(x, dims, keepdim), options={"reduces": gone})


def _along(results: int) -> Callable[..., str]:
    """Each line along `dim` is handled as a whole; results have the shape of the operand, or lack or shorten dim."""

    def build(x: Layout, *args: Any, **kwargs: Any) -> str:
        ints = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
        names = letters(x.ndim, dims_of(kwargs.get("dim", ints[0] if ints else -1), x.ndim))
        return f"{' '.join(names)} -> {', '.join([' '.join(names)] * results)}"

    return build


def _extreme(x: Layout, dim: int, keepdim: bool = False) -> str:
    """max.dim and min.dim: values and indices."""
    dims = dims_of(dim, x.ndim)
    names = letters(x.ndim, dims)
    kept = " ".join(["1" if d in dims else f for d, f in enumerate(names) if keepdim or d not in dims])
    return f"{' '.join(names)} -> {kept}, {kept}"


def _arg_extreme(x: Layout, dim: int | None = None, keepdim: bool = False) -> str:
    dims = dims_of(dim, x.ndim)
    names = letters(x.ndim, dims)
    kept = " ".join(["1" if d in dims else f for d, f in enumerate(names) if keepdim or d not in dims])
    return f"{' '.join(names)} -> {kept}"


def _topk(x: Layout, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> str:
    dims = dims_of(dim, x.ndim)
    names = letters(x.ndim, dims)
    kept = " ".join(["Z" if d in dims else f for d, f in enumerate(names)])
    return f"{' '.join(names)} -> {kept}, {kept}"


def _triangle(x: Layout, diagonal: int = 0) -> str:
    names = " ".join(letters(x.ndim, range(x.ndim - 2, x.ndim)))
    return f"{names} -> {names}"


RULES = {
    **named("sum sum.dim_IntList", Rule(_reduction("sum"), options("lin=0"))),
    **named("mean mean.dim", Rule(_mean, options("lin=0"))),
    **named("amax max", Rule(_reduction("max"))),
    **named("amin min", Rule(_reduction("min"))),
    **named("prod", Rule(_reduction("product"))),
    **named("any any.dim any.dims", Rule(_reduction("bor"))),
    **named("all all.dim all.dims", Rule(_reduction("band"))),
    **named("linalg_vector_norm", Rule(_vector_norm, options("reads=ord"))),
    **named("cumsum", Rule(_along(1), options("lin=0"))),
    **named("cumprod logcumsumexp", Rule(_along(1))),
    **named("sort", Rule(_along(2))),
    **named("max.dim min.dim", Rule(_extreme)),
    **named("argmax argmin", Rule(_arg_extreme)),
    **named("topk", Rule(_topk)),
    **named("tril triu", Rule(_triangle, options("lin=0"))),
}
