"""What the backend would do with a model, without running a step of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from tabulate import tabulate

from torchshard import _torch
from torchshard.buckets import BucketPolicy, PlannedBucket
from torchshard.compiler.options import policy_of
from torchshard.compiler.rewrite import BucketPass, InsertedBucket, bucket_rows, graph_parameters
from torchshard.ddp.wrapper import DistributedDataParallel


@dataclass(frozen=True)
class GraphPlan:
    """One compiled graph.

    Attributes:
        inserted: its buckets, in the order in which they are launched.
        code: the backward with all that was inserted, as text.
    """

    inserted: tuple[InsertedBucket, ...]
    code: str


@dataclass(frozen=True)
class CompiledPlan:
    """What `explain` has found; as text, a table of the buckets.

    Attributes:
        graphs: in the order in which they are compiled, those with gradients of parameters.
        outside: names of the parameters that have gradients in no graph: unused, or used by code that is not
            compiled; hooks reduce their gradients, if there are any.
    """

    graphs: tuple[GraphPlan, ...]
    outside: tuple[str, ...]

    @property
    def buckets(self) -> tuple[PlannedBucket, ...]:
        """Of all graphs."""
        return tuple(bucket.planned for graph in self.graphs for bucket in graph.inserted)

    def __str__(self) -> str:
        rows = [(number, *row) for number, graph in enumerate(self.graphs) for row in bucket_rows(graph.inserted)]
        headers = ["graph", "bucket", "parameters", "bytes", "in place", "launched after"]
        text = str(tabulate(rows, headers, disable_numparse=True))
        return f"{text}\nnot in a graph: {', '.join(self.outside)}" if self.outside else text


def explain(
    model: torch.nn.Module,
    *args: Any,
    bucket_cap_mb: float | None = None,
    first_bucket_mb: float | None = None,
    **kwargs: Any,
) -> CompiledPlan:
    """The graphs of a model under backend "torchshard", their buckets and where each is launched.

    Forward and backward are traced, and the forward is run once on the arguments, without compiled code; nothing is
    communicated, no gradient is made, and no process group is needed. Inductor may still move single operators.

    Args:
        model: a module, wrapped in torchshard's DistributedDataParallel or not.
        args, kwargs: for its forward.
        bucket_cap_mb, first_bucket_mb: sizes of buckets in MiB; by default the wrapper's, or else 25 and 1.

    Raises:
        ValueError: a negative size.

    Example:
        >>> print(explain(torch.nn.Linear(4, 4), torch.ones(2, 4)))         # doctest: +SKIP
    """
    module, policy, ignored = model, BucketPolicy(), set[str]()
    if isinstance(model, DistributedDataParallel):
        module, policy, ignored = model.module, model.reducer.policy, model.parameters_to_ignore
    policy = policy_of(bucket_cap_mb, first_bucket_mb) or policy
    names = {id(p): n for n, p in module.named_parameters() if p.requires_grad and n not in ignored}
    found: list[GraphPlan] = []
    compiled = torch.compile(_fresh(_call), backend=_recording(names, policy, found), dynamic=False)
    with torch.enable_grad(), _unchanged(module):
        compiled(module, *args, **kwargs)
    inside = {name for graph in found for bucket in graph.inserted for name in bucket.planned.params}
    return CompiledPlan(tuple(found), tuple(name for name in names.values() if name not in inside))


def _recording(names: Mapping[int, str], policy: BucketPolicy, found: list[GraphPlan]) -> Callable[..., Any]:
    """A backend that appends each graph's plan to `found`."""

    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        rewrite = _RecordingPass(graph_parameters(inputs, names), policy)
        run = _torch.trace_backward(graph, inputs, rewrite)
        if rewrite.inserted:
            found.append(GraphPlan(rewrite.inserted, rewrite.code))
        return run

    return compiler


class _RecordingPass(BucketPass):
    """Keeps the graph's text too."""

    code = ""

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        self.code = str(graph)


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with code of its own: what Dynamo keeps with the code goes with it."""
    assert isinstance(function, FunctionType), "made by def"
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


@contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Leave buffers and random generators as they were."""
    buffers = [(b, b.clone()) for b in module.buffers()]
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
