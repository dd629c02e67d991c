"""Parameters that are plain tensors outside of forward and DTensors inside: for what takes plain parameters only.

DistributedDataParallel is such a thing. With it over one axis of a mesh and a plan over another, data and tensor
parallelism go together. torch's own DTensors are treated alike.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed.tensor as upstream
from torch import Tensor, nn

from torchshard._torch import skip_methods
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.interop import without_history
from torchshard.tensor.owners import Owner, Placed, ours, replace_parameters
from torchshard.tensor.replacing import replacing

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def local_parameters(module: nn.Module) -> nn.Module:
    """Replace the DTensor parameters of a module by plain ones, this rank's parts, in place.

    While the module runs forward they are DTensors again, so its results and gradients are the same. Names stay, and
    `state_dict()` holds DTensors as before; it loads DTensors, and plain tensors of the whole or of this rank's part.
    To be called before an optimizer or a wrapper is given the parameters.

    Returns:
        The module.

    Raises:
        NotImplementedError: a buffer is a DTensor.
        ShardingError: a parameter has hooks.
    """
    for name, submodule in module.named_modules():
        if any(isinstance(b, DTensor | upstream.DTensor) for b in submodule.buffers(recurse=False)):
            raise NotImplementedError(
                f"local_parameters: {name or 'the module'} has a buffer that is a DTensor; leave it out of the plan"
            )
    if any(isinstance(p, _LocalOwner.takes) for p in module.parameters()):
        with replacing(module, "local_parameters"):
            replace_parameters([module], _LocalOwner)
    return module


def placed_parameters(module: nn.Module) -> list[Tensor]:
    """The parameters of a module as DTensors, after `local_parameters`, DistributedDataParallel with `device_mesh=`,
    `fully_shard` or `torch_parameters`.

    They share memory with the module's own, and have their gradients.

    For what has to see whole tensors, and works in place: `clip_grad_norm_(placed_parameters(model), 1.0)`. Parameters
    that were no DTensors are taken to be replicated.
    """
    found: dict[int, Tensor] = {}
    layouts = [
        (parameter, _layouts(submodule).get(name))
        for submodule in module.modules()
        for name, parameter in submodule.named_parameters(recurse=False)
    ]
    first = next((layout for _, layout in layouts if layout is not None), None)
    if first is None:
        dtensors = (p for p, _ in layouts if isinstance(p, DTensor | upstream.DTensor))
        first = next((Placed.of(ours(p)) for p in dtensors), None)
    for parameter, layout in layouts:
        if id(parameter) not in found:
            found[id(parameter)] = _placed(parameter, layout, first)
    return list(found.values())


def placed_states(module: nn.Module, optimizer: AnyOptimizer) -> AnyOptimizer:
    """Have the state dict of an optimizer hold DTensors, as that of the module does after `local_parameters`.

    Without it a state dict holds each rank's parts as plain tensors, which checkpoints take for copies of one tensor.
    It loads DTensors of any layout, and plain tensors of the whole or of this rank's part. To be called once or more.

    Args:
        module: `local_parameters`, or DistributedDataParallel(device_mesh=), has treated it.
        optimizer: of its parameters.

    Returns:
        The optimizer; its `state_dict` raises NotImplementedError where states do not have the parameters' shapes, and
        `load_state_dict` ValueError where one has another.

    Raises:
        ValueError: the optimizer has no parameter of the module.
    """
    known = {id(p) for p in module.parameters()}
    if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("placed_states: the optimizer has no parameter of this module")
    if optimizer not in _placing:
        _placing.add(optimizer)
        found = weakref.ref(module)
        optimizer.register_state_dict_post_hook(partial(_change_states, found, _state_saved))
        optimizer.register_load_state_dict_pre_hook(partial(_change_states, found, _state_loaded))
    return optimizer


_placing: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Optimizers whose state dicts hold DTensors."""


def _change_states(
    found: "weakref.ref[nn.Module]",
    how: Callable[[Placed, Tensor, Tensor], Tensor],
    optimizer: Any,
    state: dict[str, Any],
) -> dict[str, Any]:
    modules = [*module.modules()] if (module := found()) else []
    named = [(m, name, p) for m in modules for name, p in m.named_parameters(recurse=False)]
    placed = {id(p): (_layouts(m)[name], p) for m, name, p in named if name in _layouts(m)}
    keys = [key for group in state["param_groups"] for key in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    changed = dict(state["state"])
    for key, p in zip(keys, params, strict=False):  # of other groups than these, torch itself says that they do not fit
        if key in changed and id(p) in placed:
            layout, part = placed[id(p)]
            values = changed[key].items()
            changed[key] = {k: how(layout, v, part) if isinstance(v, Tensor) else v for k, v in values}
    return {**state, "state": changed}


def _state_saved(placed: Placed, value: Tensor, part: Tensor) -> Tensor:
    if value.shape == part.shape and part.ndim:
        return placed.saved(value)
    if value.numel() > 1 and placed.layout.sharding.splits:
        raise NotImplementedError(
            f"placed_states: a state of shape {tuple(value.shape)} is not like the parameter, {placed.layout}; "
            "optimizers that keep such states are to be given DTensors, without local_parameters"
        )
    return value


def _state_loaded(placed: Placed, value: Tensor, part: Tensor) -> Tensor:
    loaded = placed.loaded(value) if value.ndim else value
    if loaded.numel() > 1 and loaded.shape != part.shape and placed.layout.sharding.splits:
        raise ValueError(
            f"placed_states: a state of shape {tuple(value.shape)} is not that of this part, {tuple(part.shape)}, nor "
            f"of the whole, {placed.layout}"
        )
    return loaded


def _layouts(module: nn.Module) -> dict[str, Placed]:
    """The layouts of a module's own parameters, as `local_parameters` has noted them."""
    return getattr(module, "_placed_parts", {})


def _placed(parameter: nn.Parameter, layout: Placed | None, first: Placed | None) -> Tensor:
    """A parameter as a DTensor: of its layout, or as it is, or replicated where `first` is."""
    if layout is None and isinstance(parameter, upstream.DTensor):
        saved: Callable[[Tensor], Tensor] = ours
    elif layout is None and (first is None or isinstance(parameter, DTensor)):
        return parameter
    else:
        saved = (layout or first.replicated(parameter)).saved  # type: ignore[union-attr]
    x = saved(without_history(parameter))
    if parameter.grad is not None:
        x.grad_dtype = parameter.grad.dtype  # as the parameter's grad_dtype allows
        x.grad = saved(parameter.grad)
    return x.requires_grad_(parameter.requires_grad)


@skip_methods()
class _LocalOwner(Owner):
    """Outside of forward, parameters are this rank's parts."""

    takes = (DTensor, upstream.DTensor)

    def move_in(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        super().move_in(module, parameters)
        module._placed_parts = self.placed  # type: ignore[assignment]
        module.register_state_dict_post_hook(partial(self._saved))  # torch sets an attribute on the hook
        module.register_load_state_dict_pre_hook(self._loaded)

    @staticmethod
    def outside(x: Any) -> Tensor:
        return x.to_local().detach()  # type: ignore[no-any-return]

    def inside(self, name: str, parameter: Tensor) -> Tensor:
        return self.placed[name].lent(parameter)

    def _keys(self, state: dict[str, Any], prefix: str) -> Iterator[tuple[str, Placed]]:
        return ((prefix + name, placed) for name, placed in self.placed.items() if prefix + name in state)

    def _saved(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key, placed in self._keys(state, prefix):
            state[key] = placed.saved(state[key])

    def _loaded(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key, placed in self._keys(state, prefix):
            state[key] = placed.loaded(state[key])
