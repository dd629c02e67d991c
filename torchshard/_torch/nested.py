"""Operators beyond ATen's (higher order, as torch calls them) that are told to take wrapper subclasses."""

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchshard._torch.finding import find
from torchshard._torch.operators import outside_of_traces
from torchshard._torch.partitioning import Wrapper


@functools.cache
def nest_in_place(kind: type) -> bool:
    """Have regions that are nested in a compiled one trace where they are called, with this class among their operands.

    torch has no rule for wrapper subclasses there, and takes what a region gives when it is called again for a plain
    tensor. Values are the same; the graph of such a region is compiled once for each of its calls, which is said once.

    Returns:
        Whether torch had to be told, and can be
        (torch.ops.higher_order.invoke_subgraph, torch._dynamo.variables.invoke_subgraph.is_reuse_eligible, 2.13-2.15;
        before, FakeTensorMode refuses such operands).
    """
    operator = find("ops.higher_order.invoke_subgraph")
    if not _has_kernels(operator) or not _refuses_wrappers(lambda x: operator(lambda y: (y,), "torchshard", x)):
        return False

    def in_place(function: Callable[..., Any], identifier: Any, *operands: Any) -> Any:
        _say_in_place(kind)
        return function(*operands)

    _add_kernel(operator, kind, in_place)
    _call_anew(kind)
    return True


@functools.cache
def operate_with(kind: type, name: str, function: Callable[..., Any]) -> bool:
    """Have this class among the operands of an operator that calls functions, and knows no wrapper subclasses.

    Args:
        kind: the class.
        name: of the operator.
        function: takes torch's operator, for plain tensors, and what that takes.

    Returns:
        Whether torch can be told
        (torch.ops.higher_order: flex_attention, cond, while_loop, scan, map_impl, trace_wrapped, 2.11-2.15).
    """
    operator = find(f"ops.higher_order.{name}")
    if not _has_kernels(operator):
        return False
    _add_kernel(operator, kind, functools.partial(function, operator))
    return True


def _has_kernels(operator: Any) -> bool:
    return torch._C.DispatchKey.Autograd in getattr(operator, "py_kernels", ())


def _add_kernel(operator: Any, kind: type, kernel: Callable[..., Any]) -> None:
    """One that runs where a class is among the operands: in place of torch's also where they require gradients, which
    would make a backward of its own, and in modes, which take all tensors for plain ones.
    """
    key = torch._C.DispatchKey.Autograd
    otherwise = operator.py_kernels[key]

    @functools.wraps(otherwise)
    def chosen(*operands: Any, **also: Any) -> Any:
        return (kernel if _among(kind, operands) else otherwise)(*operands, **also)

    operator.py_impl(kind)(kernel)
    operator.py_kernels[key] = chosen
    for mode, handler in operator.python_key_table.items():
        if issubclass(mode, TorchDispatchMode):
            operator.python_key_table[mode] = _left(kind, handler)


@functools.cache
def decompose_within(kind: type, name: str, around: Callable[[], AbstractContextManager[None]]) -> None:
    """Have what torch makes of an operator of ATen in traces run in a context, where all its tensors are of a class.

    Where torch makes nothing of it there (OpOverload: py_kernels, _dispatch_cache, 2.11-2.15) nothing is done.

    Args:
        kind: the class.
        name: of the operator, without an overload.
        around: makes the context.
    """
    packet = find(f"ops.aten.{name}")
    for overload in packet.overloads() if packet else ():
        operator = getattr(packet, overload)
        kernels, chosen = getattr(operator, "py_kernels", None), getattr(operator, "_dispatch_cache", None)
        if kernels and chosen is not None:
            kernels.update({key: _within(kind, kernel, around) for key, kernel in kernels.items()})
            chosen.clear()


def _within(kind: type, kernel: Callable[..., Any], around: Callable[[], AbstractContextManager[None]]) -> Any:
    @functools.wraps(kernel)
    def chosen(*operands: Any, **also: Any) -> Any:
        kinds = {type(x) for x in (*operands, *also.values()) if isinstance(x, torch.Tensor)}
        with around() if kinds == {kind} else nullcontext():
            return kernel(*operands, **also)

    return chosen


def _left(kind: type, handler: Callable[..., Any]) -> Callable[..., Any]:
    """What a mode does with an operator, where a class is not among the operands."""

    @functools.wraps(handler)
    def plain(mode: Any, *operands: Any, **also: Any) -> Any:
        return NotImplemented if _among(kind, operands) else handler(mode, *operands, **also)

    return plain


def _among(kind: type, operands: tuple[Any, ...]) -> bool:
    lists = [x if isinstance(x, (list, tuple)) else (x,) for x in operands]
    return any(kind in map(type, x) for x in lists)


def _call_anew(kind: type) -> None:
    """Have Dynamo trace a region for each call where it gives this class."""
    try:
        from torch._dynamo.variables import invoke_subgraph as dynamo
    except ImportError:
        return
    if (reusable := getattr(dynamo, "is_reuse_eligible", None)) is None:
        return

    @functools.wraps(reusable)
    def plain_and_reusable(tx: Any, made: Any, *about: Any, **also: Any) -> bool:
        results = getattr(made, "items", None)
        results = results if isinstance(results, list) else [made]
        if any(getattr(result, "class_type", None) is kind for result in results):
            return False
        return bool(reusable(tx, made, *about, **also))

    setattr(dynamo, reusable.__name__, plain_and_reusable)


@functools.cache
def keep_operands_of_functions() -> bool:
    """Have inductor leave the operands of a function within a graph as they are; whether it had to be told.

    The function of a cond in a backward graph takes the numbers of its operands for those of the graph's own, of which
    some may be overwritten, and writes over what others read after it.
    (torch._inductor.graph.GraphLowering: make_subgraph, bw_donated_idxs, 2.11-2.15)
    """
    from torch._inductor.graph import GraphLowering

    make: Any = getattr(GraphLowering, "make_subgraph", None)
    if make is None:
        return False

    @functools.wraps(make)
    def made(*about: Any, **also: Any) -> Any:
        lowering = make(*about, **also)
        if hasattr(lowering, "bw_donated_idxs"):
            lowering.bw_donated_idxs = None
        return lowering

    setattr(GraphLowering, make.__name__, made)
    return True


@functools.cache
def find_memory_of_parts(kind: Any) -> bool:
    """Have Dynamo find out where tensors of a class lie in memory, as it does to compare what functions take and give.

    Returns:
        Whether it had to be told, and can be
        (torch._dynamo.variables.higher_order_ops.get_tensor_storages, 2.13-2.15; before, it does not ask).
    """
    from torch._dynamo.variables import higher_order_ops

    find_memory: Any = getattr(higher_order_ops, "get_tensor_storages", None)
    if find_memory is None or not _refuses_wrappers(find_memory):
        return False

    @functools.wraps(find_memory)
    def of_parts(tensor: Any) -> set[Any]:
        if type(tensor) is not kind:
            return set(find_memory(tensor))
        parts: list[str] = tensor.__tensor_flatten__()[0]
        return set().union(*[find_memory(getattr(tensor, name)) for name in parts])

    setattr(higher_order_ops, find_memory.__name__, of_parts)
    return True


def print_parts(kind: type, shown: Callable[[Any], torch.Tensor]) -> None:
    """Have torch's print for graphs show a part of a tensor of this class, behind its rank, as it does of its DTensor.

    (torch.ops.higher_order.print, 2.11-2.15)
    """
    printing = find("ops.higher_order.print")
    if printing is None:
        return

    def print_here(text: str, *args: Any, **kwargs: Any) -> None:
        from torch.utils._pytree import tree_map_only

        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            text = f"[rank {torch.distributed.get_rank()}] {text}"
        args, kwargs = tree_map_only(kind, shown, (args, kwargs))
        printing(text, *args, **kwargs)

    printing.py_impl(kind)(print_here)


@functools.cache
def _say_in_place(kind: type) -> None:
    warnings.warn(
        f"torchshard: a function under torch.compiler.nested_compile_region that takes a {kind.__name__} is compiled "
        "anew for each of its calls, as torch has no rule for such tensors there (said once).",
        RuntimeWarning,
        stacklevel=2,
    )


def _refuses_wrappers(ask: Callable[[Wrapper], object]) -> bool:
    """Whether torch has no rule for wrapper subclasses."""
    with outside_of_traces():  # this is asked while a graph is traced
        try:
            ask(Wrapper(torch.zeros(2)))
        except NotImplementedError:
            return True
    return False
