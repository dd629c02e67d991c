"""parallelize_module: a plan of styles, one for each submodule that a name or pattern matches."""

import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchshard._torch import current_mesh, uncompiled
from torchshard.parallel.styles import ParallelStyle
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.mesh import bind
from torchshard.tensor.replacing import replacing

Plan = ParallelStyle | dict[str, ParallelStyle]
Tied = Sequence[tuple[nn.Module, str]]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Make a module parallel by a plan, in place.

    A parameter that several modules share (tied weights) stays one parameter.

    Args:
        module: the same on every rank; it, and modules in it, may be wrapped by torch.compile before or afterwards.
        device_mesh: of one axis, but for styles of your own; a larger one is sliced: `mesh["tp"]`. By default that of
            the surrounding `with mesh:`.
        parallelize_plan: a style for the module itself, or styles by the names of submodules. Each part of a dotted
            name may be a pattern as of fnmatch, as in "layers.*.mlp.w1"; "" is the module itself. Later entries see
            what earlier ones did.
        src_data_rank: place along the mesh of the rank whose parameters count; None to take every rank's own, without
            communication.

    Returns:
        The module.

    Raises:
        ShardingError: the mesh is none, or has several axes and the style takes one; a shared parameter is to be cut in
            two ways, or has hooks.
        NotImplementedError: a style that does not know the module.
        TypeError: a plan that is neither.

    Example:
        >>> plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}  # doctest: +SKIP
        >>> parallelize_module(model, mesh["tp"], plan)                     # doctest: +SKIP
    """
    mesh = current_mesh() if device_mesh is None else device_mesh
    bind(mesh)  # or an error: it is something else
    if parallelize_plan is None:
        warnings.warn("parallelize_module: there is no plan, so nothing is done", stacklevel=2)
        return module
    _require_plan(parallelize_plan, "parallelize_plan")
    with replacing(module, "parallelize_module"):
        _carry_out(uncompiled(module), mesh, parallelize_plan, src_data_rank, _tied(module))
    return module


def _require_plan(plan: object, where: str) -> None:
    if isinstance(plan, Mapping):
        for path, style in plan.items():
            _require_plan(style, f"{where}[{path!r}]")
        return
    if isinstance(plan, ParallelStyle):
        return
    got = type(plan).__module__ + "." + type(plan).__qualname__
    if isinstance(plan, type) and issubclass(plan, ParallelStyle):
        got = f"class; make one of it: {plan.__name__}()"
    raise TypeError(f"{where} is a ParallelStyle of torchshard.parallel or a dict of names and styles, not a {got}")


def _carry_out(module: nn.Module, mesh: DeviceMesh, plan: Plan, source: int | None, tied: Sequence[Tied]) -> None:
    if isinstance(plan, ParallelStyle):
        plan.src_data_rank = source
        try:
            plan._apply(module, mesh)
        finally:  # what it had placed when it failed stays one, too, for the call that comes next
            for places in tied:
                _tie(places)
        return
    for path, style in plan.items():
        matched = _matches(module, path)
        if not matched:
            warnings.warn(
                f"parallelize_module: the plan's key {path!r} matches no submodule of {type(module).__name__}; skipped",
                stacklevel=3,
            )
        for submodule in matched:
            try:
                _carry_out(submodule, mesh, style, source, tied)
            except Exception as error:
                name = next((name for name, m in module.named_modules() if m is submodule), "")
                error.add_note(f"  where:    parallelize_plan[{path!r}], at {name or 'the module itself'}")
                raise


def _matches(module: nn.Module, path: str) -> list[nn.Module]:
    """The submodules that a dotted name with patterns means, in the order of the module.

    Those that torch.compile has wrapped go by the names they had, and are found with the wrapper's name, too.
    """
    module = uncompiled(module)
    if not path:
        return [module]
    token, _, rest = path.partition(".")
    if token == "_orig_mod":
        return _matches(module, rest)
    children = [child for name, child in module.named_children() if fnmatch(name, token)]
    return [found for child in children for found in _matches(child, rest)]


def _tied(module: nn.Module) -> list[Tied]:
    """Where each parameter is held that several modules hold."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for submodule in module.modules():
        for name, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((submodule, name))
    return [held for held in places.values() if len(held) > 1]


def _tie(places: Tied) -> None:
    """Where a style has made a DTensor of a shared parameter, all that share it get the same one."""
    held = [getattr(module, name) for module, name in places]
    made = next((parameter for parameter in held if isinstance(parameter, DTensor)), None)
    if made is not None:
        for (module, name), parameter in zip(places, held, strict=True):
            if parameter is not made:
                module.register_parameter(name, made)  # type: ignore[arg-type]  # a Parameter that is a DTensor
