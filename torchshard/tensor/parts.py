"""Parameters that are plain tensors outside of forward and DTensors inside: for what takes plain parameters only.

DistributedDataParallel is such a thing. With it over one axis of a mesh and a plan over another, data and tensor
parallelism go together. torch's own DTensors are treated alike.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed.tensor as upstream
from torch import Tensor, nn

from torchshard._torch import after_every_forward, skip_methods
from torchshard.tensor.caching import one_node
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.interop import from_torch, over
from torchshard.tensor.layout import TensorLayout, layout_for
from torchshard.tensor.naming import name_on, named
from torchshard.tensor.redistribute import redistribute_local
from torchshard.tensor.replacing import replacing, require_replaceable, successor

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
            replace_parameters(module, _LocalOwner)
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
        first = next((Placed._of(_ours(p)._spec, DTensor) for p in dtensors), None)
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
    how: "Callable[[Placed, Tensor, Tensor], Tensor]",
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


def _state_saved(placed: "Placed", value: Tensor, part: Tensor) -> Tensor:
    if value.shape == part.shape and part.ndim:
        return placed.saved(value)
    if value.numel() > 1 and placed.layout.sharding.splits:
        raise NotImplementedError(
            f"placed_states: a state of shape {tuple(value.shape)} is not like the parameter, {placed.layout}; "
            "optimizers that keep such states are to be given DTensors, without local_parameters"
        )
    return value


def _state_loaded(placed: "Placed", value: Tensor, part: Tensor) -> Tensor:
    loaded = placed.loaded(value) if value.ndim else value
    if loaded.numel() > 1 and loaded.shape != part.shape and placed.layout.sharding.splits:
        raise ValueError(
            f"placed_states: a state of shape {tuple(value.shape)} is not that of this part, {tuple(part.shape)}, nor "
            f"of the whole, {placed.layout}"
        )
    return loaded


def _layouts(module: nn.Module) -> "dict[str, Placed]":
    """The layouts of a module's own parameters, as `local_parameters` has noted them."""
    return getattr(module, "_placed_parts", {})


def _placed(parameter: nn.Parameter, layout: "Placed | None", first: "Placed | None") -> Tensor:
    """A parameter as a DTensor: of its layout, or as it is, or replicated where `first` is."""
    if layout is None and isinstance(parameter, upstream.DTensor):
        saved: Callable[[Tensor], Tensor] = _ours
    elif layout is None and (first is None or isinstance(parameter, DTensor)):
        return parameter
    else:
        saved = (layout or first.replicated(parameter)).saved  # type: ignore[union-attr]
    x = saved(parameter.detach())
    if parameter.grad is not None:
        x.grad_dtype = parameter.grad.dtype  # as the parameter's grad_dtype allows
        x.grad = saved(parameter.grad)
    return x.requires_grad_(parameter.requires_grad)


@dataclass(frozen=True, slots=True)
class Placed:
    """How a parameter lies on its mesh.

    Attributes:
        layout: of the DTensor.
        kind: its class, ours or torch's.
        name: of both, see naming.py.
    """

    layout: TensorLayout
    kind: type[Any]
    name: str

    @classmethod
    def of(cls, x: Tensor) -> "Placed":
        """Of a DTensor of either class."""
        return cls._of(_ours(x)._spec, DTensor if isinstance(x, DTensor) else upstream.DTensor)

    @classmethod
    def _of(cls, layout: TensorLayout, kind: type[Tensor]) -> "Placed":
        name = name_on(layout.mesh, (layout, kind), layout, layout.stride, kind.__module__)  # type: ignore[arg-type]
        return cls(layout, kind, name)

    def __reduce__(self) -> Any:
        return Placed._of, (self.layout, self.kind)  # another process has given no names

    def replicated(self, x: Tensor) -> "Placed":
        """For a plain tensor that is the same on all ranks of this mesh."""
        return self._of(layout_for(self.layout.mesh.replicated(), x.shape, x.stride(), x.dtype), self.kind)

    def lent(self, part: Tensor) -> Tensor:
        """The DTensor of a part, of its dtype, through which gradients come back to it."""
        if torch.compiler.is_dynamo_compiling():
            return _lent(part, self.name)
        return over(part, self.layout, self.kind)

    def saved(self, part: Tensor) -> Tensor:
        """The DTensor of a part, with its memory and no history."""
        return self.lent(part.detach())

    def loaded(self, x: Tensor) -> Tensor:
        """The part of what a state dict holds."""
        if isinstance(x, DTensor | upstream.DTensor):
            x = _ours(x)
            return redistribute_local(x._local_tensor, x._spec, self.layout)
        if tuple(x.shape) == self.layout.shape:
            return redistribute_local(x, self.layout.to(self.layout.mesh.replicated()), self.layout)
        return x


@one_node
def _lent(part: Tensor, name: str) -> Tensor:
    """See Placed.lent."""
    return over(part, *named(name))


def _ours(x: Tensor) -> DTensor:
    return x if isinstance(x, DTensor) else from_torch(x.detach())


@skip_methods()
class Owner:
    """A module with parameters that are DTensors while it runs, and something else outside.

    Attributes:
        takes: the classes of DTensors that are replaced.
        placed: how each lies on its mesh, by name.
        _lent: for each forward that runs, the names that it has lent, and whether a module around this one did and all
            are lent.
    """

    takes: tuple[type[Tensor], ...] = (DTensor,)

    def __init__(self, held: Mapping[str, Any]) -> None:
        self.placed = {name: Placed.of(p) for name, p in held.items()}
        self._lent: list[tuple[list[str], bool]] = []

    @staticmethod
    def outside(x: Any) -> Tensor:
        """What a parameter is outside of forward."""
        raise NotImplementedError

    def inside(self, name: str, parameter: Tensor) -> Tensor | None:
        """What it is inside, differentiable; None where that cannot be told here."""
        raise NotImplementedError

    def move_in(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        """Put what the parameters are outside of forward in their places, and lend inside from now on."""
        for name, parameter in parameters.items():
            module.register_parameter(name, parameter)
        _hook_up(module, self)

    # Called in a traced forward, these are traced. Called in front of one, they would be frames of their own to Dynamo,
    # compiled anew for each module.

    def lend(self, module: nn.Module, *_: Any) -> None:
        """A forward of the module begins: have DTensors in place."""
        if not self._lent_around():
            self.put(module)

    def take_back(self, module: nn.Module, *_: Any) -> None:
        """It is over."""
        if not self._lent_around():
            self.put_away(module)

    def _lent_around(self) -> bool:
        """Whether a forward of a module around has put all in place: so nothing changes in a checkpoint in between."""
        return bool(self._lent) and self._lent[-1][1]

    def put(self, module: nn.Module, around: bool = False) -> None:
        """Put DTensors in place, until `put_away`; `around`: for a module around this one."""
        own, lent = vars(module), []
        for name in self.placed:
            if name not in own and (x := self.inside(name, getattr(module, name))) is not None:
                own[name] = x  # comes before the parameter, which stays what the module owns
                lent.append(name)
        self._lent.append((lent, around and all(name in own for name in self.placed)))

    def put_away(self, module: nn.Module) -> None:
        """Take away what the last `put` has put there."""
        for name in self._lent.pop()[0]:
            del vars(module)[name]


@skip_methods()
class _Around:
    """Hooks of a module around one with an owner, for parameters that are read elsewhere than in that one's forward.

    Attributes:
        owner: does not know its module, which has hooks that hold it: the module goes when it is dropped.
    """

    def __init__(self, owner: Owner, module: nn.Module) -> None:
        self.owner, self.module = owner, module

    def lend(self, *_: Any) -> None:
        self.owner.put(self.module, around=True)

    def take_back(self, *_: Any) -> None:
        self.owner.put_away(self.module)


def _hook_up(module: nn.Module, lender: Owner | _Around) -> None:
    module.register_forward_pre_hook(lender.lend, prepend=True)
    after_every_forward(module, lender.take_back)


def replace_parameters(module: nn.Module, kind: type[Owner]) -> None:
    """Make every module below (and itself) that has DTensor parameters an owner of that kind; all of them, or none.

    Raises:
        ShardingError: a parameter has hooks, or cannot be said outside of forward.
    """
    found: list[tuple[nn.Module, dict[str, Any]]] = []
    for submodule in module.modules():
        named: Any = submodule.named_parameters(recurse=False, remove_duplicate=False)
        held: dict[str, Any] = {name: p for name, p in named if isinstance(p, kind.takes)}
        if held:
            found.append((submodule, held))
    for submodule, held in found:
        for name, p in held.items():
            require_replaceable(p, submodule, name)
    owners = [kind(held) for _, held in found]
    outside = {id(p): kind.outside(p) for _, held in found for p in held.values()}
    made: dict[int, nn.Parameter] = {}
    for (submodule, held), owner in zip(found, owners, strict=True):  # from here on nothing is refused
        for name, p in held.items():
            if id(p) not in made:
                made[id(p)] = successor(p, outside[id(p)], submodule, name)
        owner.move_in(submodule, {name: made[id(p)] for name, p in held.items()})
        if submodule is not module:
            _hook_up(module, _Around(owner, submodule))


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
