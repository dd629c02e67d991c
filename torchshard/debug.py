"""For finding out what a program does: collectives counted, pieces shown, unasked redistributions refused.

The names are those of torch.distributed.tensor.debug, for torchshard's DTensors (and torch's own beside them). What
each operator does, and why, is told by `torchshard.explain`.
"""

import threading
import warnings
from types import TracebackType
from typing import Any

import torch.distributed.tensor.debug as upstream
from tabulate import tabulate
from torch.distributed.tensor.placement_types import Placement

from torchshard._torch import beneath_intercepting, end_modules_once, intercepting
from torchshard.errors import ImplicitRedistributionError, ShardingError
from torchshard.layout.boxes import Box
from torchshard.layout.cuts import boxes_of_all, route
from torchshard.tensor.calls.dispatch import call_of
from torchshard.tensor.dtensor import DTensor, dtensors_in
from torchshard.tensor.layout import TensorLayout
from torchshard.tensor.observing import observing

__all__ = ["CommDebugMode", "ExplicitRedistributionContext", "visualize_sharding"]


class CommDebugMode(upstream.CommDebugMode):
    """Counts collectives, in all and by module; torch's own, which alone would not see those inside our operators.

    Counts are kept by functional collective, as torch keeps them: `torch.ops.c10d_functional.all_reduce` and so on.

    Example:
        >>> with CommDebugMode() as mode:
        ...     model(x).sum().backward()
        >>> mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        end_modules_once(self.advanced_module_tracker)

    def __enter__(self) -> "CommDebugMode":
        with beneath_intercepting():  # which are to see DTensors, too
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *of: Any) -> None:
        with beneath_intercepting():
            super().__exit__(*of)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(t is DTensor for t in types):
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        operands = [x for x in args if isinstance(x, DTensor)]
        tracker = self.advanced_module_tracker
        module = self.comm_module_operation_counts.setdefault(tracker.name, {"operations_list": []})
        module["operations_list"].append(
            {
                "name": func,
                "input_shape": [x.shape for x in operands],
                "input_sharding": [x.placements for x in operands],
                "device_mesh": str(operands[0].device_mesh) if operands else "",
                "is_bw": tracker.is_bw,
                "is_activation_checkpointing": tracker.activation_checkpointing,
            }
        )
        return NotImplemented  # the operator runs with this mode still on, which then sees what it sends

    def get_sharding_info(self) -> dict[str, Any]:
        """Placements of the parameters that are DTensors, by name."""
        self._note_parameters()
        return super().get_sharding_info()

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """What happened in each module, as text.

        Args:
            noise_level: 0 collectives only, 1 also operators on DTensors, 2 also those on plain tensors, 3 all.
        """
        self._note_parameters()
        return super().generate_comm_debug_tracing_table(noise_level)  # type: ignore[no-any-return, no-untyped-call]

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the same as JSON."""
        self._note_parameters()
        super().generate_json_dump(file_name, noise_level)  # type: ignore[no-untyped-call]

    def _note_parameters(self) -> None:
        """Add the placements of our parameters to what torch's tracker has noted of its own."""
        tracker = self.advanced_module_tracker
        for module, parameters in tracker.module_parameters_dict.items():
            for name, parameter in parameters.items():
                if isinstance(parameter, DTensor):
                    tracker.sharding_dict[f"{module}.{name}"] = parameter.placements
                    tracker.module_helper_dict[module].setdefault("parameters", {})[name] = str(parameter.placements)


def visualize_sharding(dtensor: Any, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which rows and columns; on the first rank of the mesh only.

    Args:
        dtensor: of two dims at most; nothing is printed for one without elements.
        header: printed above.
        use_rich: not supported.

    Raises:
        RuntimeError: more than two dims.
    """
    if use_rich:
        raise NotImplementedError("visualize_sharding(use_rich=True) is not supported; without it, a table is printed")
    if not isinstance(dtensor, DTensor):
        upstream.visualize_sharding(dtensor, header)
        return
    layout = dtensor._spec
    if not dtensor.numel():
        return
    if layout.ndim > 2:
        raise RuntimeError(f"visualize_sharding shows tensors of 1 or 2 dims, not of {layout.ndim}")
    if layout.mesh.coordinate != (0,) * layout.mesh.ndim:
        return
    device = dtensor.device_mesh.device_type
    cells: dict[tuple[str, str], list[str]] = {}
    idle: list[str] = []
    for rank, box in boxes_of_all(layout.sharding, layout.shape):
        holders = cells.setdefault(_rows_and_columns(box), []) if box.numel else idle
        holders.append(str(rank))
    rows, columns = (list(dict.fromkeys(cell[k] for cell in cells)) for k in (0, 1))
    body = [[f"{device}:{','.join(cells[r, c])}" if (r, c) in cells else "" for c in columns] for r in rows]
    text = tabulate(body, headers=columns, showindex=rows)
    print("\n".join([*[header] * bool(header), text, *[f"nothing: {device}:{','.join(idle)}"] * bool(idle)]))


def _rows_and_columns(box: Box) -> tuple[str, str]:
    (row, rows), (column, columns) = [*zip(box.offset, box.size, strict=True), (0, 1), (0, 1)][:2]
    return f"Row {row}-{row + rows - 1}", f"Col {column}-{column + columns - 1}"


class ExplicitRedistributionContext:
    """Inside it, an operator that would redistribute an argument raises instead; `redistribute` has to be called.

    Backward is watched too if it runs inside; it may redistribute where nobody can ask for it, so it is often left
    outside. Operators that send a few numbers or rows by themselves run: softmax, convolution, slices of a split dim.

    Args:
        enable: False allows redistributions again, inside of another one.
        strict: also refuse what is done without communication, such as keeping a slice.
        mode: "raise" an ImplicitRedistributionError (a RuntimeError), or "warn".

    Raises:
        RuntimeError: another mode.

    Example:
        >>> with ExplicitRedistributionContext():
        ...     y = torch.relu(x.redistribute(placements=[Replicate()]))
    """

    def __init__(self, enable: bool = True, strict: bool = False, mode: str = "raise") -> None:
        if mode not in ("raise", "warn"):
            raise RuntimeError(f"Invalid mode {mode!r}: it is 'raise' or 'warn'")
        self._enable, self._strict, self._raises = enable, strict, mode == "raise"
        self._watch = intercepting(self._run)

    def __enter__(self) -> "ExplicitRedistributionContext":
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator; the innermost context decides about it."""
        if _innermost.decides:
            return func(*args, **kwargs)
        _innermost.decides = True
        try:
            if not self._enable:
                return func(*args, **kwargs)
            with observing(lambda source, target: self._check(func, args, kwargs, source, target)):
                return func(*args, **kwargs)
        finally:
            _innermost.decides = False

    def _check(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: TensorLayout, target: TensorLayout
    ) -> None:
        if source.mesh is target.mesh and not self._strict:
            steps = route(source.sharding, target.sharding, source.shape, source.dtype.itemsize).steps
            if all(step.kind in ("slice", "mask") for step in steps):
                return
        call = call_of(func, args, kwargs)
        names = [
            name
            for name, value in zip(call.names, call.values, strict=True)
            if any(x._spec is source for x in dtensors_in([value]))
        ]
        argument = f"its argument {' or '.join(map(repr, names))}" if names else "a result on its way"
        error = ImplicitRedistributionError(
            f"{call.name} would redistribute {argument}, which nobody has asked for.",
            expected=f"{target.sharding}",
            got=source,
            where="inside of ExplicitRedistributionContext",
            fix=f"before it, call .redistribute(placements={_placements(target)})",
        )
        if self._raises:
            raise error
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)


class _Innermost(threading.local):
    decides = False


_innermost = _Innermost()


def _placements(layout: TensorLayout) -> list[Placement] | str:
    try:
        return list(layout.torch_placements)
    except ShardingError:
        return "[...]"
