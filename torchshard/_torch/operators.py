"""Operators: their names, schemas and decompositions, and calls of them seen or run below dispatch."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from torchshard._torch.finding import find_once, has_fast_paths
from torchshard._torch.frames import skip_alone

_SAME_VALUES = {"_unsafe_view": "view"}


def local_callable(func: Any) -> Callable[..., Any]:
    """What to call for an ATen operator on local tensors.

    torch's own Python binding where there is one: it parses arguments in half the time of an OpOverload (1.1 against
    1.95 us for add; 2.11-2.15). Bindings take the same arguments in the same order, but take the default reduction of
    a loss for "none", no None among indices, no `out` that was generated, and make tensors of numbers among results.
    What differs from another operator for autograd only has that one's.
    """
    if has_fast_paths() and func.namespace == "aten" and not _is_called_otherwise(func):
        name = _SAME_VALUES.get(func._overloadpacket.__name__, func._overloadpacket.__name__)
        for home in (torch._C._VariableFunctions, torch._C.TensorBase):
            found = getattr(home, name, None)
            if found is not None:
                return found  # type: ignore[no-any-return]
    return func  # type: ignore[no-any-return]


def called_directly(func: Any, kind: type, function: Callable[..., Any]) -> Callable[[], None]:
    """Have torch call `function` for an ATen operator on tensors of this class, in place of its `__torch_dispatch__`.

    Before torch calls the method it asks for such a function, always. What torch.library's register_torch_dispatch
    does, without a library for it to live in (torch._library.simple_registry, 2.11-2.15). Operators of users are left
    to the method, as users may want to register functions of their own.

    Returns:
        What takes it back.
    """
    registry = find_once("_library.simple_registry.singleton")
    if registry is None or func.namespace != "aten":
        return lambda: None
    try:
        handle = registry.find(func.__qualname__).torch_dispatch_rules.register(kind, skip_alone(function))
    except RuntimeError:  # there is one
        return lambda: None
    return cast(Callable[[], None], handle.destroy)


def _is_called_otherwise(func: Any) -> bool:
    if torch.Tag.generated in func.tags or any(map(_is_parsed_otherwise, func._schema.arguments)):
        return True
    returned = {str(r.type) for r in func._schema.returns}
    return "int" in returned and len(returned) > 1


def _is_parsed_otherwise(argument: Any) -> bool:
    return argument.name == "reduction" or str(argument.type) == "List[Optional[Tensor]]"


def in_backward() -> bool:
    """Whether the autograd engine is running in this thread (2.11-2.15)."""
    return torch._C._current_graph_task_id() != -1


def in_forward_ad() -> bool:
    """Whether tangents may go along with tensors (torch.autograd.forward_ad, 2.11-2.15)."""
    return torch.autograd.forward_ad._current_level >= 0


def is_missing_tangent(x: Tensor) -> bool:
    """Whether forward AD has made a tensor, for an operand of an operator that has no tangent: one zero, expanded.

    Where the operator is a sum, it first asks for the shape of the result, on the meta device (2.13).
    """
    if type(x) is not Tensor or not in_forward_ad():
        return False
    memory = x.untyped_storage()
    return x.is_meta or (memory.nbytes() == x.itemsize and not any(x.stride()) and not any(memory.tolist()))


def decomposition(func: Any) -> Callable[..., Any] | None:
    """What an operator is made of where ATen composes it of others for every backend; None where it does not.

    Such operators reach a tensor subclass whole only in inference mode (OpOverload.decompose, 2.11-2.15).
    """
    return func.decompose if func._can_decompose() else None


def lies_as_device_likes(func: Any) -> bool:
    """Whether a device decides how results of an operator lie in memory: torch's fake tensors follow it, meta ones not.

    torch._subclasses.fake_impls (2.11-2.15).
    """
    aten = torch.ops.aten
    return func in (aten.convolution.default, aten.convolution_backward.default)


def pretending() -> AbstractContextManager[object]:
    """In this context tensors are fake: they have a device, and no memory (torch._subclasses, 2.11-2.15)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def operator_names(func: Any) -> tuple[str, str]:
    """Name and overload of an ATen operator: ("add", "Tensor") (2.11-2.15; func.name() has other spellings)."""
    return func._overloadpacket.__name__, func._overloadname


def operator_in(ops: Any, name: str) -> Any:
    """The operator of a name such as "mm", "mm.out" or "mylib::scale", below torch.ops (2.11-2.15).

    All its overloads where the name tells none.

    Raises:
        AttributeError: there is none.
    """
    space, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(ops, space or "aten"), packet)
        return getattr(found, overload) if overload else found
    except AttributeError:
        raise AttributeError(
            f"torch has no operator {name!r}: expected a name such as 'mm', 'mm.out' or 'mylib::scale', of an "
            "operator that is registered by now (import the library that does so first)"
        ) from None


def one_operator(op: Any) -> Any:
    """The overload that is meant by a name, an overload, all overloads (the default one) or a custom_op (2.11-2.15).

    Raises:
        TypeError: none of these.
        AttributeError: there is no operator of this name, or several overloads without a default one.
    """
    found = operator_in(torch.ops, op) if isinstance(op, str) else op
    found = getattr(found, "_opoverload", found)  # of a CustomOpDef
    if isinstance(found, torch._ops.OpOverloadPacket):
        overloads = found.overloads()
        return getattr(found, overloads[0] if len(overloads) == 1 else "default")
    if not isinstance(found, torch._ops.OpOverload):
        raise TypeError(f"expected an operator, such as torch.ops.aten.mm.default or its name, not {op!r}")
    return found


def overload_of(namespace: str, name: str, overload: str) -> Any:
    """The operator of these names, None where there is none; "mylib::scale" and "scale" are the same name."""
    packet = getattr(getattr(torch.ops, namespace), name.split("::")[-1], None)
    return getattr(packet, overload, None)


def returning(func: Any) -> Any:
    """The operator that returns what this one writes to its outputs: the overload that takes the rest (2.11-2.15).

    None where there is none; overloads are named without a system ("mm.out" and "mm", "sum.out" and "sum.dim_IntList").
    """
    arguments = func._schema.arguments
    if not any(a.is_out for a in arguments) or any(str(a.type) != "Tensor" for a in arguments if a.is_out):
        return None
    others = [getattr(func._overloadpacket, name) for name in func._overloadpacket.overloads()]
    taken = _taken([a for a in arguments if not a.is_out])
    return next((other for other in others if _taken(other._schema.arguments) == taken), None)


def _taken(arguments: Iterable[Any]) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in arguments]


def schema(func: Any) -> Any:
    """Arguments and returns of an operator, with what they alias and write (OpOverload._schema, 2.11-2.15)."""
    return func._schema


def is_view(x: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another (Tensor._is_view, 2.11-2.15)."""
    return x._is_view()


def below_dispatch() -> Any:
    """Operators see a tensor subclass as its wrapper alone in this context (torch._C._DisableTorchDispatch)."""
    return torch._C._DisableTorchDispatch()


def below_autograd() -> AbstractContextManager[object]:
    """Operators of plain tensors do not ask autograd in this context, and have no history.

    torch's functional collectives and the wait for them have formulas in Python, of 5 to 10 us a call where nothing
    requires a gradient (torch._C._AutoDispatchBelowAutograd, 2.11-2.15; without it the calls take that time).
    """
    found = find_once("_C._AutoDispatchBelowAutograd")
    return found() if found else nullcontext()


def reading_conjugates(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of plain tensors whose operators read conjugates, and negatives, that it makes within as such.

    Where torch calls `__torch_dispatch__` it has left that behind (torch._C._dispatch_tls_set_dispatch_key_excluded,
    2.11-2.15): kernels that are made of other operators, as linalg_pinv's, would read what lies in memory.
    """
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    keys = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative

    def run(*args: Any, **kwargs: Any) -> Any:
        left = [key for key in keys if excluded(key)]
        for key in left:
            exclude(key, False)
        try:
            return function(*args, **kwargs)
        finally:
            for key in left:
                exclude(key, True)

    return run


def outside_of_traces() -> Any:
    """Operators compute in this context, also while something is traced.

    torch.utils._python_dispatch._disable_current_modes (2.11-2.15).
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def lacks_fake(error: RuntimeError) -> bool:
    """Whether a torch.library.custom_op refused meta tensors because it has no register_fake.

    Such an operator raises a plain RuntimeError (2.11-2.15), where others without a meta kernel raise
    NotImplementedError; only the message tells.
    """
    return "no fake impl registered" in str(error)


def refuses_kind(error: Exception) -> bool:
    """Whether an operator of ATen refused the dtypes of its operands, or to write to memory twice, and not values.

    There is no class for it: kernels that lack a dtype raise NotImplementedError, most checks a plain RuntimeError
    (2.11-2.15); only the message tells.
    """
    return isinstance(error, NotImplementedError) or _OF_KINDS.search(str(error)) is not None


def refuses_overlap(error: RuntimeError) -> bool:
    """Whether an operator of ATen refused to write to what an operand partly lies in; only the message tells."""
    return "some elements of the input tensor and the written-to tensor" in str(error)


_OF_KINDS = re.compile("dtype|scalar type|tensor input|more than one element of the written-to tensor")


def intercepting(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[None]:
    """A context in which every operator of this thread, those of backward too, becomes run(operator, args, kwargs).

    torch.utils._python_dispatch.TorchDispatchMode (2.11-2.15); there is no public way to see operators below autograd.
    """
    return cast(AbstractContextManager[None], _interceptor()(run))


@functools.cache
def _interceptor() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Intercepting(TorchDispatchMode):
        def __init__(self, run: Any) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._run = run

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._run(func, args, kwargs or {})

    return Intercepting


def has_modes() -> bool:
    """Whether modes may see operators of this thread (torch._C._len_torch_dispatch_stack, 2.11-2.15; else they may)."""
    count = find_once("_C._len_torch_dispatch_stack")
    return count is None or count() > 0


@contextmanager
def beneath_modes(answers: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """What modes let through of some operators, by their names with overloads, is answered in place of kernels.

    Others that they run themselves, as a selective checkpoint detaches what it keeps, run as ever.

    torch.utils._python_dispatch: _get_current_dispatch_mode, _pop_mode, _push_mode (2.11-2.15).
    """
    from torch.utils import _python_dispatch as modes

    above = []
    while modes._get_current_dispatch_mode() is not None:
        above.append(modes._pop_mode())

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return answers.get(str(func), func)(*args, **kwargs)

    bottom = _interceptor()(run)
    for mode in (bottom, *reversed(above)):
        modes._push_mode(mode)
    try:
        yield
    finally:
        while modes._pop_mode() is not bottom:
            pass
        for mode in reversed(above):
            modes._push_mode(mode)


@contextmanager
def beneath_intercepting(down_to: object = None) -> Iterator[None]:
    """For a mode that is entered or left within: it comes below those of `intercepting` that are on top.

    Down to this one, where it is of that kind itself. A mode that leaves an operator to the class of its operands keeps
    it from all modes below (torch.utils._python_dispatch._get_current_dispatch_mode, 2.11-2.15).
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    lifted: list[Any] = []
    while isinstance(mode := _get_current_dispatch_mode(), _interceptor()) and mode is not down_to:
        mode.__exit__(None, None, None)
        lifted.append(mode)
    try:
        yield
    finally:
        for mode in reversed(lifted):
            mode.__enter__()


def reading_number(name: str) -> Any:
    """Tensor.__float__ or one of its kin, for a subclass: its operators see it also where torch has switched them off.

    torch.tensor([x, 2.0]) asks its items while Python's dispatch keys are excluded (up to 2.12 both of them), and would
    read a wrapper's memory, of which there is none (torch._C._dispatch_tls_set_dispatch_key_excluded, 2.11-2.15;
    without it, torch's error).
    """
    read = getattr(Tensor, name)

    def number(x: Tensor) -> Any:
        is_excluded, exclude = find_once("_C._dispatch_tls_is_dispatch_key_excluded"), find_once(_SET_EXCLUDED)
        keys = torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot
        excluded = [key for key in keys if is_excluded and exclude and is_excluded(key)]
        for key in excluded:
            exclude(key, False)
        try:
            return read(x)
        finally:
            for key in excluded:
                exclude(key, True)

    return number


_SET_EXCLUDED = "_C._dispatch_tls_set_dispatch_key_excluded"


def no_torch_function() -> Any:
    """What a tensor class without torch functions of its own has as __torch_function__ (2.11-2.15)."""
    return torch._C._disabled_torch_function_impl
