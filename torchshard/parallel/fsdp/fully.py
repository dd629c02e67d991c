"""FSDP2: torch's fully_shard on modules whose parameters are DTensors of this package.

fully_shard knows torch's DTensor; of another class it takes the global shape for the local one. So parameters become
torch's DTensors over the same memory. While a module runs forward, they are DTensors of this package, made of what FSDP
has gathered; everything else (optimizers, state dicts, checkpoints) sees torch's.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed.tensor as upstream
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Partial

from torchshard._torch import exported_whole
from torchshard.errors import ShardingError
from torchshard.layout.placements import WHOLE
from torchshard.layout.strided import factors_from_order
from torchshard.parallel.fsdp.buffers import torch_buffers
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.interop import over, to_torch, told, without_history
from torchshard.tensor.layout import TensorLayout
from torchshard.tensor.owners import Owner, replace_parameters
from torchshard.tensor.regions.caching import one_node
from torchshard.tensor.replacing import before, now, replacing

Modules = TypeVar("Modules", bound=nn.Module | Sequence[Any])


def fully_shard(module: Modules, **options: Any) -> Modules:
    """torch.distributed.fsdp.fully_shard on a module that `parallelize_module` of this package has treated.

    Args:
        module: a module, or a list or tuple of them, as torch takes.
        options: torch's keywords: `mesh`, `reshard_after_forward`, `mp_policy` and so on. `ignored_params`,
            `shard_placement_fn` and a policy's `param_dtype_override_fn` may name parameters by the objects that they
            were before.

    Returns:
        The module.

    Raises:
        ShardingError: torch could not save a parameter, because FSDP and tensor parallelism cut one dim in pieces that
            torch's placements do not describe; or some rank holds nothing of a parameter, which FSDP cannot reduce;
            or a parameter is shared with a module that was given before.
        NotImplementedError: `dp_mesh_dims` is given, and `torch_parameters` was called before.

    Example:
        >>> for block in model.blocks:                                      # doctest: +SKIP
        ...     fully_shard(block, mesh=mesh["dp"])
        >>> fully_shard(model, mesh=mesh["dp"])         # then the optimizer  # doctest: +SKIP
    """
    modules = [module] if isinstance(module, nn.Module) else [*module]
    ignored = options.get("ignored_params") or ()
    for name, parameter in chain.from_iterable(each.named_parameters() for each in modules):
        if type(parameter) is DTensor and all(parameter is not each for each in ignored):
            _require_torch_can_say(name, parameter, **options)
    axes = _axes(**options)
    if axes and not all(owner.by_fsdp for _, owner in _owners(modules)):
        raise NotImplementedError(
            "fully_shard: with dp_mesh_dims it makes torch's DTensors itself; leave torch_parameters(module) out"
        )
    with replacing(nn.ModuleList(modules), "fully_shard"):
        _replace(modules)
    if ignored:
        options["ignored_params"] = {now(each) for each in ignored}
    if place := options.get("shard_placement_fn"):
        options["shard_placement_fn"] = lambda parameter: place(before(parameter))
    if choose := getattr(options.get("mp_policy"), "param_dtype_override_fn", None):  # since torch 2.15
        options["mp_policy"] = replace(
            options["mp_policy"], param_dtype_override_fn=lambda parameter: choose(before(parameter))
        )
    sharded = cast(Modules, torch_fully_shard(module, **options))  # type: ignore[arg-type]  # a list, too
    for submodule, owner in _owners(modules):
        owner.reduced_by_fsdp(submodule, axes, options.get("ignored_params") or ())
    return sharded


fully_shard.state = torch_fully_shard.state  # type: ignore[attr-defined]  # what it knows of a module, as torch has it


def _owners(modules: Sequence[nn.Module]) -> "Iterator[tuple[nn.Module, _TorchOwner]]":
    """The modules below, and these, that lend parameters, and what they do it by."""
    for submodule in chain.from_iterable(each.modules() for each in modules):
        if owner := vars(submodule).get("_torch_owner"):
            yield submodule, owner


def _axes(mesh: DeviceMesh | None = None, dp_mesh_dims: Any = None, **_: Any) -> tuple[int, ...]:
    """The axes of the parameters' own mesh that are FSDP's, where it has such; torch says which ones there are not."""
    if mesh is None or dp_mesh_dims is None:
        return ()
    return _named(mesh, (*dp_mesh_dims.shard_names, *dp_mesh_dims.replicate_names))


def _named(mesh: DeviceMesh, names: Collection[str]) -> tuple[int, ...]:
    return tuple([axis for axis, name in enumerate(mesh.mesh_dim_names or ()) if name in names])


def _require_torch_can_say(
    name: str,
    parameter: Any,
    mesh: DeviceMesh | None = None,
    shard_placement_fn: Any = None,
    dp_mesh_dims: Any = None,
    **_: Any,
) -> None:
    """Raise ShardingError where what FSDP will hold is not what torch's placements say that it holds."""
    layout: TensorLayout = parameter._spec
    smallest = layout.sharding.part(layout.shape, [n - 1 for n in layout.mesh.shape])
    if 0 in smallest and 0 not in layout.shape:
        raise ShardingError(
            "Some ranks hold nothing of a parameter, and FSDP cannot reduce gradients that are empty.",
            expected="an element on every rank",
            got=layout,
            where=name,
            fix="leave it out of the plan, or replicate it; or DistributedDataParallel(device_mesh=) instead of FSDP",
        )
    try:
        told(layout)
    except ShardingError as error:
        raise ShardingError(
            "FSDP cannot hold a parameter that the plan cuts in a way for which torch has no placements.",
            expected=error.expected,
            got=error.got,
            where=f"{name}, {layout}",
            fix="a number of units, or heads, that the plan's ranks divide; or DistributedDataParallel(device_mesh=)"
            " instead of FSDP",
        ) from error
    placement: Any = shard_placement_fn(parameter) if shard_placement_fn is not None else None
    own = getattr(placement, "mesh_info", None)  # a ShardPlacementResult: on a mesh of the parameter's own
    if own is not None:
        mesh, placement = own.mesh, placement.placement
    dim = getattr(placement, "dim", 0) % max(layout.ndim, 1)
    axes = layout.sharding.splits.get(dim, ())
    if mesh is None or not axes:
        return
    if own is not None:
        cutting: tuple[int, ...] = (own.shard_mesh_dim,)
    else:
        cutting = (mesh.ndim - 1,) if dp_mesh_dims is None else _named(mesh, dp_mesh_dims.shard_names)
    ranks, names = math.prod([mesh.shape[axis] for axis in cutting]), mesh.mesh_dim_names or "?" * mesh.ndim
    along = " and ".join([names[axis] for axis in cutting])
    where = f"{name}, {layout}, then axis {along} of FSDP's mesh {tuple(mesh.shape)}"
    if layout.sharding.cuts.get(dim, WHOLE).runs > 1:
        raise ShardingError(
            "FSDP would cut the runs of a parameter across, and torch's placements would tell of other pieces.",
            expected="a dim that is not split in runs",
            got=f"dim {dim} of {layout}",
            where=where,
            fix="shard_placement_fn= that gives FSDP another dim of it, such as Shard(1), where it has one; or"
            " DistributedDataParallel(device_mesh=) instead of FSDP",
        )
    try:
        factors_from_order(layout.shape[dim], [*(a + 1 for a in axes), 0], (ranks, *layout.mesh.shape))
    except ShardingError as error:
        raise ShardingError(
            "FSDP would cut a parameter in pieces that torch cannot save, having no placements for them.",
            expected=f"a length that {ranks} x {math.prod(layout.mesh.shape[a] for a in axes)} ranks divide",
            got=f"length {layout.shape[dim]} of dim {dim}",
            where=where,
            fix="another length, or shard_placement_fn= that gives FSDP another dim, which its ranks divide",
        ) from error


def torch_parameters(module: nn.Module) -> nn.Module:
    """Replace the DTensor parameters of a module by torch's DTensors over the same memory, in place.

    While the module runs forward they are DTensors of this package, so its results and gradients are the same.
    Functions of torch that know their own class only then work, as those of torch.distributed.checkpoint.state_dict.
    State dicts hold torch's DTensors, also of buffers, and load DTensors of both classes. To be called before an
    optimizer is given the parameters.

    Returns:
        The module.

    Raises:
        ShardingError: a parameter has hooks, or is shared with a module that was given before.
    """
    with replacing(module, "torch_parameters"):
        _replace([module])
    return module


def _replace(modules: Sequence[nn.Module]) -> None:
    replace_parameters(modules, _TorchOwner)
    for module in modules:
        torch_buffers(module)


class _TorchOwner(Owner):
    """Outside of forward, parameters are torch's DTensors.

    Attributes:
        by_fsdp: whether `fully_shard` has been given the module.
        _axes: those of a parameter's mesh along which FSDP reduces gradients, by name of the parameter.
    """

    def __init__(self, held: Mapping[str, Any]) -> None:
        super().__init__(held)
        self.by_fsdp = False
        self._axes: dict[str, tuple[int, ...]] = {}

    def move_in(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        super().move_in(module, parameters)
        module._torch_owner = self  # type: ignore[assignment]
        module.register_load_state_dict_pre_hook(self._loaded)

    def reduced_by_fsdp(self, module: nn.Module, axes: tuple[int, ...], ignored: Collection[Any]) -> None:
        """FSDP reduces gradients along these axes of their mesh itself, but those of what it had before or ignores."""
        self.by_fsdp = True
        for name in self.placed:
            if all(getattr(module, name) is not each for each in ignored):
                self._axes.setdefault(name, axes)
                self.placed[name] = self.placed[name].with_terms(self._axes[name])

    @staticmethod
    def outside(x: Any) -> Tensor:
        return to_torch(x.detach())

    def inside(self, name: str, parameter: Tensor) -> Tensor | None:
        placed, axes = self.placed[name], self._axes.get(name)
        mesh: Any = placed.layout.mesh
        if not isinstance(parameter, upstream.DTensor) or parameter.device_mesh != mesh.device_mesh:
            return None  # still cut by FSDP: a module below will have it gathered
        if not axes:
            return placed.lent(_part(parameter))
        if parameter.placements != told(placed.layout):
            return None  # likewise
        x = placed.lent(_part(parameter))
        if x.requires_grad:
            x.register_hook(partial(_terms, axes, placed.layout.plain))
        return x

    def _loaded(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in self.placed:
            if isinstance(x := state.get(prefix + name), DTensor):
                state[prefix + name] = to_torch(x)


def _terms(axes: tuple[int, ...], layout: TensorLayout, grad: DTensor) -> Tensor:
    """A gradient as FSDP takes it: along its axes this rank's term, under the placements of the parameter.

    Also of one that has its value already, as of batch normalisation: FSDP adds those of its ranks.
    """
    to = [Partial() if axis in axes else placement for axis, placement in enumerate(told(layout))]
    return over(grad.redistribute(placements=to).to_local(), layout, DTensor)


@one_node  # torch.export's own access to parts loses gradients
@exported_whole
def _part(parameter: upstream.DTensor) -> Tensor:
    if torch.compiler.is_exporting():  # which follows no DTensor made on the way
        return parameter.to_local()
    return _Part.apply(parameter)  # type: ignore[no-any-return, no-untyped-call]


class _Part(torch.autograd.Function):
    """to_local() without an operator that selective checkpoints count.

    The forward of a module around a checkpoint lends outside of it; what the checkpoint runs again lends inside.
    """

    @staticmethod
    def forward(ctx: Any, parameter: upstream.DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        ctx.shape, ctx.stride = parameter.shape, parameter.stride()
        detached = cast(upstream.DTensor, without_history(parameter))  # to_local() of a Parameter makes a view
        return detached.to_local()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None
        return upstream.DTensor.from_local(
            grad, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )
