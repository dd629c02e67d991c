"""Random operators: the same tensor for every layout, the one that a single device would have drawn.

All ranks take the generator of the mesh's first rank, draw the whole tensor and keep their part. That costs the memory
of the whole tensor for a moment, and one small broadcast where ranks do not know that their generators are alike. A
graph cannot take over a generator: there every rank draws, and takes what the first one has drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import is_traced
from torchshard.comm import collectives
from torchshard.comm.comparing import known_alike
from torchshard.layout import contiguous_stride
from torchshard.tensor.calls.guards import refuse_overlapping
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.gradients.autograd import redistribute
from torchshard.tensor.handlers.parts import EagerAlone
from torchshard.tensor.layout import TensorLayout, kept_stride, layout_for
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.moving.redistribute import in_memory_order, redistribute_local

aten = torch.ops.aten


def draw(
    layout: TensorLayout,
    device: torch.device,
    fill: Callable[[Tensor], Tensor],
    generator: torch.Generator | None = None,
) -> DTensor:
    """A DTensor of `layout` (without Partial) whose whole is what `fill` makes of an empty tensor, on every rank alike.

    The generator (by default the device's own) ends on every rank in the state that the first rank's has afterwards.
    """
    if layout.mesh.coordinate is None:
        return wrap(torch.empty(0, dtype=layout.dtype, device=device), layout)
    empty = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)
    whole = _filled(empty, layout, fill, generator)
    layout = layout_for(layout.sharding, layout.shape, layout.stride, whole.dtype)
    return wrap(redistribute_local(whole, layout.to(layout.mesh.replicated()), layout), layout)


def _filled(
    whole: Tensor, layout: TensorLayout, fill: Callable[[Tensor], Tensor], generator: torch.Generator | None
) -> Tensor:
    """What `fill` makes of a whole tensor, on every rank alike."""
    mesh = layout.mesh
    assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
    if not (traced := is_traced(whole)):
        agree_on_generator(mesh, whole.device, generator)
    whole = fill(whole)
    return collectives.broadcast(whole, 0, mesh.everyone) if traced and mesh.size > 1 else whole


def agree_on_generator(mesh: BoundMesh, device: torch.device, generator: torch.Generator | None) -> None:
    """Give every rank of the mesh the state of its first rank's generator."""
    if mesh.size == 1 or mesh.coordinate is None:
        return
    state = _state_of(device) if generator is None else generator.get_state()
    everywhere = tuple(range(mesh.ndim))
    if known_alike(state.numpy().tobytes(), device, mesh.process_group(everywhere)):
        return
    state = collectives.broadcast(state.to(device, non_blocking=True), 0, mesh.everyone).cpu()
    if generator is not None:
        generator.set_state(state)
    elif device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _state_of(device: torch.device) -> Tensor:
    """Of the generator that draws there; the current device need not be the one that the tensors are on."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _plain_layout(x: DTensor, strides: Callable[..., Sequence[int]] = kept_stride) -> TensorLayout:
    """The layout of x, without Partial, in the memory that `strides` makes of its own (shape and strides)."""
    layout = x._spec
    return layout_for(
        layout.sharding.without_partial(), layout.shape, strides(layout.shape, layout.stride), layout.dtype
    )


def _fill(func: Any, x: DTensor, *args: Any, generator: torch.Generator | None = None) -> DTensor:
    """uniform_, normal_ and their kin: the values do not depend on what was there."""
    refuse_overlapping(x._spec)
    layout, local = x._spec, x._local_tensor
    if layout.mesh.coordinate is None:
        return x

    def fill(whole: Tensor) -> Tensor:
        return func(whole, *args, generator=generator)  # type: ignore[no-any-return]

    everywhere = layout.to(layout.mesh.replicated())
    if layout is everywhere and not is_traced(local) and local.stride() == layout.stride:
        _filled(local, layout, fill, generator)
        return x
    # What is drawn depends on the strides of the whole.
    empty = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=local.device)
    local.copy_(redistribute_local(_filled(empty, layout, fill, generator), everywhere, layout, reading=True))
    return x


def _like(func: Any, x: DTensor, *args: Any, dtype: Any = None, memory_format: Any = None, **others: Any) -> Any:
    """rand_like and its kin; what is wanted of another kind or device is drawn whole."""
    usual = {"layout": torch.strided, "pin_memory": False, "device": x.device}
    if any(value not in (None, usual[name]) for name, value in others.items()):
        return NotImplemented
    layout = _plain_layout(x, _strides_in(memory_format))
    layout = layout_for(layout.sharding, layout.shape, layout.stride, dtype or layout.dtype)
    return draw(layout, x._local_tensor.device, lambda whole: func(whole, *args))


def _strides_in(memory_format: torch.memory_format | None) -> Callable[..., Sequence[int]]:
    """The strides, from shape and strides, of what is made like a tensor in this format."""
    if memory_format in (None, torch.preserve_format):
        return kept_stride
    return lambda shape, _: torch.empty(shape, device="meta", memory_format=memory_format).stride()


def _dropout(func: Any, x: DTensor, p: float, train: bool | None) -> Any:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    layout, local, scale = _plain_layout(x), x._local_tensor, 0.0 if p == 1 else 1 / (1 - p)
    kept = draw(layout, local.device, lambda whole: func(whole, p, True)[1])
    if x._spec.sharding.partial or x._spec.marks or x._spec.mesh.coordinate is None or is_traced(local):
        return x * kept * scale, kept
    scaled = torch.mul(local, kept._local_tensor).mul_(scale)  # in one step, as no operand has to move
    return wrap(in_memory_order(scaled, layout), layout.marked(assumed=x._spec.assumed)), kept


def _bernoulli(func: Any, x: DTensor, *args: Any, generator: torch.Generator | None = None) -> DTensor:
    """Each element with its own chance, or all with one."""
    whole = redistribute(x, x._spec.mesh.replicated())._local_tensor
    layout = _plain_layout(x, lambda shape, _: contiguous_stride(shape))
    return draw(layout, whole.device, lambda _: func(whole, *args, generator=generator), generator)


def _normal(func: Any, mean: Any, std: Any = 1.0, generator: torch.Generator | None = None) -> Any:
    """As kernels have it: standard numbers, or of the deviation that all have, stretched and then shifted."""
    given = [x for x in (mean, std) if type(x) is DTensor]
    shape = torch.broadcast_shapes(*[x.shape for x in given])
    like, many = next((x for x in given if x.shape == shape), None), type(std) is DTensor
    if like is None or any(x.dtype != like.dtype or not x.is_floating_point() for x in given):
        return NotImplemented
    if many and std._spec.mesh.coordinate is None:
        return NotImplemented
    if not bool((std >= 0).all() if many else std >= 0):
        _refuse(func, mean, std)
    like = redistribute(like, like._spec.sharding.without_partial())
    drawn = torch.empty_like(like, memory_format=torch.contiguous_format)
    drawn.normal_(0, 1 if many else std, generator=generator)
    return drawn.mul_(std).add_(mean) if many else drawn.add_(mean)


def _refuse(func: Any, *args: Any) -> None:
    """Raise what the kernel raises for these arguments, on every rank."""
    func(*[redistribute(x, x._spec.mesh.replicated())._local_tensor if type(x) is DTensor else x for x in args])


def _multinomial(
    func: Any, x: DTensor, count: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Any:
    """One class of each row, or several without replacement, as kernels have it: those that come first."""
    classes = x.shape[-1] if x.ndim in (1, 2) and x.numel() and x.is_floating_point() else 0
    if (replacement and count != 1) or not 0 < count <= classes or x._spec.mesh.coordinate is None:
        return NotImplemented
    x = redistribute(x, x._spec.sharding.without_partial())
    if not _are_chances(x):
        _refuse(func, x, count, replacement)
    times = torch.empty_like(x).exponential_(1, generator=generator)
    first = torch.div(x, times)
    return first.argmax(-1, keepdim=True) if count == 1 else first.topk(count)[1]


def _are_chances(x: DTensor) -> bool:
    """Whether kernels draw by such rows; each rank asks its own where they are whole."""
    splits = x._spec.sharding.splits
    own = x.ndim - 1 not in splits
    rows = x._local_tensor if own else x
    good = (((rows >= 0) & (rows < torch.inf)).all(-1) & (rows.sum(-1) != 0)).all()
    if own and splits:
        mesh = x._spec.mesh
        assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
        good = collectives.all_reduce(good, "band", mesh.group(tuple(sorted(splits[0]))))
    return bool(good)


def _rrelu(
    func: Any, x: Any, noise: Any, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False, *_: Any, **__: Any
) -> Any:
    """Outside of training a leaky ReLU; what is drawn in training depends on all values before."""
    leaky = aten.leaky_relu_ if func is aten.rrelu_with_noise_.default else aten.leaky_relu
    return NotImplemented if training else leaky(x, (lower + upper) / 2)


_FILLED = (
    "uniform_ normal_ exponential_ cauchy_ log_normal_ geometric_ random_ random_.from random_.to bernoulli_.float"
)
_ALIKE = "rand_like randn_like randint_like randint_like.low_dtype"


def _named(names: str, handler: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {name if "." in name else f"{name}.default": handler for name in names.split()}


HANDLERS: Mapping[str, Callable[..., Any]] = {
    **_named(_FILLED, _fill),
    **_named(_ALIKE, _like),
    **_named("native_dropout", _dropout),
    **_named("bernoulli bernoulli.p", _bernoulli),
    **_named("normal.Tensor_float", _normal),
    **_named("normal.float_Tensor normal.Tensor_Tensor", EagerAlone(_normal)),
    **_named("multinomial", EagerAlone(_multinomial)),
    **_named("rrelu_with_noise rrelu_with_noise_", _rrelu),
}
