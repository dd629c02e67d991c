"""A call of an operator: its arguments, which of them are tensors, and what must be true of those."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import compress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import (
    is_traced,
    lacks_fake,
    lies_as_device_likes,
    operator_names,
    overload_of,
    pretending,
    returning,
    schema,
)
from torchshard.errors import ShardingError
from torchshard.layout.layout import Mesh
from torchshard.rules.pointwise import BY_ELEMENT
from torchshard.rules.registry import find
from torchshard.rules.rule import Rule
from torchshard.rules.terms import is_whole_number
from torchshard.tensor.calls.codegen import KeyPart
from torchshard.tensor.calls.strides import lying_alike
from torchshard.tensor.dtensor import DTensor, dtensors_in
from torchshard.tensor.layout import TensorLayout, layout_for


def operator_name(func: Any) -> str:
    """Name and overload, as rules have it: "mm.default", and with the namespace outside of ATen."""
    name = ".".join(operator_names(func))
    return name if func.namespace == "aten" else f"{func.namespace}::{name}"


def rule_of(func: Any) -> Rule | None:
    """The rule that an operator has, or that torch's own tags tell; an in-place form has that of its other form, and
    one that writes to an `out` that of the form which returns it.
    """
    base, overload = operator_name(func).split(".", 1)
    forms = [func]
    if base.endswith("_") and (other := overload_of(func.namespace, base[:-1], overload)):
        forms.append(other)
    rules = [find(operator_name(form)) for form in forms]
    rules += [BY_ELEMENT for form in forms if _works_by_element(form)]
    if not any(rules) and len(schema(func).returns) == 1 and (other := returning(func)) and (rule := rule_of(other)):
        return rule.with_out()
    return next((rule for rule in rules if rule), None)


def _works_by_element(func: Any) -> bool:
    """Whether torch says of an operator that it works element by element; and whether it gives one tensor."""
    tags, returns = func.tags, schema(func).returns
    return (
        torch.Tag.pointwise in tags
        and torch.Tag.nondeterministic_seeded not in tags
        and len(returns) == 1
        and str(returns[0].type) == "Tensor"
    )


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator: what was passed, and of what kind each argument is."""

    func: Any
    name: str
    names: tuple[str, ...]
    positional: int
    parts: tuple[KeyPart, ...]
    values: tuple[Any, ...]

    def with_values(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """These values as positional and keyword arguments."""
        named = dict(zip(self.names[self.positional :], values[self.positional :], strict=True))
        return list(values[: self.positional]), named

    def without_values(self) -> "Call":
        """What plans keep of a call, which keep no tensors."""
        return self.given(())

    def given(self, values: tuple[Any, ...]) -> "Call":
        """A call of the same kind with these values."""
        return Call(self.func, self.name, self.names, self.positional, self.parts, values)

    def written(self) -> tuple[int, ...]:
        """Positions of the arguments that the operator writes to."""
        return _written(self.func, self.names)

    def for_items(self, values: Sequence[Any], chosen: Sequence[bool]) -> Any:
        """The operator, called for the chosen items of its lists alone."""
        some = [
            list(compress(v, chosen)) if isinstance(v, (list, tuple)) and len(v) == len(chosen) else v for v in values
        ]
        positional, named = self.with_values(some)
        return self.func(*positional, **named)

    def item_by_item(self, values: Sequence[Any]) -> None:
        """The operator, one that writes to its lists, called for each item of these alone."""
        count = max([len(value) for value in values if isinstance(value, (list, tuple))])
        for k in range(count):
            item = [v[k : k + 1] if isinstance(v, (list, tuple)) and len(v) == count else v for v in values]
            positional, named = self.with_values(item)
            self.func(*positional, **named)

    def draws(self, values: Sequence[Any]) -> bool:
        """Whether the operator uses a generator when called with these values: dropout with probability 0 does not."""
        if torch.Tag.nondeterministic_seeded not in self.func.tags:
            return False
        chances = [v for n, v in zip(self.names, values, strict=True) if n in ("p", "dropout_p", "dropout")]
        return not (chances and isinstance(chances[0], float) and chances[0] == 0.0)

    def viewed(self) -> bool:
        """Whether results share memory with an argument without being it."""
        return any(r.alias_info is not None and not r.alias_info.is_write for r in schema(self.func).returns)

    def keeps_strides(self) -> bool:
        """Whether results lie in memory as an argument does: views, and those that do not say that they are."""
        return self.viewed() or self.name in _UNSAID_VIEWS


_UNSAID_VIEWS = frozenset({"_unsafe_view.default", "unsafe_split.Tensor", "unsafe_split_with_sizes.default"})


@functools.lru_cache(4096)
def _written(func: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    by_name = {a.name: a for a in schema(func).arguments}
    chosen = [by_name[n.rstrip("_") if n not in by_name else n] for n in names]
    return tuple([i for i, a in enumerate(chosen) if a.alias_info is not None and a.alias_info.is_write])


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor among the arguments: where it stands, and its layout. `fixed`: a plain scalar, the same everywhere."""

    at: int
    item: int | None
    layout: TensorLayout
    fixed: bool = False


def operands_of(call: Call) -> list[Operand]:
    """The tensors among the arguments, plain scalars too."""
    mesh_layout = next(
        x._spec
        for part, value in zip(call.parts, call.values, strict=True)
        for x in (value if part == "tensors" and value is not None else [value])
        if type(x) is DTensor
    )
    found = []
    for at, (part, value) in enumerate(zip(call.parts, call.values, strict=True)):
        if part == "tensors" and value is not None:
            items: list[tuple[int | None, Any]] = list(enumerate(value))
        elif part == "tensor":
            items = [(None, value)]
        else:
            continue
        for item, x in items:
            if type(x) is DTensor:
                found.append(Operand(at, item, x._spec))
            elif x is not None:
                dtype = x.dtype if isinstance(x, Tensor) else torch.get_default_dtype()
                scalar = layout_for(mesh_layout.mesh.replicated(), (), (), dtype)
                found.append(Operand(at, item, scalar, fixed=True))
    return found


def lasting(
    plan: Callable[..., Any], call: Call, kinds: Iterable[tuple[Iterable[Operand], Iterable[TensorLayout | None]]]
) -> Callable[..., Any]:
    """The plan of a call; where dtypes may follow from torch.get_default_dtype(), one that holds while that is as now.

    Args:
        plan: what has been found for the call.
        call: the call.
        kinds: operands, and the results that are made of them.
    """
    if all(_tells_dtypes(operands, results) for operands, results in kinds):
        return plan
    default, call = torch.get_default_dtype(), call.without_values()

    def run(*values: Any) -> Any:
        if torch.get_default_dtype() is default:
            return plan(*values)
        from torchshard.tensor.calls.plan import make_plan

        return make_plan(call.given(values))[0]

    return run


def _tells_dtypes(operands: Iterable[Operand], results: Iterable[TensorLayout | None]) -> bool:
    """Whether the dtypes of results follow from those of operands, and not from torch.get_default_dtype()."""
    given = [o.layout.dtype for o in operands if not o.fixed]
    made = [layout.dtype for layout in results if layout is not None]
    return not all(map(is_whole_number, given)) or all(map(is_whole_number, made))


def require_one_mesh(call: Call, operands: Sequence[Operand]) -> None:
    """Raise ShardingError where arguments live on different meshes."""
    one_mesh(call.name, [(call.names[o.at], o.layout) for o in operands])


def one_mesh(operator: str, arguments: Sequence[tuple[str, TensorLayout]]) -> Mesh:
    """The mesh of these arguments, which have names; raises ShardingError where they live on different ones."""
    (first, layout), *others = arguments
    for name, other in others:
        if other.mesh is not layout.mesh:
            raise ShardingError(
                f"{operator}: the arguments live on different meshes.",
                expected="one mesh",
                got=f"argument {first}: {layout}\nargument {name}: {other}",
                fix=f"bring both to one: distribute_tensor({name}.full_tensor(), mesh, placements)",
            )
    return layout.mesh


def refuse_as_eager(call: Call) -> None:
    """Raise what the operator raises for the global shapes, if it does, and can be asked."""
    try:
        run_on_meta(call)
    except NotImplementedError:
        return
    except Exception:
        _refuse_as_device(call)
        raise


def _refuse_as_device(call: Call) -> None:
    """Raise what the device's kernel raises: torch's formulas for meta tensors fail in other words and other classes.

    It is asked about tensors of which all elements are one zero, so that they take no memory.
    """
    if call.written() or any(is_traced(x._local_tensor) for x in dtensors_in(call.values)):
        return
    device = torch.device(next(dtensors_in(call.values)).device_mesh.device_type)
    args, kwargs = _with_stand_ins(
        call, lambda shape, _, dtype: torch.zeros((), dtype=dtype, device=device).expand(shape)
    )
    call.func(*args, **kwargs)


def run_on_meta(
    call: Call, stand_ins: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}), strides: bool = False
) -> Any:
    """The operator on meta tensors of the global shapes: for its errors, and for the strides of its results.

    Where these depend on the device, on fake tensors of it.

    Args:
        call: the call.
        stand_ins: dtypes in place of others that operands have.
        strides: only the strides of results count.

    Raises:
        NotImplementedError: it has nothing to run on meta tensors.
    """
    device = torch.device("meta")
    mode: AbstractContextManager[object] = nullcontext()
    if lies_as_device_likes(call.func):
        given = next(dtensors_in(call.values))
        device = torch.device(given.device_mesh.device_type)
        mode = nullcontext() if is_traced(given._local_tensor) else pretending()

    def empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=stand_ins.get(dtype, dtype), device=device)

    try:
        with mode:
            args, kwargs = _with_stand_ins(call, empty)
            if "device" in kwargs:
                kwargs["device"] = device
            return (lying_alike(call.name, call.func) if strides else call.func)(*args, **kwargs)
    except (ZeroDivisionError, TypeError) as error:  # of no elements, in formulas that are none of a kernel
        raise NotImplementedError(str(error)) from error
    except RuntimeError as error:
        if lacks_fake(error):
            raise NotImplementedError(str(error)) from error
        raise


def _with_stand_ins(call: Call, make: Callable[..., Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, with tensors made of global shapes, strides and dtypes."""

    def standing_in(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [standing_in(item) for item in x]
        if type(x) is DTensor:
            return make(x._spec.shape, x._spec.stride, x._spec.dtype)
        return make((), (), x.dtype) if isinstance(x, Tensor) else x

    return call.with_values([standing_in(value) for value in call.values])
