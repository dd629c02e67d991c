"""AOTAutograd: what of a graph runs forward, and what backward; results that get no gradient, inputs that get one."""

import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchshard._torch.frames import skip_alone
from torchshard._torch.operators import outside_of_traces
from torchshard._torch.recomputing import (
    FORWARD,
    LATER,
    PASS,
    RECOMPUTED,
    change_joint_graphs,
    is_collective,
    mark_read,
    need_forward,
    read_alike,
    save_received,
)


@functools.cache
def run_collectives_once() -> bool:
    """Have each collective of a graph run once, in the pass that was traced with it; whether torch had to be told.

    Ranks trace one program, but each knows what it holds: it may read nothing of what comes, or send what is a constant
    to its graph. What torch makes of this on one rank, and not on others, leaves those waiting for ever:

    - min-cut partitioning repeats in backward each collective that can be computed from what was saved, as waiting
      counts as a side effect, though nothing uses the result; and puts into forward what backward sends as soon as it
      is known there. So a collective of backward must be in backward, and one of forward that nothing uses is dropped
      from there.
    - in the order of torch's autograd engine, backward begins where something reads a gradient: what it computes before
      for nothing is dropped, and all else is moved to where it is read. So its first collective begins it, if nothing
      does before.
    - default_partition drops collectives whose result nothing reads. So none is taken for such.
    - min-cut partitioning takes two collectives of equal operands for one, and operands of nothing, or of lengths that
      one rank's trace knows and another's does not, are equal on some ranks. So collectives are to it what random
      operators are, each one of its own.

    What a checkpoint computes once more is computed in backward, with its collectives up to the last that its gradients
    read, in one place: min-cut partitioning would do what does without them in forward where that is small, as on a
    rank without elements, where inductor finds zeros or nothing to read them, drop them or move them behind others, and
    bring them before others where something else reads what was made of them; that is saved, which torch does only with
    what forward needs.
    (torch._functorch.partitioners, torch._functorch.compile_utils.rand_ops, 2.11-2.15)
    """
    from torch._functorch import compile_utils, partitioners
    from torch._functorch._aot_autograd import graph_capture_wrappers

    extract = partitioners._extract_graph_with_inputs_outputs
    save = getattr(partitioners, "force_save_collectives", None)
    if not _repeats(extract):
        return False

    @functools.wraps(extract)
    def extracted(*args: Any, **kwargs: Any) -> torch.fx.Graph:
        graph = extract(*args, **kwargs)
        if any(isinstance(value, str) and value == "backward" for value in (*args, *kwargs.values())):
            _drop_repeated(graph)
        return graph

    partitioners._extract_graph_with_inputs_outputs = extracted
    if save is not None and hasattr(partitioners, "is_not_collective"):

        @functools.wraps(save)
        def saved(module: torch.fx.GraphModule) -> None:
            _keep_in_backward(module.graph)
            save(module)

        setattr(partitioners, save.__name__, saved)
        partitioners.is_not_collective = lambda node: True
    if (classify := getattr(partitioners, "classify_nodes", None)) is not None:
        setattr(partitioners, classify.__name__, _classified(classify))
    change_joint_graphs(read_alike)
    if (begin := getattr(graph_capture_wrappers, "setup_stacktrace_preservation_hooks", None)) is not None:
        setattr(graph_capture_wrappers, begin.__name__, _marked(begin))
    if (reorder := getattr(partitioners, "reordering_to_mimic_autograd_engine", None)) is not None:
        setattr(partitioners, reorder.__name__, functools.wraps(reorder)(lambda module: _reordered(module, reorder)))
    if isinstance(apart := getattr(compile_utils, "rand_ops", None), list):
        compile_utils.rand_ops = _WithCollectives(apart)
    return True


class _WithCollectives(list[Any]):
    """Operators of which no two calls are one: those of torch, and all collectives, whenever they are first called."""

    def __contains__(self, packet: object) -> bool:
        return str(packet).startswith("_c10d_functional.") or super().__contains__(packet)


_BACKWARD = "must_be_in_backward"


def _repeats(extract: Any) -> bool:
    """Whether a collective that nothing in backward needs is there, of a graph in which it could be."""
    graph = torch.fx.Graph()
    x, gradient = graph.placeholder("x"), graph.placeholder("gradient")
    functional = torch.ops._c10d_functional
    graph.call_function(
        functional.wait_tensor.default, (graph.call_function(functional.all_reduce.default, (x, "sum", "0")),)
    )
    product = graph.call_function(torch.ops.aten.mul.Tensor, (x, gradient))
    graph.output((product,))
    return any(map(is_collective, extract(graph, [x, gradient], [product], [None], "backward").nodes))


def _keep_in_backward(graph: torch.fx.Graph) -> None:
    """Of a joint graph, also one in which inductor has replaced nodes, which are then marked as neither pass."""
    if any(node.meta.get(PASS) == FORWARD for node in graph.nodes):
        later = dict[torch.fx.Node, None]()
        for node in graph.nodes:
            tag = node.meta.get(PASS)
            if tag in (LATER, _BACKWARD) or (tag is None and not later.keys().isdisjoint(node.all_input_nodes)):
                later[node] = None
        save_received(graph, later)
        for node in later:
            if is_collective(node) or _reads_recomputed(node):
                node.meta[PASS] = _BACKWARD
    elif all(PASS not in node.meta for node in graph.nodes):
        for node in filter(is_collective, _behind_results(graph)):
            node.meta[PASS] = _BACKWARD


def _behind_results(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """What follows the results of forward in a joint graph without marks, as torch makes it for a scan."""
    nodes = list(graph.nodes)
    count = sum("tangents" in node.name for node in graph.find_nodes(op="placeholder"))
    results = pytree.arg_tree_leaves(*nodes[-1].args)[:count]
    last = max((nodes.index(node) for node in results if isinstance(node, torch.fx.Node)), default=len(nodes))
    return nodes[last + 1 :]


def _classified(classify: Any) -> Any:
    @functools.wraps(classify)
    def classified(module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        found = classify(module, *args, **kwargs)
        need_forward(module.graph, found)
        return found

    return classified


def _marked(begin: Any) -> Any:
    @functools.wraps(begin)
    def marked(roots: list[Any]) -> Any:
        mark_read(roots)
        return begin(roots)

    return marked


def _reads_recomputed(node: torch.fx.Node) -> bool:
    """Whether a checkpoint says that what this tensor is made of is computed once more, in backward."""
    if node.op != "call_function" or isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return any(operand.meta.get("recompute") in RECOMPUTED for operand in node.all_input_nodes)


def _drop_repeated(graph: torch.fx.Graph) -> None:
    """With what makes operands of them alone, which may be collectives again."""
    graph.eliminate_dead_code(
        lambda node: node.meta.get(PASS) == _BACKWARD if is_collective(node) else node.is_impure()
    )


def _reordered(module: torch.fx.GraphModule, reorder: Any) -> Any:
    """Of a backward graph, of which torch keeps from the first node on that reads a gradient all as it is."""
    graph = module.graph
    gradients = (node for node in graph.find_nodes(op="placeholder") if "tangents" in node.name)
    collectives = (node for node in graph.nodes if is_collective(node) and node.meta.get(PASS) == _BACKWARD)
    gradient, first = next(gradients, None), next(collectives, None)
    if gradient is None or first is None:
        return reorder(module)
    with graph.inserting_before(first):
        graph.call_function(_begin, (gradient,))
    made = reorder(module)
    for node in made.graph.find_nodes(op="call_function", target=_begin):
        made.graph.erase_node(node)
    made.recompile()
    return made


def _begin(gradient: Any) -> None:
    """Where a backward graph begins, for a pass that looks for the first node that reads a gradient."""


@functools.cache
def fill_unused_results() -> bool:
    """Have a compiled backward take zeros for results of the graph that got no gradient; whether it had to be told.

    Autograd makes plain zeros for them in the shape of the whole tensor, and AOTAutograd refuses these where the result
    was a wrapper subclass ("we guessed its metadata incorrectly"), or under compiled autograd takes them for the part:
    no loss could be returned beside what it is made of. Where such a class has a static method `__zeros_as_tangent__`
    (of these zeros, and of what its `__tensor_flatten__` has said), that makes zeros of the class. Gradients that are
    no zeros are refused as before.
    (torch._functorch._aot_autograd.runtime_wrappers.AOTDispatchAutograd.process_runtime_tangent, 2.11-2.15)
    """
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    wrappers: Any = getattr(runtime_wrappers, "AOTDispatchAutograd", None)
    process = getattr(wrappers, "process_runtime_tangent", None)
    if process is None or not _refuses_zeros(process):
        return False

    def is_zero(x: Any) -> bool:
        return isinstance(x, (FakeTensor, FunctionalTensor)) or (type(x) is torch.Tensor and not x.any())

    @skip_alone  # called in each backward, also behind a graph break
    @functools.wraps(process)
    def processed(x: Any, meta: Any, *more: Any, **also: Any) -> Any:
        kind = getattr(meta, "original_subclass_type", None)
        if x.__class__ is not kind:  # which it is as a rule, and this runs in each backward
            zeros = getattr(kind, "__zeros_as_tangent__", None)
            if zeros is not None and is_zero(x):
                x = zeros(x, meta.meta)
        return process(x, meta, *more, **also)

    wrappers.process_runtime_tangent = staticmethod(processed)
    return True


@functools.cache
def expect_gradients_of_written() -> bool:
    """Have a compiled backward expect gradients of inputs that its graph writes to; whether that can be told.

    AOTAutograd takes it that nothing behind a graph uses such an input of a wrapper subclass, so that plain zeros come
    for it, unless a setting of torch says that all are used. Here it says so while a graph is looked at whose classes
    all have `__zeros_as_tangent__`: these take zeros, too.
    (torch._functorch.aot_autograd.run_functionalized_fw_and_collect_metadata,
    torch._functorch.config.disable_guess_zero_tangent_for_mutated_input_subclass, 2.11-2.15)
    """
    from torch._functorch import aot_autograd, config
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    collect: Any = getattr(aot_autograd, "run_functionalized_fw_and_collect_metadata", None)
    setting = "disable_guess_zero_tangent_for_mutated_input_subclass"
    if collect is None or not hasattr(config, setting):
        return False

    @functools.wraps(collect)
    def collecting(*about: Any, **also: Any) -> Any:
        look = collect(*about, **also)

        def looked(*inputs: Any) -> Any:
            kinds = {type(x) for x in inputs if is_traceable_wrapper_subclass(x)}
            if not all(hasattr(kind, "__zeros_as_tangent__") for kind in kinds):
                return look(*inputs)
            with config.patch({setting: True}):
                return look(*inputs)

        return looked

    setattr(aot_autograd, collect.__name__, collecting)
    return True


@functools.cache
def count_written_parts() -> bool:
    """Have graphs count what they return for inputs of wrapper subclasses that they write to; whether torch miscounts.

    AOTAutograd looks at the parts alone to say where a forward's results end and what its backward needs begins. Parts
    require no gradient, so it leaves out those of inputs that do: inductor takes strides and lifetimes of other tensors
    then, and fails or computes something else. Torch counts them where it parts the graph, and here for the rest, too.
    (torch._functorch._aot_autograd.graph_compile.compute_inner_mutated_inp_indices_from_subclass_meta, 2.11-2.15)
    """
    from torch._functorch._aot_autograd import graph_compile

    count: Any = getattr(graph_compile, "compute_inner_mutated_inp_indices_from_subclass_meta", None)
    if count is None:
        return False

    @functools.wraps(count)
    def counted(outer: Any, inner: Any) -> Any:
        found = count(outer, inner)
        if more := len(found) - len(inner.mutated_inp_runtime_indices):
            inner.mutated_inp_runtime_indices = found
            for name in ("num_mutated_inp_runtime_indices", "num_forward_returns", "num_forward"):
                setattr(inner, name, getattr(inner, name) + more)
        return found

    setattr(graph_compile, count.__name__, counted)
    return True


def _refuses_zeros(process: Any) -> bool:
    """Whether plain zeros are refused where the gradient of a wrapper subclass is expected."""
    from torch._functorch._aot_autograd.subclass_utils import create_subclass_meta
    from torch._subclasses.fake_tensor import FakeTensorMode

    with outside_of_traces():  # this is asked while a graph is traced
        with FakeTensorMode():
            result = Wrapper(torch.zeros(2))
        expected: Any = create_subclass_meta([result], count_symints=False, with_memory_format=True)[0]
        expected.make_runtime_safe()
        try:
            process(torch.zeros(2), expected)
        except RuntimeError:
            return True
    return False


class Wrapper(torch.Tensor):
    """The least that AOTAutograd takes for a wrapper subclass, with zeros for a torch that was told to ask for them."""

    part: torch.Tensor

    @staticmethod
    def __new__(cls, part: torch.Tensor) -> "Wrapper":
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, part.shape)
        made.part = part
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["part"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, told: None, size: Any, stride: Any) -> "Wrapper":
        part: torch.Tensor = inner["part"]
        return Wrapper(part)

    @staticmethod
    def __zeros_as_tangent__(whole: torch.Tensor, told: None) -> "Wrapper":
        return Wrapper(whole)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)
