"""Views that no rule can tell: those that change a tensor's own shape in place, and into its memory; where that is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import below_dispatch, is_view, operator_names
from torchshard.tensor.calls import guards
from torchshard.tensor.calls.first_run import local_mover
from torchshard.tensor.calls.turning import cannot_turn
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.layout import SEVERED, TensorLayout, dense_stride, layout_for
from torchshard.unsupported import unsupported

aten = torch.ops.aten


def in_place(func: Any, x: DTensor, *args: Any) -> DTensor:
    """squeeze_, unsqueeze_, t_, transpose_: `x` takes over part and layout of what the variant without _ returns."""
    name, overload = operator_names(func)
    view = getattr(getattr(aten, name[:-1]), "int" if name == "transpose_" else overload)(x, *args)
    if view._spec.marks & SEVERED and not x._spec.marks & SEVERED:
        raise cannot_turn(name, x._spec, view._spec)
    return _turned_into(x, view._local_tensor, view._spec, func, *args)


def _turned_into(x: DTensor, local: Tensor, layout: TensorLayout, func: Any, *args: Any) -> DTensor:
    """`x` with this part and layout, whose shape and strides `func` gives to the wrapper."""
    with below_dispatch():
        func(x, *args)
    x._local_tensor, x._spec = local, layout
    return x


def _is_pinned(func: Any, x: Any, device: Any = None) -> Any:
    """Whether this rank's part is in pinned memory: nobody need be asked."""
    return x._local_tensor.is_pinned() if type(x) is DTensor else NotImplemented


def _as_strided_(func: Any, x: DTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Other strides where nothing moves, of dims of length 1: so pooling says that its result is channels_last."""
    layout, local = x._spec, x._local_tensor
    if tuple(size) != layout.shape or len(stride) != layout.ndim or offset or layout.marks & SEVERED:
        return NotImplemented
    if any(n > 1 and old != new for n, old, new in zip(layout.shape, layout.stride, stride, strict=True)):
        return NotImplemented
    like = zip(local.shape, local.stride(), dense_stride(local.shape, stride), strict=True)
    turned = local.as_strided(local.shape, [new if n == 1 else old for n, old, new in like])
    told = layout_for(layout.sharding, layout.shape, tuple(stride), layout.dtype).marked(layout.marks, layout.assumed)
    return _turned_into(x, turned, told, func, size, stride)


def _as_strided(
    func: Any, x: DTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> DTensor:
    """A window on the memory that the whole tensor would have, a copy of which every rank gets; or all of it, as it is.

    An offset counts from where the memory of a view's base starts; without one, a window starts where x does.
    """
    layout, start = x._spec, offset or 0
    all_of_it = tuple(size) == layout.shape and tuple(stride) == layout.stride
    if all_of_it and (offset is None or (offset == 0 and not is_view(x))):
        return aten.alias(x) if func is aten.as_strided.default else aten.clone(x)  # type: ignore[no-any-return]
    reach = start + 1 + sum([(n - 1) * step for n, step in zip(size, stride, strict=True)])
    dense = layout.stride == dense_stride(layout.shape, layout.stride)
    if (is_view(x) and offset is not None) or not dense or (0 not in size and reach > x.numel()):
        raise unsupported(
            "as_strided looks at the memory of a tensor, which a DTensor spreads over ranks.",
            expected="a DTensor without gaps, and a window within it; no offset into a view",
            got=f"size {tuple(size)}, stride {tuple(stride)}, offset {start} of {layout}",
            fix="use indexing, unfold or expand; or as_strided on x.to_local() or x.full_tensor()",
        )
    whole = layout.to(layout.mesh.replicated())
    local, window = guards.opened(x, (local_mover(layout, whole), guards.all_of(local_mover(whole, layout))))
    seen = func(local, size, stride, start + local.storage_offset())
    out = layout_for(whole.sharding, tuple(seen.shape), tuple(seen.stride()), seen.dtype)
    if func is aten.as_strided_copy.default:
        return wrap(seen, out)
    return guards.sever(guards.new_view(DTensor, seen, out, False), window)


def _copy_(func: Any, x: DTensor, source: Any, *_: Any, **__: Any) -> Any:
    """To `x` from the view of it that an operator has just filled as its `out`: done.

    torch.matmul fills a view with fewer dims of its argument `out`, and copies it there if they share no memory (2.13).
    Wrappers do not; their parts do, or have been given back.
    """
    if type(source) is not DTensor or source.numel() != x.numel():
        return NotImplemented
    broadcasts = x.ndim >= source.ndim and x.shape[x.ndim - source.ndim :] == source.shape
    return NotImplemented if broadcasts or not guards.has_filled(source, x) else x


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "is_pinned.default": _is_pinned,
    "as_strided.default": _as_strided,
    "as_strided_.default": _as_strided_,
    "as_strided_copy.default": _as_strided,
    "copy_.default": _copy_,
    **dict.fromkeys(
        ["squeeze_.default", "squeeze_.dim", "squeeze_.dims", "unsqueeze_.default", "t_.default", "transpose_.default"],
        in_place,
    ),
}
