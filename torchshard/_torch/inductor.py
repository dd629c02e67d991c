"""Inductor and the compilers behind a backend."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch

from torchshard._torch.finding import find


def backend_by_name(name: str) -> Callable[..., Any]:
    """The compiler that `torch.compile(backend=name)` would call (torch._dynamo.lookup_backend, 2.11-2.15).

    Raises:
        ValueError: there is none of that name.
    """
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return cast(Callable[..., Any], lookup_backend(name))
    except InvalidBackend:
        raise ValueError(name) from None


def inductor_options() -> set[str]:
    """Names of all options of inductor (torch._inductor.config, as torch._inductor.list_options, 2.11-2.15)."""
    import torch._inductor

    return set(torch._inductor.list_options())


def inductor_patches(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """What torch.compile would give inductor for this mode and these options, both checked by torch itself.

    torch._TorchCompileInductorWrapper (2.11-2.15) holds it as `.config`.

    Raises:
        RuntimeError: an unknown mode, or a value of a wrong type.
    """
    return dict(torch._TorchCompileInductorWrapper(mode, options, None).config)


def mark_cacheable(keys: Mapping[str, str], new: bool) -> list[str]:
    """Have AOTAutograd's cache keep graphs that call these functions of Python, which it otherwise leaves out.

    It knows functions by their names, and takes the value for a part of the key
    (torch._inductor.config.unsafe_marked_cacheable_functions, 2.11-2.15).

    Args:
        keys: by module and name.
        new: mark those that are not marked; else give those that are marked another key.

    Returns:
        The names of those that have now been marked.
    """
    if not new and "torch._inductor.config" not in sys.modules:
        return []
    from torch._inductor import config

    known = config.unsafe_marked_cacheable_functions
    chosen = {name: key for name, key in keys.items() if new or name in known}
    config.unsafe_marked_cacheable_functions = {**known, **chosen}
    return [name for name in chosen if name not in known]


def compile_with_inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any], rewrite: "GraphPass | None" = None
) -> Callable[..., Any]:
    """Compile what Dynamo hands to a backend (torch._inductor.compile_fx.compile_fx, 2.11-2.15).

    Args:
        graph: as Dynamo made it.
        inputs: as Dynamo gave them.
        patches: options of inductor for this graph only.
        rewrite: what to do with each graph after inductor's own passes, forward and backward.
    """
    from torch._inductor.compile_fx import compile_fx

    if rewrite is not None:
        patches = {**patches, _LAST_PASS: _inductor_pass(rewrite, patches)}
    return cast(Callable[..., Any], compile_fx(graph, inputs, config_patches=patches))


class GraphPass(Protocol):
    """What rewrites a graph, and what it depends on besides the graph."""

    key: object

    def __call__(self, graph: torch.fx.Graph) -> None: ...


_LAST_PASS = "post_grad_custom_post_pass"


def _inductor_pass(rewrite: GraphPass, patches: Mapping[str, Any]) -> Any:
    """A CustomGraphPass (2.11-2.15), after those that the user has configured; its uuid is part of the cache's key.

    Args:
        rewrite: what it does.
        patches: options for this graph, which override those of the process.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    configured = patches.get(_LAST_PASS, getattr(config, _LAST_PASS))
    several = configured if isinstance(configured, list | tuple) else [configured]
    before = [given for given in several if given is not None]

    class Composed(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for given in before:
                given(graph)
            rewrite(graph)

        def uuid(self) -> Any:
            keys = [given.uuid() if isinstance(given, CustomGraphPass) else None for given in before]
            return None if None in keys else (*keys, rewrite.key)

    return Composed()


def read_after_waits() -> None:
    """Have inductor, if it is there, read what a collective brings behind the wait for it, also in kernels for a CPU.

    To fuse loops it derives anew what a kernel reads, by the name of the memory; so it forgets that a wait has changed
    that memory, and may move the kernel before the collective. From 2.14 on it does not.
    (torch._inductor.scheduler.SchedulerNode: recompute_size_and_body, mutation_renames, 2.11-2.13)
    """
    if (scheduler := sys.modules.get("torch._inductor.scheduler")) is not None:  # as soon as inductor compiles
        _keep_renames(scheduler)


@functools.cache
def _keep_renames(scheduler: Any) -> None:
    node = scheduler.SchedulerNode
    recompute = getattr(node, "recompute_size_and_body", None)
    if recompute is None or _renames(recompute):
        return

    @functools.wraps(recompute)
    def recomputed(self: Any, *about: Any, **also: Any) -> None:
        before = [dep for dep in self.read_writes.reads if isinstance(dep, (scheduler.WeakDep, scheduler.StarDep))]
        recompute(self, *about, **also)
        found = self.read_writes.with_read(type(self.read_writes.reads)(before))
        self.set_read_writes(found.rename(self.mutation_renames))

    setattr(node, recompute.__name__, recomputed)


def _renames(recompute: Callable[[Any], None]) -> bool:
    """Whether torch does so itself: tried on what stands for a node without other dependencies."""
    told: list[Any] = []
    reads = SimpleNamespace(reads=(), rename=lambda renames: renames)
    node = SimpleNamespace(read_writes=reads, mutation_renames={"before": "after"}, set_read_writes=told.append)
    node._compute_attrs = lambda **_: None
    recompute(node)
    return told == [node.mutation_renames]


def gradient_outputs(graph: torch.fx.Graph) -> list[tuple[int, torch.fx.Node, int]]:
    """The gradients of graph inputs among the outputs of a backward graph, after AOTAutograd.

    Position among the outputs, node, and position of the input in Dynamo's graph (AOTAutograd's descriptors,
    2.11-2.15). Without descriptors, none: hooks then reduce these gradients.
    """
    try:
        from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
    except ImportError:
        return []
    output = graph.output_node()
    return [
        (position, node, made.grad_of.idx)
        for position, (node, made) in enumerate(zip(output.args[0], output.meta.get("desc") or (), strict=False))  # type: ignore[arg-type]
        if isinstance(node, torch.fx.Node)
        and isinstance(made, GradAOTOutput)
        and isinstance(made.grad_of, PlainAOTInput)
    ]


def expect_strides(graph: torch.fx.Graph, strides: Mapping[int, Sequence[int]]) -> None:
    """Have inductor return results in these strides, by position, instead of in those that they had before all passes.

    The output's metadata "original_output_strides" (2.11-2.15). Without it, results with other strides are copies.
    """
    recorded = graph.output_node().meta.get("original_output_strides")
    if isinstance(recorded, list):
        for position, wanted in strides.items():
            recorded[position] = tuple(wanted)


def masked_index_put() -> Any:
    """The operator that an embedding's gradient becomes: (zeros, mask, indices, rows), 2.11-2.15; None without it."""
    return find("ops.aten._unsafe_masked_index_put_accumulate.default")


def trace_backward(graph: torch.fx.GraphModule, inputs: Sequence[Any], rewrite: GraphPass) -> Callable[..., Any]:
    """Trace forward and backward as inductor does, rewrite the backward, and run both node by node.

    AOTAutograd with inductor's decompositions, partitioner and graph passes (torch._inductor.fx_passes, 2.11-2.15).
    Nothing is compiled, so that a plan can be shown in a second. AOTAutograd would leave the backward for later
    (torch._functorch.config.force_non_lazy_backward_lowering, 2.11-2.15).
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def in_fake_mode(module: torch.fx.GraphModule) -> Any:
        values = (node.meta.get("val") for node in module.graph.nodes)
        found = next((x.fake_mode for x in values if isinstance(x, FakeTensor)), None)
        return V.set_fake_mode(found or FakeTensorMode())

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        values = (node.meta.get("val") for node in joint.graph.nodes)
        real = not any(isinstance(x, torch.Tensor) and x.device.type == "meta" for x in values)
        fold = torch._inductor.config.joint_graph_constant_folding and real  # folds all that has no values
        with in_fake_mode(joint), torch._inductor.config.patch(joint_graph_constant_folding=fold):
            joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def backward(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        passes = {_LAST_PASS: _inductor_pass(rewrite, {})}
        with in_fake_mode(module), torch._inductor.config.patch(passes):
            post_grad_passes(module, is_inference=False)
        module.recompile()
        return make_boxed_func(module.forward)

    compiler = aot_autograd(
        fw_compiler=lambda module, _inputs: make_boxed_func(module.forward),
        bw_compiler=backward,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        return compiler(graph, inputs)
