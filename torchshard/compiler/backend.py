"""The backend behind the string "torchshard"."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchshard.compiler import ingraph, split
from torchshard.compiler.objects import support_groups
from torchshard.compiler.options import parse
from torchshard.ddp import active


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
    support_groups()
    chosen = parse(mode, options)
    reducer = active.reducer()
    if reducer is None:
        return ingraph.without_wrapper(chosen.compiler()(graph, inputs), inputs)
    if chosen.in_graph:
        return ingraph.compile_graph(graph, inputs, reducer, chosen)
    if reducer.group.size() == 1:
        return chosen.compiler()(graph, inputs)  # there is nobody to wait for
    return split.SplitBackend(chosen.compiler(), chosen.policy or reducer.policy, reducer.names_by_id)(graph, inputs)
