"""Methods that change the shape of a tensor in place, where views of it or of its base are about."""

from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from torchshard import _torch
from torchshard.errors import UnsupportedOperatorError
from torchshard.tensor.layout import SEVERED, TensorLayout
from torchshard.unsupported import unsupported

_T = TypeVar("_T")


@_torch.skip_methods()
class TurnsInPlace:
    """The methods of a tensor that change its shape in place.

    Where a view or its base has been written to, autograd finds the history of the view by making it again: a plain
    tensor by the strides that it has now, a wrapper by the operators that once made it, which know of no change of
    shape since, be it of the view or of the base. So there the object comes to stand for a view of what it was: another
    tensor under the same name, while the old one remains the base that others know.
    """

    __slots__ = ()

    def t_(self) -> Self:
        """t(), in place."""
        return _turned(self, "t_")

    def transpose_(self, dim0: int, dim1: int) -> Self:
        """transpose(), in place."""
        return _turned(self, "transpose_", dim0, dim1)

    def swapaxes_(self, axis0: int, axis1: int) -> Self:
        """transpose(), in place."""
        return _turned(self, "transpose_", axis0, axis1)

    def swapdims_(self, dim0: int, dim1: int) -> Self:
        """transpose(), in place."""
        return _turned(self, "transpose_", dim0, dim1)

    def squeeze_(self, *dim: Any, **named: Any) -> Self:
        """squeeze(), in place."""
        return _turned(self, "squeeze_", *dim, **named)

    def unsqueeze_(self, dim: int) -> Self:
        """unsqueeze(), in place."""
        return _turned(self, "unsqueeze_", dim)


def cannot_turn(name: str, layout: TensorLayout, turned: TensorLayout) -> UnsupportedOperatorError:
    """The refusal of a change of shape that moves what it changes."""
    return unsupported(
        f"{name} would have to move a DTensor to change its shape in place.",
        expected="a change of shape that leaves the pieces where they are",
        got=f"{layout} to {turned}",
        fix=f"use the variant without the underscore: {name.rstrip('_')}",
    )


def _leaf_in_use(name: str, layout: TensorLayout) -> UnsupportedOperatorError:
    """The refusal for a leaf, which cannot come to stand for a view: it is where gradients arrive."""
    return unsupported(
        f"{name} of a leaf whose views, or results that want it for their backward, are still about.",
        expected="a leaf that nothing else refers to",
        got=str(layout),
        fix=f"call {name} before anything is made of it, or {name.rstrip('_')}() for a view of the other shape",
    )


def _turned(x: _T, name: str, *args: Any, **kwargs: Any) -> _T:
    tensor: Any = x
    leaf = tensor.is_leaf and tensor.requires_grad
    alone = not _torch.is_view(tensor) and not _torch.is_referred_to(tensor)
    traced = _torch.is_traced(tensor._local_tensor)
    if leaf and not (alone or traced or torch.is_grad_enabled()):  # with gradients on, torch refuses a leaf
        raise _leaf_in_use(name, tensor._spec)
    if leaf or alone or traced or tensor.is_inference():
        getattr(Tensor, name)(tensor, *args, **kwargs)
        return x
    with torch.set_grad_enabled(torch.is_grad_enabled() or tensor.requires_grad):
        view = getattr(Tensor, name[:-1])(tensor, *args, **kwargs)
    if view._spec.marks & SEVERED and not tensor._spec.marks & SEVERED:
        raise cannot_turn(name, tensor._spec, view._spec)
    retained = tensor.retains_grad
    _torch.exchange(tensor, view)
    torch.autograd.graph.increment_version(tensor)
    if retained:
        tensor.retain_grad()
    return x
