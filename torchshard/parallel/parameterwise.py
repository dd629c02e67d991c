"""The style of modules that use weights of their own in a forward of their own: experts, transposed linear layers."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from torchshard._torch import leaves_of, tree_of
from torchshard.parallel.preparing import prepare
from torchshard.parallel.styles import ParallelStyle, place_parameter, require_one_axis, with_placements
from torchshard.tensor.distribute import distribute_module
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.regions.naming import name_of_place


class ParameterwiseParallel(ParallelStyle):
    """A module whose parameters are cut as told, one by one; its forward runs as it is, on DTensors.

    All tensors in the inputs, by place or by name, become DTensors, as do buffers and parameters that are not named,
    which are replicated. Whatever the forward does with them gives what it gives on one device; what it makes of
    numbers alone is plain and needs `torchshard.implicit_replication()` around the call of the model.

    Args:
        placements: where parameters go, by their names in the module: `{"gate_up": UnitShard(1, runs=2), "down":
            Shard(2)}` for experts `(experts, 2 * hidden, width)` and `(experts, width, hidden)`, each rank having some
            of the hidden columns of every expert.
        input_layouts: what plain inputs are; replicated by default.
        desired_input_layouts: what the forward gets; replicated by default.
        output_layouts: what tensors in the outputs shall be; replicated by default, for which a sum over ranks takes
            an all-reduce; split along a dim, a reduce-scatter.
        use_local_output: give plain tensors, this rank's parts.

    Raises:
        ValueError: the module has no parameter of a name.
    """

    def __init__(
        self,
        placements: Mapping[str, Placement],
        *,
        input_layouts: Placement | None = None,
        desired_input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.placements = placements
        self.input_layouts: tuple[Placement, ...] = (input_layouts or Replicate(),)
        self.desired_input_layouts: tuple[Placement, ...] = (desired_input_layouts or Replicate(),)
        self.output_layouts: tuple[Placement, ...] = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut(self, module, device_mesh, self.placements)
        (here,), (wanted,), (there,) = self.input_layouts, self.desired_input_layouts, self.output_layouts
        place = name_of_place(device_mesh, here)
        module.register_forward_pre_hook(taking_all(lambda _: place, wanted), with_kwargs=True)
        module.register_forward_hook(giving(lambda _: there, self.use_local_output))
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({dict(self.placements)}, input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


def cut(style: ParallelStyle, module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Make DTensors of all parameters and buffers, those that have no placement replicated.

    Raises:
        ValueError: the module has no parameter of a name.
    """
    require_one_axis(style, mesh)
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if strange := [name for name in placements if name not in names]:
        raise ValueError(
            f"{type(style).__name__} is to cut {', '.join(strange)}, and {type(module).__name__} has "
            f"{', '.join(names) or 'no parameters'}"
        )

    def partition(path: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(submodule.named_parameters(recurse=False)):
            placement = placements.get(f"{path}.{name}" if path else name, Replicate())
            place_parameter(submodule, name, parameter, mesh, placement, style.src_data_rank)

    distribute_module(module, mesh, partition)


def taking_all(
    place: Callable[[int | str], str], wanted: Placement, change: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A hook that makes DTensors of all tensors in the inputs; those that are one tensor stay one.

    Args:
        place: name of the mesh and placement of a plain input, by its place or name.
        wanted: where all of them are brought.
        change: called with the module and its prepared inputs, a list and a dict, which it may change.
    """

    def before(
        module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        known: list[tuple[Tensor, Tensor]] = []

        def one(where: str, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            for given, made in known:
                if given is x:
                    return made
            known.append((x, prepare(x, where, wanted, local=False)))
            return known[-1][1]

        def placed(key: int | str, value: Any) -> Any:
            leaves, structure = leaves_of(value)
            return tree_of([one(place(key), x) for x in leaves], structure)

        by_place = [placed(at, x) for at, x in enumerate(args)]
        by_name = {name: placed(name, x) for name, x in keywords.items()}
        if change is not None:
            change(module, by_place, by_name)
        return tuple(by_place), by_name

    return before


def giving(place: Callable[[int], Placement], local: bool) -> Callable[..., Any]:
    """A hook that brings each output to its placement.

    Args:
        place: the placement of an output, by its place among them all.
        local: give this rank's parts.
    """

    def given(x: Any, at: int) -> Any:
        return with_placements(x, (place(at),), local) if isinstance(x, DTensor) else x

    def after(module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
        leaves, structure = leaves_of(outputs)
        return tree_of([given(x, at) for at, x in enumerate(leaves)], structure)

    return after
