"""Dynamo's graphs: regions that nodes enter and leave, values and the memory that they lie in."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from torchshard._torch.frames import skip_methods
from torchshard._torch.tensors import memory_of

REGIONS = (
    ("_vmap_increment_nesting", "_vmap_decrement_nesting"),
    ("_grad_increment_nesting", "_grad_decrement_nesting"),
    ("_jvp_increment_nesting", "_jvp_decrement_nesting"),
    ("_func_increment_nesting", "_func_decrement_nesting"),
    ("_enter_dual_level", "_exit_dual_level"),
    ("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"),
)
"""Names of functions that enter and leave a region, in torch._C or torch._functorch.predispatch (2.11-2.15).

Those that leave with what the one that entered has returned, as inference_mode does, are known by that value.
"""

SETTINGS = (
    "_set_fwd_grad_enabled",
    "set_inplace_requires_grad_allowed",
    "_sdpa_kernel",
    "_set_deterministic_algorithms",
)
"""Names of functions that set how nodes behind them are traced (2.11-2.15)."""

RENEWED = ("_enter_autocast",)
"""Names of functions that torch.fx.passes.split_module calls anew in each piece, as it does for the grad mode."""

CONSTANTS = ("_tensor_version",)
"""Names of operators whose number is symbolic to Dynamo, but known when a piece is compiled, which then lacks it."""

_STEPS = {name: (enter, step) for enter, leave in REGIONS for name, step in ((enter, 1), (leave, -1))}


def nesting(node: torch.fx.Node) -> tuple[str, int] | None:
    """The region that a node enters (1) or leaves (-1), None for all other nodes."""
    return _STEPS.get(_name(node)) if node.op == "call_function" else None


def setting(node: torch.fx.Node) -> tuple[str, str] | None:
    """What a node sets, and to what; None for all other nodes."""
    name = _name(node)
    if node.op != "call_function" or name not in SETTINGS:
        return None
    given = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: f"{_name(arg)}{arg.args}")
    return name, str(given)


def example_of(node: torch.fx.Node) -> Any:
    """The value that Dynamo has traced a node with (Node.meta["example_value"], 2.11-2.15), None if it has none."""
    return node.meta.get("example_value")


def passes_no_gradient(node: torch.fx.Node) -> bool:
    """Whether it is known that no gradient goes back through a node: none of the tensors that it returns needs one."""
    from torch.utils import _pytree

    tensors = [leaf for leaf in _pytree.tree_leaves(example_of(node)) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and not any(leaf.requires_grad for leaf in tensors)


def modes(nodes: Iterable[torch.fx.Node]) -> Iterator[tuple[torch.fx.Node, dict[Any, Any]]]:
    """Each node with what is set where it stands: two nodes with equal settings may change places.

    What returns neither tensors nor sizes is taken to set something, until a node is given its handle.
    """
    state: dict[Any, Any] = {"_set_grad_enabled": (torch.is_grad_enabled(),), **{enter: 0 for enter, _ in REGIONS}}
    for node in nodes:
        yield node, {**state}
        if step := nesting(node):
            region, change = step
            state[region] = state[region] + change
        elif node.op.startswith("call_") and not _returns_values(node):
            if entered := [given for given in node.all_input_nodes if given in state]:
                for given in entered:
                    del state[given]
            elif _name(node) == "_set_grad_enabled":
                state[_name(node)] = node.args
            else:
                state[node] = True


def _returns_values(node: torch.fx.Node) -> bool:
    from torch.utils import _pytree

    leaves = _pytree.tree_leaves(example_of(node))
    return any(isinstance(leaf, torch.Tensor | torch.SymInt | int) for leaf in leaves)


def crosses(node: torch.fx.Node) -> bool:
    """Whether one piece of a graph can return a node's value and another can take it.

    A view of a parameter that was taken while gradients were off is a leaf that requires one: AOTAutograd would have
    gradients go on to the parameter.
    """
    if _name(node) in RENEWED + CONSTANTS:
        return _name(node) in RENEWED
    value = example_of(node)
    return isinstance(value, torch.SymInt) or (
        isinstance(value, torch.Tensor) and not (value.requires_grad and value.is_leaf)
    )


@functools.cache
def let_return_beside_gradients(kind: Any) -> bool:
    """Have Dynamo look whether results of this class still have a gradient, where a region calls torch.autograd.grad.

    It does so for plain tensors, and takes no others: it goes back along the graph of autograd, to find what
    autograd.grad has freed.
    (torch._dynamo.output_graph.OutputGraph._validate_outputs_safe_for_autograd_nodes, 2.11-2.15)

    Returns:
        Whether it has this question, and had to be told.
    """
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables import TensorVariable

    look: Any = getattr(OutputGraph, "_validate_outputs_safe_for_autograd_nodes", None)
    if look is None:
        return False

    @functools.wraps(look)
    def look_at_parts(graph: Any, results: Any, *about: Any) -> None:
        metas = [x.as_proxy().node.meta for x in results if isinstance(x, TensorVariable) and x.requires_grad]
        wholes = [(meta, x) for meta in metas if type(x := meta.get("example_value")) is kind]
        try:
            for meta, x in wholes:
                meta["example_value"] = _part_for(x)
            look(graph, results, *about)
        finally:
            for meta, x in wholes:
                meta["example_value"] = x

    setattr(OutputGraph, look.__name__, look_at_parts)
    return True


def _part_for(x: Any) -> torch.Tensor:
    """A part of a wrapper that autograd takes for made of the wrapper."""
    with torch.enable_grad():
        return _first_part(x) if x.grad_fn is None else _Part.apply(x)  # type: ignore[no-untyped-call]


def _first_part(x: Any) -> torch.Tensor:
    part: torch.Tensor = getattr(x, x.__tensor_flatten__()[0][0])
    return part.detach()


@skip_methods()
class _Part(torch.autograd.Function):
    """Of a wrapper; it is only asked where it comes from."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        return _first_part(x)


def write_known_sizes(graph: torch.fx.Graph) -> None:
    """Put the number in place of each size that was symbolic when it was captured and has become known since.

    No piece could return it: such a size has no node of its own any more where a piece is traced
    (torch.fx.experimental.symbolic_shapes.is_concrete_int, 2.11-2.15).
    """
    from torch.fx.experimental.symbolic_shapes import is_concrete_int

    for node in graph.nodes:
        value = example_of(node)
        if isinstance(value, torch.SymInt) and is_concrete_int(value):
            for user in [*node.users]:
                given = torch.fx.node.map_arg(
                    (user.args, user.kwargs),
                    lambda arg, node=node, value=value: int(value) if arg is node else arg,  # type: ignore[misc]
                )
                user.args, user.kwargs = given


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether it holds, also as far as a graph knows that does not know the numbers yet, as those that `item()` gives.

    Of lengths that it knows in this run it asks, and is for such lengths only
    (torch.fx.experimental.symbolic_shapes.guard_or_false, 2.11-2.15).
    """
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))


def memories(value: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """What the tensors in nested containers lie in, and they; nothing for those without memory of their own.

    A wrapper lies in what its parts lie in
    (torch.utils._python_dispatch.is_traceable_wrapper_subclass, 2.11-2.15).
    """
    from torch.utils import _pytree

    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from ((memory, leaf) for memory in _memories_of(leaf))


def _memories_of(tensor: Any) -> Iterator[int]:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_traceable_wrapper_subclass(tensor):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, torch.Tensor):  # torch's DTensor names its mesh among them, since 2.13
                yield from _memories_of(part)
        return
    with suppress(NotImplementedError, RuntimeError):  # sparse tensors, and those inside of torch.func
        yield memory_of(tensor)


def was_written(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or what shares its memory, was written in place; those of inference mode do not tell.

    Tensor._version: explained in torch's notes on autograd, and there is no other name for it.
    """
    return tensor.is_inference() or tensor._version > 0


def writes_arguments(target: Any) -> bool:
    """Whether an operator says that it writes to an argument (OpOverload._schema, 2.11-2.15)."""
    overload = getattr(target, "default", target)
    schema = getattr(overload, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _name(node: torch.fx.Node) -> str:
    """Name of the function that a node calls, without the overload of an operator."""
    return str(getattr(node.target, "__name__", "")).partition(".")[0]
