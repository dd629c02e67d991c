"""Symbolic lengths of wrapper subclasses and their parts: recorded by torch's tracer, handed on by AOTAutograd."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch


@functools.cache
def record_lengths() -> bool:
    """Have a trace record all lengths that were computed while it did not look; whether that can be told.

    It makes them of their formulas anew, but knows no powers (the stride of a square), and before 2.15 no products of
    three: "is not tracked with proxy", on some ranks alone where others have such a length as a stride of their part.
    (torch.fx.experimental.proxy_tensor: _build_proxy_for_sym_expr, _sympy_handlers, _sym_register;
    torch.utils._sympy.functions.PowByNatural, 2.11-2.15)
    """
    import sympy  # type: ignore[import-untyped]
    from torch.fx.experimental import proxy_tensor
    from torch.utils._sympy.functions import PowByNatural

    build: Any = getattr(proxy_tensor, "_build_proxy_for_sym_expr", None)
    handlers: Any = getattr(proxy_tensor, "_sympy_handlers", None)
    register: Any = getattr(proxy_tensor, "_sym_register", None)
    if build is None or handlers is None or register is None:
        return False
    for power in (sympy.Pow, PowByNatural):
        handlers().setdefault(power, operator.pow)

    @functools.wraps(build)
    def built(tracer: Any, formula: Any, out: Any = None) -> Any:
        known = tracer.sympy_expr_tracker.get(formula) is not None
        if known or not getattr(formula, "is_Mul", False) or len(formula.args) == 2:
            return build(tracer, formula, out)
        first, *others = formula.args
        factors = built(tracer, first), built(tracer, formula.func(*others))
        if any(factor is None for factor in factors):
            return None
        if out is None:
            return operator.mul(*factors)
        register(tracer, operator.mul, factors, out)
        return out

    setattr(proxy_tensor, build.__name__, built)
    return True


@functools.cache
def bind_lengths_of_parts() -> bool:
    """Have backward be given the symbols that saved tensors' sizes are made of; whether that can be told.

    Of a wrapper subclass only sizes of the whole are inputs of a graph. Where its part has a symbol of its own and a
    saved tensor is 2 s long, inductor knows s forward, by the part, but in backward by nothing: "expected [s] to have
    been codegen-ed", on the ranks alone whose part has such a length. So forward hands on a size of the part.
    (torch._functorch.partitioners.find_symbol_binding_fx_nodes, 2.11-2.15)
    """
    from torch._functorch import partitioners

    binding = getattr(partitioners, "find_symbol_binding_fx_nodes", None)
    if binding is None:
        return False

    @functools.wraps(binding)
    def found(graph: torch.fx.Graph) -> dict[Any, torch.fx.Node]:
        bound: dict[Any, torch.fx.Node] = binding(graph)
        inputs = graph.find_nodes(op="placeholder")
        for node in inputs:
            x = node.meta.get("val")
            lengths: Any = x.shape if isinstance(x, torch.Tensor) and "tangents" not in node.name else ()
            for dim, n in enumerate(lengths):
                symbol = n.node.expr if isinstance(n, torch.SymInt) else None
                if getattr(symbol, "is_Symbol", False) and symbol not in bound:
                    with graph.inserting_after(inputs[-1]):
                        bound[symbol] = size = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                    size.meta.update({**node.meta, "val": n})
        return bound

    setattr(partitioners, binding.__name__, found)
    return True


@functools.cache
def return_lengths_as_looked_at() -> bool:
    """Have a graph return as many lengths of wrapper subclasses as was found of its function; whether that can be told.

    AOTAutograd looks at what a function returns, and traces it afterwards: sizes that were symbols are results of the
    graph. One that the trace comes to know before is a plain number there and no result, others are taken for it ("was
    invalid, but is output"), on one rank alone where its part decides. Here such a number is a result.
    (torch._functorch._aot_autograd.graph_capture_wrappers: aot_dispatch_subclass, unwrap_tensor_subclasses;
    torch.utils.weak, 2.11-2.15)
    """
    try:
        from torch._functorch._aot_autograd import graph_capture, graph_capture_wrappers
        from torch._functorch._aot_autograd.descriptors import (
            SubclassGetAttrAOTOutput,
            SubclassSizeAOTOutput,
            SubclassStrideAOTOutput,
        )
        from torch.utils.weak import WeakTensorKeyDictionary

        dispatch: Any = graph_capture.aot_dispatch_subclass  # type: ignore[attr-defined]
        unwrap: Any = graph_capture_wrappers.unwrap_tensor_subclasses  # type: ignore[attr-defined]
    except (ImportError, AttributeError):
        return False
    seen = WeakTensorKeyDictionary()

    def noting(function: Callable[..., Any], look: Any, joint: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any) -> Any:
            made = function(*args)
            results = made[0][0] if joint else made[0]
            if len(results) == len(look):
                for x, meta in zip(results, look, strict=True):
                    if hasattr(meta, "outer_size"):
                        seen[x] = meta
            return made

        return noted

    @functools.wraps(dispatch)
    def dispatched(function: Any, *args: Any, meta: Any, fw_only: Any, **about: Any) -> Any:
        look = meta.subclass_fw_graph_out_meta
        function = noting(function, look, about.get("is_joint_structure", False))
        return dispatch(function, *args, meta=meta, fw_only=noting(fw_only, look, False), **about)

    def followed(x: Any, what: Any, meta: Any) -> list[tuple[Any, Any]]:
        if hasattr(meta, "outer_size"):
            parts = [
                part
                for name, inner in meta.attrs.items()
                for part in followed(getattr(x, name), SubclassGetAttrAOTOutput(what, name), inner)
            ]
            outer = meta.outer_size, meta.outer_stride
            sizes, strides = ([not isinstance(n, int) for n in lengths] for lengths in outer)
        else:
            parts = [*zip(*unwrap([x], [what], append_symints=False), strict=True)]
            sizes, strides = (getattr(meta, f"{name}_symbol_placeholders", []) for name in ("size", "stride"))
        parts += [(x.size(k), SubclassSizeAOTOutput(what, k)) for k, symbolic in enumerate(sizes) if symbolic]
        return parts + [(x.stride(k), SubclassStrideAOTOutput(what, k)) for k, told in enumerate(strides) if told]

    @functools.wraps(unwrap)
    def unwrapped(wrapped: Sequence[Any], of: Sequence[Any], *, append_symints: bool) -> tuple[list[Any], list[Any]]:
        parts: list[tuple[Any, Any]] = []
        for x, what in zip(wrapped, of, strict=True):
            own = [*zip(*unwrap([x], [what], append_symints=append_symints), strict=True)]
            meta = seen.get(x) if append_symints and isinstance(x, torch.Tensor) else None
            parts += own if meta is None or meta.arg_count == len(own) else followed(x, what, meta)
        return [value for value, _ in parts], [what for _, what in parts]

    setattr(graph_capture, dispatch.__name__, dispatched)
    setattr(graph_capture_wrappers, unwrap.__name__, unwrapped)
    return True


@functools.cache
def bound_lengths_of_formulas() -> bool:
    """Have torch.export take a range for a length that is a formula of another; whether that can be told.

    It looks up the range of the length's own symbol. In strict mode a DTensor has none where another tensor ties the
    whole to the part before the program is made: "KeyError: 2*s22".
    (torch._export.non_strict_utils._constrain_user_specified_dimhint_range, 2.11-2.15)
    """
    try:
        from torch._export import non_strict_utils
    except ImportError:
        return False
    constrain: Any = getattr(non_strict_utils, "_constrain_user_specified_dimhint_range", None)
    if constrain is None:
        return False

    @functools.wraps(constrain)
    def constrained(length: Any, hint: int, dim: Any, ranges: Any, shapes: Any, *place: Any) -> Any:
        formula = getattr(getattr(length, "node", None), "_expr", None)
        if formula is None or formula.is_number or formula in shapes.var_to_range:
            return constrain(length, hint, dim, ranges, shapes, *place)
        shapes.var_to_range[formula] = shapes.bound_sympy(formula)
        try:
            return constrain(length, hint, dim, ranges, shapes, *place)
        finally:
            del shapes.var_to_range[formula]

    setattr(non_strict_utils, constrain.__name__, constrained)
    return True
