"""Gradients of the other kind: plain ones of DTensors, DTensors of plain scalars; hooks at the operands turn them over.

Formulas of autograd that go by sizes alone make plain zeros (that of sgn), and what a plain tensor that a DTensor was
written to hands back to it is plain, too. Both are the same on every rank. A gradient that is to lie as its tensor does
is brought there.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from torchshard._torch import skip_alone
from torchshard.tensor.dtensor import DTensor, dtensors_in
from torchshard.tensor.layout import TensorLayout

if TYPE_CHECKING:
    from torchshard.tensor.calls.call import Call


def _operands(names: str, *arguments: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names.split(), arguments)


# Operator -> operands whose gradients are zeros made of their sizes; gradients of poolings and paddings have such in
# second derivatives.
_OF_SIZES: Mapping[str, tuple[str, ...]] = {
    **_operands("sgn sgn_ repeat poisson", "self"),
    **_operands("copysign copysign_ nextafter nextafter_", "other"),
    **_operands("eq_ ne_ lt_ le_ gt_ ge_", "self", "other"),
    **_operands("normal", "mean", "std"),
    **_operands("bernoulli_", "p"),
    **_operands("avg_pool2d_backward avg_pool3d_backward max_pool2d_backward max_pool2d_with_indices_backward", "self"),
    **_operands("max_pool3d_with_indices_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward", "self"),
    **_operands("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward", "self"),
    **_operands("fractional_max_pool2d_backward fractional_max_pool3d_backward", "self"),
    **_operands("reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward", "self"),
    **_operands("replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward", "self"),
}


def expecting(plan: Callable[..., Any] | None, call: "Call") -> Callable[..., Any] | None:
    """The plan of a call that has just been run, if there is one: which sees to it that gradients of DTensors among its
    arguments are DTensors, as has been done for that call.
    """
    to_plain = any(isinstance(x, Tensor) and type(x) is not DTensor for x in [call.values[at] for at in call.written()])
    of_sizes = _OF_SIZES.get(call.name.partition(".")[0], ())
    ats = [at for at, name in enumerate(call.names) if to_plain or name in of_sizes]
    if not ats:
        return plan
    _expect(call.values, ats)
    if plan is None:
        return None

    def run(*values: Any) -> Any:
        result = plan(*values)
        _expect(values, ats)
        return result

    return run


def _expect(values: Sequence[Any], ats: Iterable[int]) -> None:
    if torch.is_grad_enabled():
        for x in dtensors_in([values[at] for at in ats]):
            if x.requires_grad:
                _hook(x, functools.partial(_distributed, x._spec))


@skip_alone
def _distributed(layout: TensorLayout, gradient: Tensor) -> Tensor:
    """The gradient of a tensor of this layout; differentiable."""
    if type(gradient) is DTensor:
        return gradient
    from torchshard.tensor.gradients import autograd

    return autograd.redistribute(autograd.of_replicas(gradient, layout.mesh), layout.sharding.without_partial())


def bring_back(x: DTensor) -> None:
    """See to it that the gradient of a tensor, which is Partial nowhere, lies as the tensor does."""
    if x.requires_grad and torch.is_grad_enabled():
        _hook(x, functools.partial(_brought, x._spec))


@skip_alone
def _brought(layout: TensorLayout, gradient: Tensor) -> Tensor:
    from torchshard.tensor.gradients import autograd

    if tuple(gradient.shape) != tuple(layout.shape):  # x.data is another tensor by now
        return gradient
    return autograd.redistribute(_distributed(layout, gradient), layout.sharding)  # type: ignore[arg-type]


def expect_plain(scalar: Tensor) -> None:
    """See to it that the gradient of a plain scalar that stands beside DTensors is plain."""
    if scalar.requires_grad and torch.is_grad_enabled():
        _hook(scalar, _plain)


@skip_alone
def _plain(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if type(gradient) is DTensor else gradient


_hooked: "WeakValueDictionary[tuple[Any, int, int], Tensor]" = WeakValueDictionary()
"""Tensors that have their hook, by what it does, by address, and by version where writing gave them another history."""
_handles: dict[tuple[Any, int], RemovableHandle] = {}
"""Hooks of leaves that are DTensors, by address: modules swap parameters, which nothing may refer to weakly then."""


def _hook(x: Tensor, turned_over: Callable[[Tensor], Tensor]) -> None:
    """Give a tensor the hook, once; more than one would do no harm."""
    unserializable_hook(turned_over)  # files are to be written without a warning of it
    does = getattr(turned_over, "func", turned_over)
    if type(x) is DTensor and x.is_leaf:
        if (before := _handles.get((does, id(x)))) is not None:
            before.remove()
        _handles[does, id(x)] = x.register_hook(turned_over)  # type: ignore[no-untyped-call]
        return
    key = does, id(x), 0 if x.is_leaf else x._version
    if key not in _hooked:
        _hooked[key] = x
        x.register_hook(turned_over)
