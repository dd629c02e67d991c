"""The pass over a backward graph: gradients of parameters into flat buckets, launched where they are complete."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchshard import _torch
from torchshard.buckets import BucketPolicy, Gradient, PlannedBucket, names_text, plan_buckets, size_text, slices
from torchshard.compiler import ops
from torchshard.ddp.flat import gradient_strides

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class GraphParameter:
    """A parameter of the wrapper among the inputs of a graph.

    Attributes:
        name: in the wrapper.
        shape: of the parameter.
        strides: of its gradient.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def graph_parameters(inputs: Sequence[Any], names: Mapping[int, str]) -> dict[int, GraphParameter]:
    """Those inputs of a graph that are trained and have a name, by position.

    Args:
        inputs: as Dynamo gives them to a backend.
        names: of the parameters, by their ids.
    """
    return {
        i: GraphParameter(names[id(p)], tuple(p.shape), tuple(gradient_strides(p)))
        for i, p in enumerate(inputs)
        if isinstance(p, torch.nn.Parameter) and p.requires_grad and id(p) in names
    }


@dataclass(frozen=True, slots=True)
class InsertedBucket:
    """What the pass has put into a graph for one bucket.

    Attributes:
        planned: its gradients, in the order of its slots.
        direct: those of them that are computed in their slot, without a copy.
        launched_after: name of the node that completes it.
    """

    planned: PlannedBucket
    direct: tuple[Gradient, ...]
    launched_after: str


class BucketPass:
    """Rewrites backward graphs; leaves alone those without gradients of these parameters.

    Args:
        parameters: by their position among the inputs of Dynamo's graph.
        policy: sizes of buckets.

    Attributes:
        key: all that the result depends on, besides the graph; for inductor's cache.
        inserted: what was done to the last graph.
    """

    def __init__(self, parameters: Mapping[int, GraphParameter], policy: BucketPolicy) -> None:
        self._parameters, self._policy = parameters, policy
        shapes = tuple((i, p.shape, p.strides) for i, p in parameters.items())
        self.key: object = (source_hash(__file__, ops.__file__), shapes, policy.cap, policy.first, policy.caps)
        self.inserted: tuple[InsertedBucket, ...] = ()

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Insert all buckets."""
        found = self._gradients(graph)
        if not found:
            return
        order = {node: at for at, node in enumerate(graph.nodes)}
        ready = sorted(found, key=lambda i: (order[found[i][1]], found[i][0]))
        plan = plan_buckets((self._gradient(i, found[i][1]) for i in ready), self._policy)
        work = _Insertion(graph, order, self._parameters, found)
        self.inserted = tuple(work.insert(number, bucket) for number, bucket in enumerate(plan))
        work.done()

    def _gradients(self, graph: torch.fx.Graph) -> dict[int, tuple[int, torch.fx.Node]]:
        """Graph input -> position among the outputs and node of its gradient."""
        return {
            i: (position, node)
            for position, node, i in _torch.gradient_outputs(graph)
            if i in self._parameters and tuple(node.meta["val"].shape) == self._parameters[i].shape
        }

    def _gradient(self, i: int, node: torch.fx.Node) -> Gradient:
        value = node.meta["val"]
        kind = (str(value.dtype).removeprefix("torch."), str(value.device))
        return Gradient(i, self._parameters[i].name, value.numel() * value.element_size(), kind)


class _Insertion:
    """The surgery on one graph."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        order: Mapping[torch.fx.Node, int],
        parameters: Mapping[int, GraphParameter],
        found: Mapping[int, tuple[int, torch.fx.Node]],
    ) -> None:
        self._graph, self._order, self._parameters, self._found = graph, order, parameters, found
        self._results = list(graph.output_node().args[0])  # type: ignore[arg-type]
        self._replaced: list[torch.fx.Node] = []
        self._first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(self._first):
            # Every launch changes it, which keeps them in their order.
            self._token = graph.call_function(_aten.empty.memory_format, ([1],), {"device": torch.device("cpu")})

    def insert(self, number: int, bucket: PlannedBucket) -> InsertedBucket:
        """Open the bucket before its first gradient, launch it after its last."""
        graph, params = self._graph, [g.index for g in bucket.gradients]
        nodes = [self._found[i][1] for i in params]
        value = nodes[0].meta["val"]
        starts, numel = slices(self._found[i][1].meta["val"].numel() for i in params)
        with graph.inserting_before(self._after_inputs(nodes[0])):
            flat = graph.call_function(ops.OPEN, (number, numel, value.dtype, value.device, params))
            views = [self._slot(flat, i, start) for i, start in zip(params, starts, strict=True)]
        last, direct, copied, slots = views[-1], [], [], []
        for slot, (i, node, view) in enumerate(zip(params, nodes, views, strict=True)):
            if self._can_write_to_slot(node):
                with graph.inserting_before(node):
                    last = graph.call_function(ops.MM_INTO, (*node.args, number, slot, view))
                self._replaced.append(node)
                direct.append(bucket.gradients[slot])
            else:
                copied.append(node)
                slots.append(slot)
                last = last if node.op == "placeholder" else node
            self._results[self._found[i][0]] = view
        with graph.inserting_after(last):
            graph.call_function(ops.LAUNCH, (flat, self._token, views, copied, slots, number))
        return InsertedBucket(bucket, tuple(direct), nodes[-1].name)

    def done(self) -> None:
        """Return the slots instead of the gradients."""
        output = self._graph.output_node()
        output.args = (tuple(self._results),)
        for node in self._replaced:
            self._graph.erase_node(node)

    def _after_inputs(self, node: torch.fx.Node) -> torch.fx.Node:
        return self._first if node.op == "placeholder" else node

    def _slot(self, flat: torch.fx.Node, i: int, start: int) -> torch.fx.Node:
        """A gradient's place; not as_strided, whose offset would count from the beginning of the memory of `flat`."""
        p, graph = self._parameters[i], self._graph
        outward = sorted(range(len(p.shape)), key=lambda dim: -p.strides[dim])  # strides without holes
        inward = sorted(range(len(outward)), key=outward.__getitem__)
        place = graph.call_function(_aten.slice.Tensor, (flat, 0, start, start + math.prod(p.shape)))
        ordered = graph.call_function(_aten.view.default, (place, [p.shape[dim] for dim in outward]))
        return graph.create_node("call_function", _aten.permute.default, (ordered, inward), name="slot")

    def _can_write_to_slot(self, node: torch.fx.Node) -> bool:
        """Whether this is a matrix product that nothing but the output needs."""
        return node.target is _aten.mm.default and len(node.users) == 1 and self._results.count(node) == 1


def source_hash(*files: str) -> str:
    """A hash of the sources that rewrite graphs: a cache must not serve what older ones have made."""
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


def bucket_rows(inserted: Sequence[InsertedBucket]) -> list[tuple[object, ...]]:
    """Number, names, bytes, copies saved, and where launched: a row a bucket."""
    return [
        (
            number,
            names_text(b.planned.params),
            size_text(b.planned.nbytes),
            f"{len(b.direct)} of {len(b.planned.gradients)}",
            b.launched_after,
        )
        for number, b in enumerate(inserted)
    ]
