"""Styles: how the parameters of one module are cut, and what its first input and its output are on the ranks.

Hooks on the module turn a plain input into a DTensor of the layout that it is said to have, bring it to the layout that
the module wants, and bring the output to the layout that the user wants.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, overload

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchshard._torch import placements_are_values
from torchshard.errors import ShardingError
from torchshard.layout.layout import contiguous_stride
from torchshard.tensor.distribute import distribute_module, distribute_tensor
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.gradients.autograd import part_in
from torchshard.tensor.regions.caching import one_node
from torchshard.tensor.regions.naming import name_of_place, named
from torchshard.tensor.replacing import successor
from torchshard.tensor.torch_placements import UnitShard
from torchshard.unsupported import unsupported

Placements = tuple[Placement, ...]


class ParallelStyle(ABC):
    """How one module is made parallel; subclasses say it in `_apply`.

    Attributes:
        src_data_rank: place along the mesh of the rank whose parameters count, as in distribute_tensor;
            parallelize_module sets it before it calls `_apply`.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Make `module` parallel over a mesh, which has one axis but where parallelize_module is given more, in place.

        Returns:
            The module.
        """


class _CutWeights(ParallelStyle):
    """What the styles of linear layers and embeddings share: parameters cut by a table, one tensor in, one out."""

    # Kind of module -> where its parameters go; "" is for those that are not named.
    cuts: Mapping[type[nn.Module], Mapping[str, Placement]]

    def __init__(
        self, input_layout: Placement, output_layout: Placement, use_local_output: bool, unit: int, runs: int = 1
    ) -> None:
        self.input_layouts: Placements = (input_layout,)
        self.output_layouts: Placements = (output_layout,)
        self.use_local_output = use_local_output
        self.unit, self.runs = unit, runs

    def _wanted(self, module: nn.Module) -> Placement:
        """The layout in which the module wants its input."""
        return Replicate()

    def _length(self, module: nn.Module) -> int | None:
        """Global length of the last dim of the input, where the module tells it."""
        return None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_one_axis(self, device_mesh)
        cuts = next((cuts for kind, cuts in self.cuts.items() if isinstance(module, kind)), None)
        if cuts is None:
            got, inside = type(module), ", ".join(name for name, _ in module.named_children())
            own = ", ".join(name for name, _ in module.named_parameters(recurse=False))
            raise NotImplementedError(
                f"{type(self).__name__} takes nn.Linear and nn.Embedding, and this is a {got.__module__}."
                f"{got.__qualname__}; "
                + (f"name its submodules in the plan ({inside}), or " if inside else "")
                + (f"say ParameterwiseParallel of its parameters ({own})" if own else "write a ParallelStyle for it")
            )

        def partition(_: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in list(submodule.named_parameters(recurse=False)):
                placement = cuts.get(name, cuts[""]) if submodule is module else Replicate()  # adapters: whole
                placement = in_units(placement, self.unit, self.runs)
                place_parameter(submodule, name, parameter, mesh, placement, self.src_data_rank)

        distribute_module(module, device_mesh, partition)
        (here,), (there,), local = self.input_layouts, self.output_layouts, self.use_local_output
        wanted, length = self._wanted(module), self._length(module)

        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            return with_placements(output, (there,), local)

        module.register_forward_pre_hook(taking(type(self).__name__, device_mesh, here, wanted, length))
        module.register_forward_hook(after)
        return module

    def __repr__(self) -> str:
        cut = "".join([f", {name}={n}" for name, n in (("unit", self.unit), ("runs", self.runs)) if n > 1])
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output}{cut})"
        )


class ColwiseParallel(_CutWeights):
    """An nn.Linear or nn.Embedding whose outputs are split: each rank computes some of the columns of the result.

    Args:
        input_layouts: what a plain input is; replicated by default. The module gets it replicated.
        output_layouts: what the output shall be; by default split along its last dim, as it is computed.
        use_local_output: give the output as a plain tensor, this rank's part.
        unit: so many neighbouring columns stay on one rank: the width of a head, for heads whose number ranks do not
            divide.
        runs: of so many layers of equal width the module is made, whose columns lie behind one another: 3 for queries,
            keys and values, 2 for a gate and what it lets through. Each rank computes its columns of each, joined, so
            that `chunk(runs, -1)` of the part, or of the DTensor, takes them apart.
    """

    cuts: Mapping[type[nn.Module], Mapping[str, Placement]] = {nn.Linear: {"": Shard(0)}, nn.Embedding: {"": Shard(1)}}

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        unit: int = 1,
        runs: int = 1,
    ) -> None:
        output_layouts = output_layouts or in_units(Shard(-1), unit, runs)
        super().__init__(input_layouts or Replicate(), output_layouts, use_local_output, unit, runs)


class RowwiseParallel(_CutWeights):
    """An nn.Linear whose inputs are split, or an nn.Embedding whose vocabulary is: results are sums over ranks.

    Args:
        input_layouts: what a plain input is; split along its last dim by default. A linear layer gets it so, an
            embedding gets its indices replicated: for those say Replicate() here where they are the same everywhere.
        output_layouts: what the output shall be; replicated by default (an all-reduce), or split along a dim (a
            reduce-scatter).
        use_local_output: give the output as a plain tensor, this rank's part.
        unit: so many neighbouring inputs (rows of a vocabulary) stay on one rank, as a ColwiseParallel layer of this
            unit gives them.
    """

    cuts: Mapping[type[nn.Module], Mapping[str, Placement]] = {
        nn.Linear: {"weight": Shard(1), "": Replicate()},
        nn.Embedding: {"": Shard(0)},
    }

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        unit: int = 1,
    ) -> None:
        input_layouts = input_layouts or in_units(Shard(-1), unit)
        super().__init__(input_layouts, output_layouts or Replicate(), use_local_output, unit)

    def _wanted(self, module: nn.Module) -> Placement:
        return in_units(Shard(-1), self.unit) if isinstance(module, nn.Linear) else Replicate()

    def _length(self, module: nn.Module) -> int | None:
        return module.in_features if isinstance(module, nn.Linear) else None


class SequenceParallel(ParallelStyle):
    """A module with replicated parameters that works on a part of the sequence: LayerNorm, RMSNorm, Dropout.

    A plain input is taken to be this rank's part of the sequence; a DTensor is brought to it. The output stays split.

    Args:
        sequence_dim: along which the sequence runs.
        use_local_output: give the output as a plain tensor, this rank's part.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding: Placements = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_one_axis(self, device_mesh)

        def partition(_: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in list(submodule.named_parameters(recurse=False)):
                place_parameter(submodule, name, parameter, mesh, Replicate(), self.src_data_rank)

        distribute_module(module, device_mesh, partition)
        (wanted,), local = self.sequence_sharding, self.use_local_output

        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            return output.to_local() if local else output

        module.register_forward_pre_hook(taking(type(self).__name__, device_mesh, wanted, wanted))
        module.register_forward_hook(after)
        return module

    def __repr__(self) -> str:
        dim = getattr(self.sequence_sharding[0], "dim", None)
        return f"{type(self).__name__}(sequence_dim={dim}, use_local_output={self.use_local_output})"


def in_units(placement: Placement, unit: int, runs: int = 1) -> Placement:
    """A split of so many runs, whose items stay together in units of this length; what is no split stays as it is."""
    if unit == runs == 1 or not isinstance(placement, Shard):
        return placement
    return UnitShard(placement.dim, unit, runs)


def require_one_axis(style: ParallelStyle, mesh: DeviceMesh) -> None:
    """The error of a style that is given a mesh of several axes, of which it would not know which to take."""
    if mesh.ndim != 1:
        raise ShardingError(
            f"{type(style).__name__} works along one axis of a mesh.",
            expected="a mesh of one axis",
            got=f"{mesh}",
            fix='slice it: parallelize_module(module, mesh["tp"], plan)',
        )


def place_parameter(
    module: nn.Module, name: str, parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement, source: int | None
) -> None:
    """Make a DTensor of a parameter, in place; one that is a DTensor of this placement already stays what it is.

    Raises:
        ShardingError: it is a DTensor of another placement, or has hooks, or is shared with a module of another call.
    """
    try:
        placed: Tensor = distribute_tensor(parameter, mesh, [placement], src_data_rank=source)
    except ShardingError as error:
        if not isinstance(parameter, DTensor):
            raise
        raise ShardingError(
            "A parameter has been placed before, by a style that cuts it otherwise.",
            expected=parameter._spec,
            got=placement,
            where=name,
            fix="where modules share it, styles that cut it alike, as RowwiseParallel of an embedding and"
            " ColwiseParallel of a linear layer do; else one style for it, once",
        ) from error
    if placed is not parameter:
        module.register_parameter(name, successor(parameter, placed.detach(), module, name))


def taking(style: str, mesh: DeviceMesh, here: Placement, wanted: Placement, length: int | None = None) -> Any:
    """A hook that brings the first input of a module to where it is wanted; `here` is what a plain one is.

    Compiled code checks all that a hook refers to at each call: hooks of styles refer to what they need, not to styles
    nor meshes.
    """
    where = name_of_place(mesh, here)

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = first_tensor(style, module, inputs)
        if not isinstance(x, DTensor):
            x = annotated(x, where, length)
        return with_placements(x, (wanted,)), *inputs[1:]

    return before


def first_tensor(style: str, module: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """The first input of a module of this style.

    Raises:
        ValueError: there is none, or it is no tensor.
    """
    if not inputs or not isinstance(inputs[0], Tensor):
        got = type(inputs[0]).__name__ if inputs else "none (keyword arguments are not looked at)"
        raise ValueError(f"{style} expects a tensor as the first positional input of {module}; got {got}")
    return inputs[0]


_ANY_CALL_TAKES_PLACEMENTS = placements_are_values()


@overload
def with_placements(x: DTensor, placements: Sequence[Placement]) -> DTensor: ...


@overload
def with_placements(x: DTensor, placements: Sequence[Placement], local: bool) -> Tensor: ...


def with_placements(x: DTensor, placements: Sequence[Placement], local: bool = False) -> Tensor:
    """A DTensor with these placements, itself where nothing changes, or its part. For hooks, also in regions.

    Raises:
        UnsupportedOperatorError: it is no DTensor.
    """
    if not isinstance(x, DTensor):
        raise unsupported(
            "A parallel style got no DTensor from its module.",
            expected="a DTensor, as modules compute with weights that are DTensors",
            got=f"{type(x).__name__} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__,
            fix="no to_local() in forward of the module; and torch.autograd.grad in place of torch.func, which stands"
            " plain tensors in for DTensors",
        )
    if not is_dynamo_compiling():
        return part_in(x, placements) if local else x._placed(placements)
    x = x._placed(placements) if _ANY_CALL_TAKES_PLACEMENTS else x.redistribute(placements=placements)
    return x.to_local() if local else x


@one_node
def annotated(x: Tensor, where: str, length: int | None = None) -> DTensor:
    """The DTensor of which `x` is this rank's part.

    Args:
        x: plain.
        where: name of its mesh and placement.
        length: of its last dim in the whole, where that is known.
    """
    mesh, placement = named(where, x)
    dim = getattr(placement, "dim", None)
    if length is None or dim is None or dim % x.ndim != x.ndim - 1:
        return DTensor.from_local(x, mesh, (placement,))
    shape = (*x.shape[:-1], length)  # known, so pieces may be of unequal size
    return DTensor.from_local(x, mesh, (placement,), shape=shape, stride=contiguous_stride(shape))
