"""What the backend would do with a model, without running a step of it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from torchshard import _torch
from torchshard.buckets import BucketPolicy, Gradient, PlannedBucket, size_text
from torchshard.compiler.advice import way_around
from torchshard.compiler.measuring import unchanged, unwrapped
from torchshard.compiler.options import policy_of
from torchshard.compiler.rewrite import BucketPass, InsertedBucket, bucket_rows, graph_parameters
from torchshard.ddp.options import reduced
from torchshard.ddp.wrapper import DistributedDataParallel


@dataclass(frozen=True)
class GraphPlan:
    """One compiled graph; where layers share it, as it runs for one of them.

    Attributes:
        inserted: its buckets, in the order in which they are launched.
        code: the backward with all that was inserted, as text.
    """

    inserted: tuple[InsertedBucket, ...]
    code: str


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo stopped a graph.

    Attributes:
        reason: in Dynamo's words, all of them.
        place: file and line; empty where nothing had been captured yet.
    """

    reason: str
    place: str = ""

    @property
    def kind(self) -> str:
        """The first line of the reason."""
        return self.reason.partition("\n")[0]

    @property
    def advice(self) -> str:
        """The way around, where there is a known one."""
        return way_around(self.reason)

    def __str__(self) -> str:
        text = f"{self.kind} ({Path(self.place).name})" if self.place else self.kind
        return f"{text}; instead: {self.advice}" if self.advice else text


@dataclass(frozen=True)
class CompiledPlan:
    """What `explain` has found; as text, a table of the buckets.

    Attributes:
        graphs: in the order in which they run first, those with gradients of parameters.
        outside: names of the parameters that have gradients in no graph: unused, or used by code that is not
            compiled; hooks reduce their gradients, if there are any.
        breaks: why it is not one graph.
    """

    graphs: tuple[GraphPlan, ...]
    outside: tuple[str, ...]
    breaks: tuple[GraphBreak, ...] = ()

    @property
    def inserted(self) -> tuple[InsertedBucket, ...]:
        """The buckets of all graphs, and how they are filled."""
        return tuple(bucket for graph in self.graphs for bucket in graph.inserted)

    @property
    def buckets(self) -> tuple[PlannedBucket, ...]:
        """The same in the planner's words."""
        return tuple(bucket.planned for bucket in self.inserted)

    @property
    def nbytes(self) -> int:
        """Of the gradients in graphs."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def zero_copy(self) -> float:
        """The share of these bytes that is computed where it is reduced; 1.0 is all."""
        direct = sum(gradient.nbytes for bucket in self.inserted for gradient in bucket.direct)
        return direct / self.nbytes if self.nbytes else 0.0

    def __str__(self) -> str:
        rows = [(number, *row) for number, graph in enumerate(self.graphs) for row in bucket_rows(graph.inserted)]
        headers = ["graph", "bucket", "parameters", "bytes", "in place", "launched after"]
        lines = [
            str(tabulate(rows, headers, disable_numparse=True)),
            f"{size_text(self.nbytes)} of gradients in graphs, {int(100 * self.zero_copy)} % of them computed in place",
        ]
        if self.outside:
            lines.append(f"not in a graph: {', '.join(self.outside)}")
        return "\n".join(lines + [f"graph break: {found}" for found in self.breaks])


def explain(
    model: torch.nn.Module,
    *args: Any,
    bucket_cap_mb: float | None = None,
    first_bucket_mb: float | None = None,
    **kwargs: Any,
) -> CompiledPlan:
    """The graphs of a model under backend "torchshard", their buckets and where each is launched.

    Forward and backward are traced, and the forward is run once on the arguments, without compiled code; nothing is
    communicated, no gradient is made, and no process group is needed. What was compiled before stays as it is, and what
    is compiled later does not depend on having asked. Inductor may still move single operators.

    Args:
        model: a module, wrapped in torchshard's DistributedDataParallel or not, compiled or not, in any order; on the
            meta device, too. One in torch's wrapper is planned as torchshard's would have it, with the same sizes.
        args, kwargs: for its forward.
        bucket_cap_mb, first_bucket_mb: sizes of buckets in MiB; by default the wrapper's, or else 25 and 1.

    Raises:
        ValueError: a negative size.

    Example:
        >>> print(explain(torch.nn.Linear(4, 4), torch.ones(2, 4)))         # doctest: +SKIP
    """
    module, wrapper = unwrapped(model)
    policy = policy_of(bucket_cap_mb, first_bucket_mb, _policy(wrapper))
    named = reduced(wrapper.module, wrapper.parameters_to_ignore) if wrapper else module.named_parameters()
    names = {id(p): name for name, p in named if p.requires_grad}
    found: list[GraphPlan] = []
    breaks: list[GraphBreak] = []
    before = Counter(_torch.graph_breaks())
    with torch.inference_mode(False), torch.enable_grad(), unchanged(module), _torch.as_if_uncompiled(module):
        leaves, nesting = _torch.leaves_of((args, kwargs))
        args, kwargs = _torch.tree_of([_usable(leaf) for leaf in leaves], nesting)
        with _torch.no_trace_in_dynamo():
            torch.compile(_call, backend=_recording(names, policy, found, breaks), dynamic=False)(module, args, kwargs)
    # Where nothing was captured before a break, no graph tells of it, but it is counted; so are others, more than once.
    counted, known = map(GraphBreak, Counter(_torch.graph_breaks()) - before), {b.kind for b in breaks}
    breaks += [found for found in counted if found.kind not in known]
    inside = {name for graph in found for bucket in graph.inserted for name in bucket.planned.params}
    return CompiledPlan(tuple(found), tuple(name for name in names.values() if name not in inside), tuple(breaks))


def _policy(wrapper: torch.nn.parallel.DistributedDataParallel | None) -> BucketPolicy | None:
    """The sizes of its buckets."""
    if wrapper is None:
        return None
    if isinstance(wrapper, DistributedDataParallel):
        return wrapper.reducer.policy
    cap = wrapper.bucket_bytes_cap
    first = BucketPolicy().first if wrapper.bucket_bytes_cap_default else cap
    return BucketPolicy(cap, first, tuple(getattr(wrapper, "bucket_bytes_cap_list", None) or ()))


def _recording(
    names: Mapping[int, str], policy: BucketPolicy, found: list[GraphPlan], breaks: list[GraphBreak]
) -> Callable[..., Any]:
    """A backend that appends each graph's plan to `found`, and what ended the graph to `breaks`."""

    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if ended := _torch.graph_break(graph):
            breaks.append(GraphBreak(*ended))
        rewrite = _RecordingPass(graph_parameters(inputs, names), policy)
        run = _torch.trace_backward(graph, inputs, rewrite)
        ran: list[GraphPlan] = []

        def record(*args: Any) -> Any:
            inserted = (_named(bucket, args, names) for bucket in rewrite.inserted)
            plan = GraphPlan(tuple(b for b in inserted if b.planned.gradients), rewrite.code)
            if plan.inserted and plan not in ran:
                ran.append(plan)
                found.append(plan)
            return run(*args)

        return record

    return compiler


def _named(bucket: InsertedBucket, args: Sequence[Any], names: Mapping[int, str]) -> InsertedBucket:
    """The bucket of a graph when it runs with these inputs: layers that are alike share a graph."""

    def of(gradients: tuple[Gradient, ...]) -> tuple[Gradient, ...]:
        known = ((g, names.get(id(args[g.index]))) for g in gradients)
        return tuple(replace(g, name=name) for g, name in known if name is not None)

    return replace(bucket, planned=PlannedBucket(of(bucket.planned.gradients)), direct=of(bucket.direct))


class _RecordingPass(BucketPass):
    """Keeps the graph's text too."""

    code = ""

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        self.code = str(graph)


def _usable(leaf: Any) -> Any:
    """An argument with which a backward can be traced: tensors made in inference mode cannot be saved for one."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_inference() else leaf


def _call(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return module(*args, **kwargs)
