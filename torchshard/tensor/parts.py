"""Parameters that are plain tensors outside of forward and DTensors inside: for what takes plain parameters only.

DistributedDataParallel is such a thing. With it over one axis of a mesh and a plan over another, data and tensor
parallelism go together. torch's own DTensors are treated alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed.tensor as upstream
from torch import Size, Tensor, nn

from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.layout import TensorLayout, layout_for
from torchshard.tensor.redistribute import redistribute_local


def local_parameters(module: nn.Module) -> nn.Module:
    """Replace the DTensor parameters of a module by plain ones, this rank's parts, in place.

    While the module runs forward they are DTensors again, so its results and gradients are the same. Names stay, and
    `state_dict()` holds DTensors as before; it loads DTensors, and plain tensors of the whole or of this rank's part.
    To be called before an optimizer or a wrapper is given the parameters.

    Returns:
        The module.

    Raises:
        NotImplementedError: a buffer is a DTensor.
    """
    made: dict[int, nn.Parameter] = {}
    owners = []
    for name, submodule in module.named_modules():
        if any(isinstance(b, DTensor | upstream.DTensor) for b in submodule.buffers(recurse=False)):
            raise NotImplementedError(
                f"local_parameters: {name or 'the module'} has a buffer that is a DTensor; leave it out of the plan"
            )
        held = {
            n: p
            for n, p in submodule.named_parameters(recurse=False, remove_duplicate=False)
            if isinstance(p, DTensor | upstream.DTensor)
        }
        if held:
            owners.append(_Owner(submodule, held, made))
    for owner in owners:
        owner.hook_up(owner.module)
        if owner.module is not module:
            owner.hook_up(module)  # for parameters that are read elsewhere than in their own module's forward
    return module


def placed_parameters(module: nn.Module) -> list[Tensor]:
    """The parameters of a module after `local_parameters`, as DTensors that share memory, with their gradients.

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
    for parameter, layout in layouts:
        if layout is None and first is not None:
            layout = first.replicated(parameter)
        if id(parameter) not in found:
            found[id(parameter)] = parameter if layout is None else _placed(parameter, layout)
    return list(found.values())


def _layouts(module: nn.Module) -> "dict[str, _Ours | _Torchs]":
    """The layouts of a module's own parameters, as `local_parameters` has noted them."""
    return getattr(module, "_placed_parts", {})


def _placed(parameter: nn.Parameter, layout: "_Ours | _Torchs") -> Tensor:
    x = layout.saved(parameter.detach())
    if parameter.grad is not None:
        x.grad = layout.saved(parameter.grad)
    return x.requires_grad_(parameter.requires_grad)


@dataclass(frozen=True, slots=True)
class _Ours:
    """How a parameter lies on its mesh, in our words."""

    layout: TensorLayout

    @classmethod
    def of(cls, x: Tensor) -> "_Ours":
        """Of a DTensor of ours."""
        assert isinstance(x, DTensor), "asked only for these"
        return cls(x._spec)

    def replicated(self, x: Tensor) -> "_Ours":
        """For a plain tensor that is the same on all ranks of this mesh."""
        return _Ours(layout_for(self.layout.mesh.replicated(), x.shape, x.stride(), x.dtype))

    def lent(self, part: Tensor) -> Tensor:
        """The DTensor of a part, through which gradients come back to it."""
        layout = self.layout
        mesh: Any = layout.mesh
        return DTensor.from_local(
            part, mesh.device_mesh, layout.torch_placements, shape=layout.shape, stride=layout.stride
        )

    def saved(self, part: Tensor) -> Tensor:
        """The DTensor of a part, with its memory and no history."""
        return wrap(part.detach(), self.layout)

    def loaded(self, x: Tensor) -> Tensor:
        """The part of what a state dict holds."""
        if isinstance(x, DTensor):
            return redistribute_local(x._local_tensor, x._spec, self.layout)
        if tuple(x.shape) == self.layout.shape:
            return redistribute_local(x, self.layout.to(self.layout.mesh.replicated()), self.layout)
        return x


@dataclass(frozen=True, slots=True)
class _Torchs:
    """How a parameter lies on its mesh, in torch's words. Methods as of _Ours."""

    mesh: Any
    placements: Sequence[Any]
    shape: Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> "_Torchs":
        """Of a DTensor of torch's."""
        assert isinstance(x, upstream.DTensor), "asked only for these"
        return cls(x.device_mesh, x.placements, x.shape, x.stride())

    def replicated(self, x: Tensor) -> "_Torchs":
        """As of _Ours."""
        return _Torchs(self.mesh, [upstream.Replicate()] * self.mesh.ndim, x.shape, x.stride())

    def lent(self, part: Tensor) -> Tensor:
        """As of _Ours."""
        return upstream.DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def saved(self, part: Tensor) -> Tensor:
        """As of _Ours."""
        return self.lent(part.detach())

    def loaded(self, x: Tensor) -> Tensor:
        """As of _Ours."""
        if isinstance(x, upstream.DTensor):
            return x.redistribute(self.mesh, self.placements).to_local()
        if x.shape == self.shape:
            return upstream.distribute_tensor(x, self.mesh, self.placements, src_data_rank=None).to_local()
        return x


class _Owner:
    """A module with parameters that are DTensors while it runs."""

    def __init__(self, module: nn.Module, held: dict[str, Any], made: dict[int, nn.Parameter]) -> None:
        self.module, self.depth = module, 0
        self.layouts = {n: _Ours.of(p) if isinstance(p, DTensor) else _Torchs.of(p) for n, p in held.items()}
        for name, p in held.items():
            if id(p) not in made:
                made[id(p)] = nn.Parameter(p.to_local().detach(), requires_grad=p.requires_grad)
            module.register_parameter(name, made[id(p)])
        module._placed_parts = self.layouts  # type: ignore[assignment]
        module.register_state_dict_post_hook(partial(self._saved))  # torch sets an attribute on the hook
        module.register_load_state_dict_pre_hook(self._loaded)

    def hook_up(self, module: nn.Module) -> None:
        """Have DTensors in place while `module` runs."""
        module.register_forward_pre_hook(self._lend, prepend=True)
        module.register_forward_hook(self._take_back, always_call=True)

    def _lend(self, *_: Any) -> None:
        self.depth += 1
        if self.depth == 1:
            for name, layout in self.layouts.items():
                # In the instance's own dict it comes before the parameter, which stays what the module owns.
                vars(self.module)[name] = layout.lent(getattr(self.module, name))

    def _take_back(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            for name in self.layouts:
                del vars(self.module)[name]

    def _keys(self, state: dict[str, Any], prefix: str) -> Iterator[tuple[str, _Ours | _Torchs]]:
        return ((prefix + name, layout) for name, layout in self.layouts.items() if prefix + name in state)

    def _saved(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key, layout in self._keys(state, prefix):
            state[key] = layout.saved(state[key])

    def _loaded(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key, layout in self._keys(state, prefix):
            state[key] = layout.loaded(state[key])
