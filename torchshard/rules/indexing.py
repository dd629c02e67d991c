"""Operators that look up, or write, elements by index: the dim that is searched must be whole, others may be split."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from torchshard.layout.layout import Layout
from torchshard.rules.reducing import broadcast_shape, broadcasting, letters
from torchshard.rules.rule import Made, Rule, named, options, reduces
from torchshard.rules.slicing import is_all

_MASKS = ("bool", "uint8")  # dtypes of indices that are masks: what they select depends on values


def _lines(x: Layout, dim: int, index: Layout) -> tuple[list[str], list[str]] | None:
    """Dims of the searched tensor and of an index of as many dims; where the index is shorter, both must be whole."""
    if x.ndim != index.ndim or not x.ndim:
        return None
    searched, found = letters(x.ndim), letters(x.ndim)
    for d in range(x.ndim):
        if d == dim % x.ndim:
            searched[d], found[d] = "V", "g"
        elif x.shape[d] != index.shape[d]:
            searched[d], found[d] = f"X{d}", f"I{d}"
    return searched, found


def _gather(x: Layout, dim: int, index: Layout, *_: Any, **__: Any) -> str | None:
    if (lines := _lines(x, dim, index)) is None:
        return None
    searched, found = map(" ".join, lines)
    return f"{searched}, {found} -> {found}"


def _scatter(adds: bool) -> Callable[..., str | Made | None]:
    """scatter and its kin: indices along the searched dim may only be split where what they bring is added up."""

    def build(x: Layout, dim: int, index: Layout, source: Any = None, *_: Any, **__: Any) -> str | Made | None:
        if (lines := _lines(x, dim, index)) is None:
            return None
        searched, found = lines
        operands = [searched, found]
        if isinstance(source, Layout):
            if source.ndim != index.ndim:
                return None
            for d in range(x.ndim):
                if source.shape[d] != index.shape[d]:
                    found[d] = f"I{d}"
                    searched[d] = searched[d] if searched[d] == "V" else f"X{d}"
            operands.append(
                [
                    f if a == b else f"S{d}"
                    for d, (f, a, b) in enumerate(zip(found, source.shape, index.shape, strict=True))
                ]
            )
        if not adds:
            operands = [["G" if f == "g" else f for f in operand] for operand in operands]
        line = f"{', '.join(map(' '.join, operands))} -> {' '.join(searched)}"
        return Made(line, options={"reduces": reduces({"g": "sum"}), "linear": ((0, 2),), "plus": (0,)} if adds else {})

    return build


def _index_select(x: Layout, dim: int, index: Layout) -> str | None:
    if not x.ndim:
        return None
    searched, found = _at(x, dim, "V"), _at(x, dim, "g" if index.ndim else "1")
    return f"{' '.join(searched)}, {'g' if index.ndim else ''} -> {' '.join(found)}"


def _at(x: Layout, dim: int, factor: str) -> list[str]:
    names = letters(x.ndim)
    names[dim % x.ndim] = factor
    return names


def _index_write(adds: bool) -> Callable[..., str | Made | None]:
    """index_add, index_copy, index_fill: (x, dim, index, source), where the source may be a number or a scalar."""

    def build(x: Layout, dim: int, index: Layout, source: Any, *_: Any, **__: Any) -> str | Made | None:
        if not x.ndim or not index.ndim or (isinstance(source, Layout) and source.ndim not in (0, x.ndim)):
            return None
        factor = "g" if adds else "G"
        operands = [_at(x, dim, "V"), [factor]]
        if isinstance(source, Layout):
            operands.append(_at(x, dim, factor) if source.ndim else [])
        line = f"{', '.join(map(' '.join, operands))} -> {' '.join(operands[0])}"
        if adds:
            return Made(line, options={"reduces": reduces({"g": "sum"}), "linear": ((0, 2),), "plus": (0,)})
        return line

    return build


def _indexed(
    x: Layout, indices: Sequence[Layout | None], factor: str = "g"
) -> tuple[list[str], list[list[str]], list[str], dict[str, int]] | None:
    """Dims of the tensor, of each index, and of what `x[indices]` selects, and how long those of the indices are
    together; None where masks select.
    """
    given = [i for i in indices if i is not None]
    if not given or len(indices) > x.ndim or any(str(i.dtype).endswith(_MASKS) for i in given):
        return None
    if not all(map(_broadcast, zip_longest(*[reversed(i.shape) for i in given], fillvalue=1))):
        return None  # the device refuses them by another error than meta tensors do
    names = letters(x.ndim)
    at = [d for d, i in enumerate(indices) if i is not None]
    for d in at:
        names[d] = f"V{d}"
    lengths = broadcast_shape([i.shape for i in given])
    found = [f"{factor}{k}" for k in range(len(lengths))]
    operands = [broadcasting(found[len(lengths) - i.ndim :]) for i in given]
    adjacent = at[-1] - at[0] == len(at) - 1
    before = names[: at[0]] if adjacent else []
    after = [f for d, f in enumerate(names) if d not in at and not (adjacent and d < at[0])]
    return names, operands, [*before, *found, *after], dict(zip(found, lengths, strict=True))


def _broadcast(lengths: Sequence[int]) -> bool:
    others = [n for n in lengths if n != 1]
    return all(n == others[0] for n in others)


def _index(x: Layout, indices: Sequence[Layout | None]) -> str | None:
    if (lines := _indexed(x, indices)) is None:
        return None
    names, found, result, _ = lines
    return f"{', '.join(map(' '.join, [names, *found]))} -> {' '.join(result)}"


def _index_put(x: Layout, indices: Sequence[Layout | None], values: Layout, adds: bool = False, *_: Any) -> Made | None:
    lines = _indexed(x, indices, "g" if adds else "G")
    if lines is None or values.ndim > len(lines[2]):
        return None
    names, found, result, sizes = lines
    operands = [names, *found, broadcasting(result[len(result) - values.ndim :])]
    line = f"{', '.join(map(' '.join, operands))} -> {' '.join(names)}"
    # Values that broadcast would be added once a rank.
    sums = dict.fromkeys(sizes, "sum") if adds else {}
    more: dict[str, Any] = {"linear": ((0, len(operands) - 1),), "reduces": reduces(sums), "plus": (0,)}
    return Made(line, sizes, options=more)


def _take(x: Layout, index: Layout) -> str:
    return f"{' '.join(letters(x.ndim, range(x.ndim)))}, ... -> ..."


def _searchsorted(ordered: Layout, x: Layout, *, sorter: Layout | None = None, **_: Any) -> str:
    lead = letters(ordered.ndim - 1)
    rows = " ".join([*lead, "B"])
    result = " ".join([*lead, "v"]) if lead else "..."
    return f"{rows}, {result}{f', {rows}' if sorter is not None else ''} -> {result}"


def _isin(x: Layout, among: Layout, **_: Any) -> str:
    return f"..., {' '.join(letters(among.ndim, range(among.ndim)))} -> ..."


def _select_scatter(x: Layout, source: Layout, dim: int, *_: Any) -> str | None:
    if not x.ndim:
        return None
    names = _at(x, dim, "V")
    return f"{' '.join(names)}, {' '.join([f for f in names if f != 'V'])} -> {' '.join(names)}"


def _slice_scatter(x: Layout, source: Layout, dim: int = 0, *cut: Any, **named_cut: Any) -> str | None:
    if not x.ndim:
        return None
    if is_all(x.shape[dim % x.ndim], *cut, **named_cut) and x.shape == source.shape:
        names = " ".join(letters(x.ndim))
        return f"{names}, {names} -> {names}"
    names = " ".join(_at(x, dim, "V"))
    return f"{names}, {' '.join(_at(x, dim, 'W'))} -> {names}"


def _diagonal_scatter(x: Layout, source: Layout, offset: int = 0, one: int = 0, other: int = 1) -> str | None:
    if x.ndim < 2:
        return None
    dims = one % x.ndim, other % x.ndim
    names = letters(x.ndim, dims)
    lead = [f for d, f in enumerate(names) if d not in dims]
    return f"{' '.join(names)}, {' '.join([*lead, 'W'])} -> {' '.join(names)}"


RULES = {
    **named("gather", Rule(_gather, options("lin=0"))),
    **named("scatter.src scatter.value scatter.reduce scatter.value_reduce", Rule(_scatter(False))),
    **named("scatter_reduce.two", Rule(_scatter(False), options("exact"))),
    **named("scatter_add", Rule(_scatter(True))),
    **named("index_select", Rule(_index_select, options("lin=0"))),
    **named("index_add", Rule(_index_write(True))),
    **named("index_copy index_fill.int_Scalar index_fill.int_Tensor", Rule(_index_write(False))),
    **named("index_reduce", Rule(_index_write(False), options("exact"))),
    **named("index.Tensor _unsafe_index.Tensor", Rule(_index, options("lin=0"))),
    **named("index_put _unsafe_index_put", Rule(_index_put)),
    **named("take", Rule(_take, options("lin=0"))),
    **named("searchsorted.Tensor", Rule(_searchsorted, options("exact"))),
    **named("isin.Tensor_Tensor", Rule(_isin, options("exact"))),
    **named("select_scatter", Rule(_select_scatter, options("lin=0+1"))),
    **named("slice_scatter", Rule(_slice_scatter, options("lin=0+1"))),
    **named("diagonal_scatter", Rule(_diagonal_scatter, options("lin=0+1"))),
}
