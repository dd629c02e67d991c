"""Dynamo: sources, guards and graphs, read and told."""

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch

from torchshard._torch.finding import find, find_once
from torchshard._torch.operators import in_backward

_Function = TypeVar("_Function", bound=Callable[..., Any])


def after_every_forward(module: torch.nn.Module, hook: Callable[..., None]) -> None:
    """Have a module call this after each forward, failed ones too: register_forward_hook(hook, always_call=True).

    Graphs are guarded by the keys of such hooks, which are numbers without end: alike modules would not share a graph.
    So the key becomes one that alike modules have in common (Module._forward_hooks, ._forward_hooks_always_called,
    2.11-2.15); without those, it stays.
    """
    handle = module.register_forward_hook(hook, always_call=True)
    tables = [getattr(module, name, {}) for name in ("_forward_hooks", "_forward_hooks_always_called")]
    if all(handle.id in table for table in tables):
        key = f"torchshard {len(tables[1])}"
        for table in tables:
            table[key] = table.pop(handle.id)


def is_watched() -> bool:
    """Whether operators may be read by others than their kernels: traced, seen by a mode, or compiled.

    Compiled anywhere in the process, that is: Dynamo guards the classes of tensors. It has a table of its backends,
    where None is for code that it leaves alone (torch._dynamo.eval_frame.cached_backends,
    torch._C._len_torch_dispatch_stack, 2.11-2.15). Without these names they may.
    """
    modes = find_once("_C._len_torch_dispatch_stack")
    if modes is None or modes() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(getattr(dynamo, "cached_backends", {None: True}).values())


def current_node() -> Any:
    """The autograd node that runs now in this thread, None outside of backward (torch._C, 2.11-2.15).

    Without it compiled graphs cannot know whose gradients they make; hooks then reduce them.
    """
    found = find_once("_C._current_autograd_node")
    return found() if found and in_backward() else None


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and how they were nested (torch.utils._pytree, 2.11-2.15; 2.11 has no other)."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def tree_of(leaves: Sequence[Any], nesting: Any) -> Any:
    """Containers nested as `leaves_of` has found it, with these leaves (torch.utils._pytree, 2.11-2.15)."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, nesting)


def leaf_of_gradient() -> Any:
    """The leaf whose gradient the autograd node that runs now makes first, as of AccumulateGrad.variable (2.11-2.15).

    None where that is no leaf, or outside of backward.
    """
    node = current_node()
    edges = node.next_functions if node is not None else ()
    return getattr(edges[0][0], "variable", None) if edges else None


def note_of_input(x: torch.Tensor, note: Any) -> None:
    """Leave a note for the gradient of a tensor that is an input of AOTAutograd's trace.

    It puts another tensor, which is no leaf, in the place of one that has parts: its node is of a kind that is nowhere
    else (torch._mirror_autograd_meta_to, 2.11-2.15). No note is left elsewhere.
    """
    node: Any = x.grad_fn
    if type(node).__name__ == "Error":
        node.metadata[note_of_input] = note


def noted_of_gradient() -> Any:
    """The note for the gradient that the autograd node that runs now makes first; None where there is none."""
    node = current_node()
    edges = node.next_functions if node is not None else ()
    return getattr(edges[0][0], "metadata", {}).get(note_of_input) if edges else None


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text into torch's structured trace, where tlparse finds it (torch._logging.trace_structured, 2.11-2.15).

    It is asked for only if somebody traces.
    """
    from torch._logging._internal import trace_structured

    trace_structured("artifact", lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def source_name(node: torch.fx.Node) -> str:
    """What the user calls the parameter that comes in at this node of Dynamo's graph, as in "layers.0.weight".

    Node._dynamo_source (2.11-2.15) says where Dynamo has found it; without it, the node's own name.
    """
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    text = name() if callable(name) else name
    quoted = re.findall(r"\['([^']*)'\]", text or "")
    return ".".join(quoted[1:]) or node.name


def graph_break(graph: torch.fx.GraphModule) -> tuple[str, str] | None:
    """Why and where Dynamo ended a graph before its function did; None if it did not (GraphCompileReason, 2.11-2.15).

    The place is a file and a line, empty if it is not known.
    """
    found = getattr(graph, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    place = found.user_stack[-1] if found.user_stack else None
    return found.reason.strip(), f"{place.filename}:{place.lineno}" if place else ""


def graph_breaks() -> list[str]:
    """Reasons of all graph breaks that Dynamo has counted in this process (torch._dynamo.utils.counters, 2.11-2.15)."""
    from torch._dynamo.utils import counters

    return [reason.strip() for reason, times in counters["graph_break"].items() for _ in range(times)]


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile has wrapped, or itself (OptimizedModule._orig_mod, 2.11-2.15)."""
    return cast(torch.nn.Module, getattr(module, "_orig_mod", module))


def guard_attribute(module: str, path: str) -> bool:
    """Have Dynamo compile anew where an attribute of a module is not equal to what it is when this graph is there.

    For use while a frame is compiled: in a backend, or in what Dynamo runs to trace. What torch does for modules that
    traced code imports (torch._dynamo: InstructionTranslator.import_source, install_guard, 2.11-2.15). `path` may be
    dotted. Returns whether there is a frame being compiled, which could be told.
    """
    if "torch._dynamo.symbolic_convert" not in sys.modules:
        return False
    translators, guards = find("_dynamo.symbolic_convert.InstructionTranslator"), find("_dynamo.guards")
    try:
        frame = translators.current_tx()
        source = functools.reduce(find("_dynamo.source.AttrSource"), path.split("."), frame.import_source(module))
        guards.install_guard(source.make_guard(guards.GuardBuilder.EQUALS_MATCH))
    except AttributeError:
        return False
    return True


def guard_instances(cls: type, known_by: Callable[[Any], list[Any]]) -> bool:
    """Have Dynamo check what `known_by` says of the instances of a class that enter graphs; whether it had to be told.

    For classes that torch has registered as opaque without a guard of their own (torch._library.opaque_object,
    2.13-2.15); nothing is done elsewhere.
    """
    info = _opaque_info(cls)
    if info is None or info.guard_fn is not None:
        return False
    info.guard_fn = known_by
    return True


def guard_every_source(opaque: Sequence[type], tensors: Sequence[type]) -> bool:
    """Have Dynamo check instances of these classes wherever a graph gets them from; whether it had to be told.

    It tracks objects, and checks one that it meets again only against the place where it met it first; between a local
    and a global it cannot, and checks nothing (torch._dynamo.guards.make_dupe_guard, 2.11-2.15). Here what is checked
    of the first place of an opaque object is checked of all, and tensors have to be the same one in all of them
    (torch._dynamo.variables.builder.VariableBuilder, 2.11-2.15).
    """
    from torch._dynamo.guards import GuardBuilder, make_dupe_guard
    from torch._dynamo.source import GlobalSource, LocalSource
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._library.opaque_object import is_opaque_type, is_opaque_value_type

    if make_dupe_guard(LocalSource("a"), GlobalSource("b")) is not None:
        return False
    build = VariableBuilder.__call__
    same_type = getattr(GuardBuilder, "FAKE_SCRIPT_TYPE_MATCH", GuardBuilder.TYPE_MATCH)
    registered = tuple([cls for cls in opaque if is_opaque_type(cls)])
    compared = tuple(tensors)

    @functools.wraps(build)
    def guarded(self: Any, value: object) -> Any:
        made = build(self, value)
        if isinstance(value, registered):
            if is_opaque_value_type(type(value)):
                self.install_guards(GuardBuilder.CONSTANT_MATCH)
            else:
                self.install_guards(same_type)
                self.install_guards(GuardBuilder.OPAQUE_OBJ_GUARD_FN_MATCH)
        elif isinstance(value, compared):
            first = getattr(made, "source", None)
            if first is not None and first != self.source:
                self.install_guards(functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=first))
        return made

    VariableBuilder.__call__ = guarded  # type: ignore[method-assign]
    return True


def trace_methods(cls: type, methods: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Have Dynamo trace functions where methods of a tensor subclass are called.

    It records calls of such methods, and refuses those that give something else than tensors
    (torch._dynamo.variables.tensor.TensorVariable.call_method, 2.11-2.15). Returns the names of those that it had to be
    told of: not where it has a way of its own (tp_methods, 2.15), nor where it calls methods elsewhere.
    """
    from torch._dynamo.variables.builder import SourcelessBuilder
    from torch._dynamo.variables.tensor import TensorVariable

    call, known = vars(TensorVariable).get("call_method"), getattr(TensorVariable, "tp_methods", ())
    methods = {name: function for name, function in methods.items() if name not in known}
    if call is None or not methods:
        return []

    @functools.wraps(call)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in methods and isinstance(self.proxy.node.meta.get("example_value"), cls):
            return SourcelessBuilder.create(tx, methods[name]).call_function(tx, [self, *args], kwargs)
        return call(self, tx, name, args, kwargs)

    TensorVariable.call_method = call_method  # type: ignore[method-assign]
    return list(methods)


def let_ask_results(cls: type, names: Sequence[str]) -> list[str]:
    """Have Dynamo take attributes of a tensor subclass for what they are, of results of a graph as well.

    It makes opaque objects among them results of the graph, and what stands for them while AOTAutograd traces comes out
    of it (torch._dynamo.variables.tensor.TensorVariable.dynamic_getattr, 2.13-2.15). What depends on nothing but the
    graph can be a global of the compiled code. Returns the names, none where torch has no opaque objects.
    """
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.tensor import TensorVariable

    get = getattr(TensorVariable, "dynamic_getattr", None)
    if get is None or _opaque_info(torch.distributed.device_mesh.DeviceMesh) is None:
        return []

    @functools.wraps(get)
    def dynamic_getattr(self: Any, tx: Any, name: str) -> Any:
        example = self.proxy.node.meta.get("example_value")
        if self.source or name not in names or not isinstance(example, cls):
            return get(self, tx, name)
        value = getattr(example, name)
        return VariableBuilder(tx, GlobalSource(tx.output.install_global_by_id(f"__{name}", value)))(value)

    TensorVariable.dynamic_getattr = dynamic_getattr  # type: ignore[method-assign]
    return list(names)


def let_ask(cls: type, constants: Sequence[str], traced: Sequence[str]) -> list[str]:
    """Have Dynamo take members of an opaque class for constants, or trace them (as above, 2.13-2.15).

    Returns those of which it had to be told; torch keeps its own way with all others.
    """
    info = _opaque_info(cls)
    if info is None:
        return []
    from torch._library.opaque_object import MemberType

    kinds = {**dict.fromkeys(constants, MemberType.USE_REAL), **dict.fromkeys(traced, MemberType.INLINED)}
    new = {name: kind for name, kind in kinds.items() if name not in info.members}
    info.members.update(new)
    return list(new)


def let_find_groups() -> list[str]:
    """Have Dynamo find groups by their names, and names of groups; returns the functions that it had to be told of.

    distributed_c10d._resolve_process_group is written in C, which Dynamo cannot trace (2.13-2.15); what it looks up is
    in `_world.pg_names` as well. _get_process_group_name looks there by a key, and the guard is then the dict's:
    another group as an argument would have the old one's name. torch.compiler.substitute_in_graph refuses what torch
    substitutes already.
    """

    def resolve(group_name: str) -> Any:  # by way of a global, which guards are made of
        for group, name in torch.distributed.distributed_c10d._world.pg_names.items():
            if name == group_name:
                return group
        raise RuntimeError(f"no process group goes by the name {group_name}")

    def name_of(pg: Any) -> str:
        return pg.group_name if isinstance(pg, torch.distributed.ProcessGroup) else "None"

    told = []
    for name, function in (("_resolve_process_group", resolve), ("_get_process_group_name", name_of)):
        found: Any = find(f"distributed.distributed_c10d.{name}")
        if found is not None:
            with suppress(ValueError):
                torch.compiler.substitute_in_graph(found, skip_signature_check=True)(function)
                told.append(name)
    return told


def let_ask_the_world() -> list[str]:
    """Have Dynamo trace functions that ask the default group where none is given, or the group of a name.

    It calls them while it traces and keeps what they say, without a guard: another default group would have the old
    one's numbers (torch._dynamo.trace_rules, 2.11-2.15). Traced, their code reads torch's tables, and the guards are
    those of what is read. Returns the names of those of which it had to be told.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import TorchInGraphFunctionVariable, UserFunctionVariable

    told = []
    for rules in getattr(trace_rules, "torch_name_rule_map", ()):
        for path, rule in rules.items():
            name = path.rpartition(".")[2]
            if path.startswith("torch.distributed.") and name in _OF_THE_WORLD and rule is TorchInGraphFunctionVariable:
                rules[path] = UserFunctionVariable
                told.append(name)
    if told:
        trace_rules.get_torch_obj_rule_map.cache_clear()
    return told


_OF_THE_WORLD = ("is_initialized", "get_rank", "get_world_size", "get_process_group_ranks", "_get_group_size_by_name")


def placements_are_values() -> bool:
    """Whether Dynamo takes placements for values, which any call may be given, as since 2.12.

    Before, it knows `redistribute` of a DTensor, and other methods with placements break graphs.
    """
    from torch.distributed.tensor.placement_types import Placement

    return type(Placement).__module__.startswith("torch.")


def register_placement(cls: type, *attributes: str) -> bool:
    """Have regions make and ask placements of a class as they do torch's (2.12-2.15); before, they break graphs.

    torch registers each of its classes as a value that graphs may hold (torch._library.opaque_object), with the members
    that are worked out while it traces. Returns whether it has such.
    """
    from torch.distributed.tensor import Shard

    try:
        from torch._library.opaque_object import MemberType, get_opaque_obj_info, register_opaque_type
    except ImportError:
        return False
    info: Any = get_opaque_obj_info(Shard)
    if not isinstance(getattr(info, "members", None), dict):
        return False
    members = {**info.members, **dict.fromkeys(attributes, MemberType.USE_REAL)}
    register_opaque_type(cls, typ=info.opaque_typ, members=members)
    return True


def _opaque_info(cls: type) -> Any:
    """What torch has registered for an opaque class that is not compared by value; None without, as before 2.13."""
    import torch.distributed.tensor  # noqa: F401  # where torch registers groups and meshes

    try:
        from torch._library.opaque_object import get_opaque_obj_info
    except ImportError:
        return None
    info: Any = get_opaque_obj_info(cls)
    known = all(hasattr(info, name) for name in ("guard_fn", "members", "opaque_typ"))
    return info if known and info.opaque_typ in ("reference", "symbolic") else None
