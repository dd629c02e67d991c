"""The backend behind the string "torchshard"."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchshard import _torch
from torchshard.compiler import ingraph, split
from torchshard.compiler.options import Options, parse
from torchshard.ddp import active
from torchshard.ddp.cutting import reduces_gradients

_log = logging.getLogger(__name__)


@reduces_gradients
def torchshard(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph; called by torch.compile(model, backend="torchshard", mode=..., options=...).

    Where the model is wrapped in torchshard's DistributedDataParallel, gradients are reduced while the compiled
    backward runs. On anything else this is the inner compiler and nothing more.

    Args:
        graph: what Dynamo has captured.
        inputs: its inputs, parameters among them.
        mode: inductor's.
        options: "reduction": "auto", "ingraph" or "split"; "inner": "inductor", another backend's name or a callable;
            "bucket_cap_mb" and "first_bucket_mb": sizes of buckets in MiB instead of the wrapper's. All others are
            inductor's.

    Raises:
        ValueError: an unknown option or a value that makes no sense.
    """
    chosen = parse(mode, options)
    reducer = active.reducer_to_compile_for()
    if not _makes_gradients(graph, inputs):
        return chosen.compiler()(graph, inputs)
    if reducer is None:
        compiled = chosen.compiler()(graph, inputs)
        return compiled if _compiled_for("wrapped") else ingraph.without_wrapper(compiled)
    if chosen.says_sizes:
        reducer.lending.prefer(chosen.sizes)
    own = chosen.cap_mb is not None  # whether the wrapper's sizes do not matter
    if chosen.in_graph:
        _compiled_for("wrapped" if own else "segments")
        return ingraph.compile_graph(graph, inputs, reducer, chosen)
    own = own and reducer.group.size() > 1  # of one rank, the wrapper's: nobody is waited for
    again, policy = _compiled_for("wrapped" if own else "pieces"), reducer.lending.pieces
    if policy is None and again and not own:
        _log.info("a graph runs uncompiled until a backward was timed, by which it will be cut")
        return Options(inner="eager").compiler()(graph, inputs)
    policy = chosen.sizes(policy or reducer.policy) if reducer.group.size() > 1 else policy or reducer.policy
    return split.SplitBackend(chosen.compiler(), policy, reducer.names_by_id)(graph, inputs)


def _makes_gradients(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether there may be gradients of parameters to reduce."""
    held = any(node.op in ("get_attr", "call_module") for node in graph.graph.nodes)
    return held or any(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in inputs)


def _compiled_for(attribute: str) -> bool:
    """Have the graph that is being compiled serve only calls in which this attribute of `active` is what it is now.

    Returns whether that was possible; a graph without a backward serves all.
    """
    return torch.is_grad_enabled() and _torch.guard_attribute(active.__name__, attribute)
