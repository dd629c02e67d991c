"""Where gradients cross: between local tensors and DTensors, and between layouts.

The gradient of a tensor that is Partial along an axis is replicated there: each term of a sum gets the whole gradient.
(A term of an average gets its share of it; terms of max, min or a product get what depends on values that only the
other ranks have, which is refused.)

Where there is no gradient, none is handed on: autograd would make zeros of it, plain ones also for a DTensor, and an
optimizer steps a parameter that has zeros, but not one that has none.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchshard._torch import exported_whole, in_forward_ad, in_transform, is_traced, skip_methods
from torchshard.comm import collectives
from torchshard.errors import ShardingError
from torchshard.layout.layout import Mesh, Sharding, contiguous_stride
from torchshard.layout.placements import Partial, R
from torchshard.rules.terms import is_whole_number
from torchshard.tensor.calls.guards import refresh
from torchshard.tensor.calls.plain import refuse_plain
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.gradients.other_kind import bring_back
from torchshard.tensor.layout import (
    TURNED,
    TensorLayout,
    dense_stride,
    layout_for,
    require_strided,
    same_order,
)
from torchshard.tensor.mesh import BoundMesh, bind
from torchshard.tensor.modes import replicates_plain_tensors
from torchshard.tensor.moving.once import brought
from torchshard.tensor.moving.pending import pending
from torchshard.tensor.moving.redistribute import (
    in_memory_order,
    moved,
    redistribute_later,
    redistribute_local,
)
from torchshard.tensor.regions.caching import one_node
from torchshard.tensor.sizes import asked_layout, check_part, even_layout, even_shape
from torchshard.tensor.torch_placements import from_torch, or_replicated
from torchshard.unsupported import unsupported


@skip_methods()
class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: DTensor,
        target: Sharding,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
        async_op: bool,
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        refresh(x)
        source = x._spec
        ctx.source, ctx.backward_dtype, ctx.async_op = source, backward_dtype, async_op
        local = x._local_tensor
        if forward_dtype is not None and forward_dtype is not source.dtype:
            _require_terms_survive(source, forward_dtype)
            local = local.to(forward_dtype)
            source = layout_for(source.sharding, source.shape, source.stride, forward_dtype).marked(
                source.marks, source.assumed
            )
        layout = source if target is source.sharding else source.to(target)
        ctx.target, ctx.dtype = target, layout.dtype
        if async_op:
            part = redistribute_later(local, source, layout)
        elif local is x._local_tensor:
            part = brought(x, source, layout)
        else:
            part = redistribute_local(local, source, layout)
        layout = moved(source, layout)
        return wrap(part, layout.with_marks(source.terms) if source.marks else layout)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:
        if grad is None:
            return None, None, None, None, None
        # By way of redistribute alone, so that it can be differentiated again, and so that a rank outside of the mesh
        # takes part, too.
        source: TensorLayout = ctx.source
        grad = distributed(grad, source.mesh)
        target, sent_as = source.sharding.without_partial(), ctx.backward_dtype or source.dtype
        back = redistribute(grad, target, sent_as, async_op=ctx.async_op)
        return redistribute(back, target, source.dtype), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: DTensor, *_: None) -> DTensor:
        return redistribute(tangent, ctx.target, ctx.dtype, async_op=ctx.async_op)


def _require_terms_survive(layout: TensorLayout, dtype: torch.dtype) -> None:
    """Raise ShardingError where a conversion of the terms of a Partial is none of their reduction."""
    kinds = {p.op for p in layout.placements if isinstance(p, Partial)}
    wraps = is_whole_number(layout.dtype) and not kinds <= {"max", "min"}
    if kinds and (wraps or _kind(dtype) < _kind(layout.dtype)):
        raise ShardingError(
            "The terms of a Partial tensor cannot be converted before they are reduced.",
            expected=f"a forward_dtype that holds fractions and signs as {layout.dtype} does"
            if not wraps
            else f"none: {layout.dtype} may wrap when the terms are added",
            got=dtype,
            where=layout.sharding,
            fix=f"x.redistribute(placements=placements).to({dtype})",
        )


def _kind(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1


@skip_methods()
class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: Sequence[TorchPlacement] | Sharding | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.placements = x._spec, placements
        local = x._local_tensor
        return local.view_as(local)  # its own tensor: history must not land on the part itself

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        layout: TensorLayout = ctx.layout
        sharding = ctx.placements
        if sharding is None:
            sharding = layout.sharding_of_gradient
        elif not isinstance(sharding, Sharding):
            sharding = from_torch(sharding, layout.mesh, layout.shape)
        # In the order of the tensor's own strides: those of a short piece's gradient may not be those on other ranks.
        traced = is_traced(grad)
        like = grad.stride() if traced and grad.ndim == layout.ndim else layout.stride
        target = layout_for(sharding, layout.shape, dense_stride(layout.shape, like), grad.dtype)
        check_part(grad, target)
        if not traced and not same_order(grad.shape, grad.stride(), target.stride):
            grad = in_memory_order(grad, target)
        return _FromLocal.apply(grad, target, None), None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: DTensor, _: None) -> Tensor:
        sharding: Sharding = ctx.layout.sharding
        _require_sums(sharding)
        if sharding.partial and tangent._spec.sharding is not sharding:
            raise unsupported(
                "The tangent of a Partial DTensor has other terms, so none of them is that of this rank's term.",
                expected=sharding,
                got=tangent._spec.sharding,
                where="to_local, under forward AD",
                fix="redistribute before to_local",
            )
        return to_local(redistribute(tangent, sharding), None)


@skip_methods()
class _PartIn(torch.autograd.Function):
    """redistribute and to_local in one; what comes is nobody else's, and no view, so it may be written to."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, target: Sharding) -> Tensor:
        ctx.set_materialize_grads(False)
        refresh(x)
        source = ctx.source = x._spec
        layout = source.to(target)
        ctx.layout, ctx.placements, ctx.backward_dtype, ctx.async_op = moved(source, layout), None, None, False
        return brought(x, source, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        part, _ = _ToLocal.backward(ctx, grad)
        return _Redistribute.backward(ctx, part)[0], None

    @staticmethod
    def jvp(ctx: Any, tangent: DTensor, _: None) -> Tensor:
        return to_local(redistribute(tangent, ctx.layout.sharding), None)


@skip_methods()
class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, layout: TensorLayout, grad_sharding: Sharding | None, of_first: bool = False
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.grad_sharding, ctx.of_first = layout, grad_sharding, of_first
        local = pending(local.detach())  # history belongs to the wrapper
        return wrap(_first_replica(local, layout) if of_first else local, layout)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        sharding: Sharding = ctx.layout.sharding
        target = ctx.grad_sharding or sharding.without_partial()
        local = redistribute(distributed(grad, sharding.mesh), target).to_local()
        return _of_terms(local, sharding), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> DTensor:
        layout: TensorLayout = ctx.layout.marked(0)  # it may lie in memory as the value does not
        _require_sums(layout.sharding)
        tangent = _first_replica(tangent, layout) if ctx.of_first else tangent
        return over(in_memory_order(tangent, layout), layout)


def distributed(grad: Tensor, mesh: Mesh) -> DTensor:
    """A gradient as a DTensor; plain ones come from users: from calls of backward(), functions and hooks.

    Raises:
        UnsupportedOperatorError: it is plain and no scalar, and implicit_replication() is not on.
    """
    if type(grad) is DTensor:
        return grad
    if grad.ndim and not replicates_plain_tensors():
        raise refuse_plain("backward", "gradient", grad)
    return of_replicas(grad, mesh)


def of_replicas(x: Tensor, mesh: Mesh) -> DTensor:
    """A DTensor of copies of a plain tensor, which is the same on every rank; differentiable."""
    local = x.clone(memory_format=torch.contiguous_format)  # of zeros that have no memory, too
    layout = layout_for(mesh.replicated(), tuple(x.shape), local.stride(), x.dtype)
    return over(local if mesh.coordinate is not None else local.new_empty(0), layout)


def _of_terms(grad: Tensor, sharding: Sharding) -> Tensor:
    """The gradient of this rank's terms, from that of their reduction."""
    for axis in sharding.partial:
        placement = sharding.placements[axis]
        assert isinstance(placement, Partial), f"axis {axis} of {sharding} is not Partial"
        if placement.op == "avg":
            grad = grad / sharding.mesh.shape[axis]
        elif placement.op != "sum":
            raise unsupported(
                f"No gradient passes from a Partial({placement.op!r}) DTensor to the local tensor that it was made of.",
                expected="Shard, Replicate, Partial('sum') or Partial('avg') where gradients are wanted",
                got=sharding,
                fix="reduce before from_local, or detach the local tensor",
            )
    return grad


def _require_sums(sharding: Sharding) -> None:
    """Refuse tangents of terms, where what is made of them is not linear in them."""
    if not {p.op for p in sharding.placements if isinstance(p, Partial)} <= {"sum", "avg"}:
        raise unsupported(
            "No tangent passes between a DTensor and terms that are not added.",
            expected="Shard, Replicate, Partial('sum') or Partial('avg') where tangents are wanted",
            got=sharding,
            where="from_local or to_local, under forward AD",
            fix="reduce before from_local, redistribute before to_local",
        )


class _Unfollowed(SimpleNamespace):
    """What a forward that autograd does not follow writes to."""

    def set_materialize_grads(self, value: bool) -> None: ...


def _follows() -> bool:
    """Whether autograd follows what is done now: for a backward, or with tangents, which no_grad() does not end."""
    return torch.is_grad_enabled() or in_forward_ad()


def redistribute(
    x: DTensor,
    target: Sharding,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
    asked: bool = False,
) -> DTensor:
    """See DTensor.redistribute; returns `x` itself where nothing changes.

    If the user has `asked` for it, the gradient is then brought to where the tensor lies, unless it is Partial.
    """
    source = x._spec
    same_dtypes = forward_dtype in (None, source.dtype) and backward_dtype in (None, source.dtype)
    if source.sharding is target and same_dtypes:
        if asked and not target.partial:
            bring_back(x)
        return x
    return _redistributed(x, target, forward_dtype, backward_dtype, async_op)


def whole(x: DTensor, grad_placements: Sequence[TorchPlacement] | None) -> DTensor:
    """The tensor, whole on every rank, as the user has asked for it with such a gradient.

    One that comes back whole lies as the tensor does, and what other uses of the tensor give is to stay as it is.
    """
    return redistribute(x, x._spec.mesh.replicated(), asked=grad_placements is not None)


@exported_whole
def _redistributed(x: DTensor, *how: Any) -> DTensor:
    if not _follows():
        return _Redistribute.forward(_Unfollowed(), x, *how)
    return _Redistribute.apply(x, *how)  # type: ignore[no-any-return, no-untyped-call]


def to_local(x: DTensor, grad_placements: Sequence[TorchPlacement] | Sharding | None) -> Tensor:
    """See DTensor.to_local; a gradient may also be said to come in a sharding."""
    refresh(x)
    if not _follows():
        return x._local_tensor
    return _part(x, grad_placements)


@exported_whole
def _part(x: DTensor, grad_placements: Sequence[TorchPlacement] | Sharding | None) -> Tensor:
    return _ToLocal.apply(x, grad_placements)  # type: ignore[no-any-return, no-untyped-call]


def part_in(x: DTensor, placements: Sequence[TorchPlacement]) -> Tensor:
    """This rank's part with these placements: that of x itself, or a tensor of its own, which may be written to."""
    source = x._spec
    target = from_torch(placements, source.mesh, source.shape)
    if target is source.sharding or source.mesh.coordinate is None or not _follows() or is_traced(x._local_tensor):
        return to_local(redistribute(x, target), None)
    return _PartIn.apply(x, target)  # type: ignore[no-any-return, no-untyped-call]


@one_node
@exported_whole
def from_local(
    local: Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[TorchPlacement] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[TorchPlacement] | None,
    tied: str | None,
) -> DTensor:
    """See DTensor.from_local; and caching.tie."""
    if isinstance(local, DTensor):
        raise RuntimeError("from_local takes a plain torch.Tensor, and this is a DTensor; use redistribute")
    if in_transform():
        raise unsupported(
            "A DTensor cannot be made inside of torch.func, which stands plain tensors in for DTensors.",
            expected="from_local, or a module with a plan, outside of grad, vjp and the other transforms",
            got=f"from_local of a tensor of shape {tuple(local.shape)} inside",
            fix="take derivatives by torch.autograd.grad, with create_graph=True for the second",
        )
    if (shape is None) != (stride is None):
        dense = "" if shape is None else f"; that of a contiguous tensor is {contiguous_stride(tuple(shape))}"
        raise RuntimeError(f"from_local takes shape and stride together; got shape={shape}, stride={stride}{dense}")
    mesh = bind(device_mesh)
    require_strided(local, "from_local")
    if local.device.type != device_mesh.device_type and not local.is_meta:
        local = local.to(device_mesh.device_type)
    given = or_replicated(placements, mesh)
    even = even_shape(local, given, mesh) if shape is None else shape
    sharding = from_torch(given, mesh, even, known=shape is not None)
    if mesh.coordinate is None:
        shape, stride = even, dense_stride(even, local.stride()) if stride is None else stride
        local = local.new_empty(0)
    if run_check:
        layout = asked_layout(local, sharding, shape, stride)
    elif shape is not None and stride is not None:
        layout = layout_for(sharding, tuple(shape), tuple(stride), local.dtype)
        check_part(local, layout)
    else:
        layout = even_layout(local, sharding, even)
    shares = not (run_check and R in sharding.placements)  # else it gets a copy of the first replica
    if shares and not same_order(local.shape, local.stride(), layout.stride):
        layout = layout.marked(TURNED)
    grad_sharding = None if grad_placements is None else from_torch(grad_placements, mesh, layout.shape)
    return _FromLocal.apply(local, layout, grad_sharding, run_check)  # type: ignore[no-any-return, no-untyped-call]


def over(local: Tensor, layout: TensorLayout) -> DTensor:
    """The DTensor of a known layout whose part on this rank is `local`; differentiable, nothing is checked."""
    if not _follows():
        return wrap(pending(local.detach()), layout)
    return _FromLocal.apply(local, layout, None)  # type: ignore[no-any-return, no-untyped-call]


def _first_replica(local: Tensor, layout: TensorLayout) -> Tensor:
    """The values of the first rank along each replicated axis."""
    sharding, mesh = layout.sharding, layout.mesh
    assert isinstance(mesh, BoundMesh), "a sharding that belongs to no DeviceMesh"
    first = local
    for axis, placement in enumerate(sharding.placements):
        if placement is R:
            first = collectives.broadcast(first, 0, mesh.group((axis,)))
    return first if first is local else in_memory_order(first, layout)
