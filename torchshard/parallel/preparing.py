"""Styles that leave a module's parameters alone: they make DTensors of its inputs and outputs, and move them."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from torchshard.parallel.styles import ParallelStyle, annotated, require_one_axis, with_placements
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.regions.naming import name_of_place

Some = Placement | tuple[Placement | None, ...]


class PrepareModuleInput(ParallelStyle):
    """Inputs of a module, made DTensors of a layout and brought to another one.

    Args:
        input_layouts: what each plain positional input is: one placement, or one for each input; None for inputs that
            are to be left as they are.
        desired_input_layouts: what the module wants, likewise.
        input_kwarg_layouts: what keyword inputs are, by name; those that are not named are left as they are. One that
            is named here has to come by its name, if it comes.
        desired_input_kwarg_layouts: what the module wants, by name.
        use_local_output: give the module plain tensors, this rank's parts.

    Raises:
        AssertionError: layouts without desired ones, or not as many.
    """

    def __init__(
        self,
        *,
        input_layouts: Some | None = None,
        desired_input_layouts: Some | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _several(input_layouts)
        self.desired_input_layouts = _several(desired_input_layouts)
        self.use_local_output = use_local_output
        self.with_kwargs = input_kwarg_layouts is not None
        self.input_kwarg_layouts: Mapping[str, Placement] = input_kwarg_layouts or {}
        self.desired_input_kwarg_layouts: Mapping[str, Placement] = desired_input_kwarg_layouts or {}
        if self.input_layouts is not None:
            if self.desired_input_layouts is None:
                raise AssertionError("input_layouts need desired_input_layouts")
            _require_as_many("desired_input_layouts", self.desired_input_layouts, "input_layouts", self.input_layouts)
        if self.with_kwargs:
            names, desired = sorted(self.input_kwarg_layouts), sorted(self.desired_input_kwarg_layouts)
            if names != desired:
                raise AssertionError(f"input_kwarg_layouts names {names}, desired_input_kwarg_layouts {desired}")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_one_axis(self, device_mesh)
        local, given, desired_named = self.use_local_output, self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        places = _places(device_mesh, self.input_layouts or ())
        desired = None if self.input_layouts is None else self.desired_input_layouts
        named = dict(zip(given, _places(device_mesh, given.values()), strict=True))
        told = [layout is not None for layout in self.input_layouts or ()]
        by_name = [(at, name) for name, at in _seats(module, given).items() if not any(told[at : at + 1])]

        def positional(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return inputs if desired is None else prepare_all("input", inputs, places, desired, local)

        def both(
            module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            placed = positional(module, inputs)
            for at, name in by_name:
                if at < len(inputs):
                    raise ValueError(
                        f"input {at} of the module has come by its place, and input_kwarg_layouts tells of {name!r} by "
                        f"name: call the module with {name}=, or tell of it in input_layouts"
                    )
            prepared = {
                name: prepare(x, named.get(name), desired_named.get(name), local) for name, x in keywords.items()
            }
            return placed, prepared

        if self.with_kwargs:
            module.register_forward_pre_hook(both, with_kwargs=True)
        else:
            module.register_forward_pre_hook(positional)
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleOutput(ParallelStyle):
    """Outputs of a module, made DTensors of a layout and brought to another one.

    Args:
        output_layouts: what each plain output is: one placement, or one for each output; None for outputs that are to
            be left as they are.
        desired_output_layouts: what is wanted, likewise.
        use_local_output: give plain tensors, this rank's parts.

    Raises:
        AssertionError: not as many desired layouts as layouts.
    """

    def __init__(self, *, output_layouts: Some, desired_output_layouts: Some, use_local_output: bool = True) -> None:
        self.output_layouts: tuple[Placement | None, ...] = _several(output_layouts) or ()
        self.desired_output_layouts: tuple[Placement | None, ...] = _several(desired_output_layouts) or ()
        self.use_local_output = use_local_output
        _require_as_many("desired_output_layouts", self.desired_output_layouts, "output_layouts", self.output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_one_axis(self, device_mesh)
        places, desired = _places(device_mesh, self.output_layouts), self.desired_output_layouts
        local = self.use_local_output

        def after(module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
            values = outputs if isinstance(outputs, tuple) else (outputs,)
            prepared = prepare_all("output", values, places, desired, local)
            return prepared[0] if len(prepared) == 1 else prepared

        module.register_forward_hook(after)
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, use_local_output={self.use_local_output})"
        )


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one; `use_local_input` is the former's `use_local_output`."""

    def __init__(
        self,
        *,
        input_layouts: Some | None = None,
        desired_input_layouts: Some | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Some,
        desired_output_layouts: Some,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prepare_module_input}, {self.prepare_module_output})"


def prepare(x: Any, where: str | None, desired: Placement | None, local: bool) -> Any:
    """A tensor of a layout, brought to the desired one; what has no layout stays as it is.

    Args:
        x: a plain tensor, this rank's part; or a DTensor, which knows its layout.
        where: name of the mesh and the placement of a plain tensor; None for what has no layout.
        desired: the layout wanted; None for the one that it has.
        local: give this rank's part.

    Raises:
        AssertionError: x has a layout but is no tensor.
    """
    if where is None:
        return x
    if not isinstance(x, Tensor):
        raise AssertionError(f"a layout for a value that is no tensor: {type(x).__name__}; give None for it")
    x = x if isinstance(x, DTensor) else annotated(x, where)
    if desired is not None:
        return with_placements(x, (desired,), local)
    return x.to_local() if local else x


def prepare_all(
    kind: str,
    values: tuple[Any, ...],
    places: tuple[str | None, ...],
    desired: tuple[Placement | None, ...],
    local: bool,
) -> tuple[Any, ...]:
    """`prepare` for each input, or each output, of a module.

    Raises:
        ValueError: there are not as many as layouts.
    """
    if len(values) != len(places):
        raise ValueError(
            f"the module has {len(values)} {kind}s, and {kind}_layouts has {len(places)}; give None where to leave one"
        )
    return tuple([prepare(x, where, wanted, local) for x, where, wanted in zip(values, places, desired, strict=True)])


def _seats(module: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """The place among the inputs of a module of those of its keyword inputs that may also come by their place.

    Raises:
        ValueError: the module takes no such input.
    """
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # not in Python
        return {}
    kinds = inspect.Parameter
    taken = {name: p.kind for name, p in parameters.items() if p.kind is not kinds.VAR_POSITIONAL}
    if kinds.VAR_KEYWORD not in taken.values() and (strange := [name for name in names if name not in taken]):
        raise ValueError(
            f"input_kwarg_layouts names {', '.join(strange)}, and {type(module).__name__} takes {', '.join(taken)}"
        )
    placed = [n for n, kind in taken.items() if kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    return {name: placed.index(name) for name in names if name in placed}


def _places(mesh: DeviceMesh, layouts: Iterable[Placement | None]) -> tuple[str | None, ...]:
    return tuple([None if layout is None else name_of_place(mesh, layout) for layout in layouts])


def _several(layouts: Some | None) -> tuple[Placement | None, ...] | None:
    return (layouts,) if isinstance(layouts, Placement) else layouts


def _require_as_many(name: str, some: tuple[Any, ...], other: str, others: tuple[Any, ...]) -> None:
    if len(some) != len(others):
        raise AssertionError(f"{name} and {other} must have the same length: {len(some)} and {len(others)}")
