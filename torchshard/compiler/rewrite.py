"""The pass over a backward graph: gradients of parameters into flat buckets, launched where they are complete."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from torchshard import _torch
from torchshard.buckets import BucketPolicy, Gradient, PlannedBucket, names_text, plan_buckets, size_text, slices
from torchshard.compiler import ops, writing
from torchshard.compiler.writing import Written, written
from torchshard.ddp.buckets.flat import gradient_strides

_aten = torch.ops.aten

SMALL = 4096
"""Elements. Gradients below this are copied to their slots: to write one there takes an operator in Python, 5 us."""


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

    If none has one, all that are trained: the graph may be used for others again, that have.

    Args:
        inputs: as Dynamo gives them to a backend.
        names: of the parameters, by their ids.
    """
    trained = {i: p for i, p in enumerate(inputs) if isinstance(p, torch.nn.Parameter) and p.requires_grad}
    chosen = {i: p for i, p in trained.items() if id(p) in names} or trained
    return {
        i: GraphParameter(names.get(id(p), f"input {i}"), tuple(p.shape), tuple(gradient_strides(p)))
        for i, p in chosen.items()
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
        source = source_hash(__file__, ops.__file__, writing.__file__)
        self.key: object = (source, shapes, policy.cap, policy.first, policy.caps, SMALL)
        self.inserted: tuple[InsertedBucket, ...] = ()

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Insert all buckets."""
        order = {node: at for at, node in enumerate(graph.nodes)}
        made = self._made(graph, order)
        if not made:
            return
        by_time = sorted(made.values(), key=lambda g: (g.ready, g.position))
        plan = plan_buckets((g.planned for g in by_time), self._policy)
        work = _Insertion(graph, order, made)
        self.inserted = tuple(work.insert(number, bucket) for number, bucket in enumerate(plan))
        work.done()

    def _made(self, graph: torch.fx.Graph, order: Mapping[torch.fx.Node, int]) -> "dict[int, _Made]":
        """The gradients that a graph makes, by graph input; sparse ones have buckets of their own, without memory."""
        results: Any = graph.output_node().args[0]
        made = {}
        for position, node, i in _torch.gradient_outputs(graph):
            p, value = self._parameters.get(i), node.meta["val"]
            if p is not None and tuple(value.shape) == p.shape and value.layout is torch.strided:
                is_written = math.prod(p.shape) >= SMALL and results.count(node) == 1
                how = written(node, p.strides, order) if is_written else None
                ready = order[how.terms[-1].after if how else node]
                made[i] = _Made(i, p, node, position, how, ready)
        return made


@dataclass(frozen=True, slots=True)
class _Made:
    """A gradient in a graph.

    Attributes:
        index, parameter: the graph input whose gradient it is.
        node: makes it.
        position: among the outputs.
        how: it is written to its slot; None if it is copied.
        ready: position in the graph of what completes it.
    """

    index: int
    parameter: GraphParameter
    node: torch.fx.Node
    position: int
    how: Written | None
    ready: int

    @property
    def is_small(self) -> bool:
        """Whether it is not worth an operator of its own."""
        return self.numel < SMALL

    @property
    def numel(self) -> int:
        """Elements; a number also where the graph knows the gradient's sizes by symbols."""
        return math.prod(self.parameter.shape)

    @property
    def planned(self) -> Gradient:
        """The same in the planner's words."""
        value = self.node.meta["val"]
        kind = (str(value.dtype).removeprefix("torch."), str(value.device))
        return Gradient(self.index, self.parameter.name, self.numel * value.element_size(), kind)


class _Insertion:
    """The surgery on one graph."""

    def __init__(self, graph: torch.fx.Graph, order: Mapping[torch.fx.Node, int], made: Mapping[int, _Made]) -> None:
        self._graph, self._order, self._made = graph, order, made
        self._results: dict[int, tuple[torch.fx.Node, GraphParameter, int]] = {}  # by position: arguments of _slot
        self._unneeded: list[torch.fx.Node] = []
        self._first = next(node for node in graph.nodes if node.op != "placeholder")
        self._next = {a: self._first if a.op == "placeholder" else b for a, b in pairwise(graph.nodes)}
        with graph.inserting_before(self._first):
            # Every launch changes it, which keeps them in their order.
            self._token = graph.call_function(_aten.empty.memory_format, ([1],), {"device": torch.device("cpu")})

    def insert(self, number: int, bucket: PlannedBucket) -> InsertedBucket:
        """Open the bucket before its first gradient, launch it after its last."""
        graph, made = self._graph, [self._made[g.index] for g in bucket.gradients]
        value = made[0].node.meta["val"]
        starts, numel = slices(g.numel for g in made)
        steps = [term.after for g in made if g.how for term in g.how.terms]
        copied = sorted(
            (slot for slot, g in enumerate(made) if g.how is None), key=lambda slot: not made[slot].is_small
        )
        small = sum(made[slot].is_small for slot in copied)
        if small == len(made):  # of this one the slot is returned: what no result lies in, inductor would use again
            small -= 1
        own = set(copied[:small])
        steps += [made[slot].node for slot in copied]
        with graph.inserting_before(self._after_inputs(min(steps, key=self._order.__getitem__))):
            flat = graph.call_function(ops.OPEN, (number, numel, value.dtype, value.device, [g.index for g in made]))
            views = [self._slot(flat, g.parameter, start) for g, start in zip(made, starts, strict=True)]
        for slot, g in enumerate(made):
            if g.how:
                self._write(g.how, number, slot, views[slot])
            if slot not in own:
                self._results[g.position] = flat, g.parameter, starts[slot]
        with graph.inserting_before(self._next[max(steps, key=self._order.__getitem__)]):
            gradients = [made[slot].node for slot in copied]
            graph.call_function(ops.LAUNCH, (flat, self._token, views, gradients, copied, small, number))
        direct = tuple(g for g, m in zip(bucket.gradients, made, strict=True) if m.how)
        return InsertedBucket(bucket, direct, made[-1].node.name)

    def _write(self, how: Written, number: int, slot: int, view: torch.fx.Node) -> None:
        """Write all terms of a gradient to its slot."""
        for k, term in enumerate(how.terms):
            with self._graph.inserting_before(self._next[term.after]):
                place = view
                for operator, argument in term.views:
                    place = self._graph.call_function(operator, (place, argument))
                self._graph.call_function(term.operator, (*term.operands(self._graph), k == 0, number, slot, place))
        self._unneeded += how.unneeded

    def done(self) -> None:
        """Return the slots instead of the gradients, but for small ones that are copied: a view for each takes longer.

        By views of their own: inductor copies results that it does not return in the strides that they have, and what
        is written must not be a copy. Slots have the strides of parameters, which gradients need not have had.
        """
        output = self._graph.output_node()
        _torch.expect_strides(self._graph, {at: p.strides for at, (_, p, _) in self._results.items()})
        with self._graph.inserting_before(output):
            slots = {at: self._slot(*place) for at, place in self._results.items()}
        output.args = (tuple([slots.get(at, result) for at, result in enumerate(output.args[0])]),)  # type: ignore[arg-type]
        for node in self._unneeded:
            self._graph.erase_node(node)

    def _after_inputs(self, node: torch.fx.Node) -> torch.fx.Node:
        return self._first if node.op == "placeholder" else node

    def _slot(self, flat: torch.fx.Node, p: GraphParameter, start: int) -> torch.fx.Node:
        """A gradient's place; not as_strided, whose offset would count from the beginning of the memory of `flat`."""
        graph = self._graph
        outward = sorted(range(len(p.shape)), key=lambda dim: -p.strides[dim])  # strides without holes
        inward = sorted(range(len(outward)), key=outward.__getitem__)
        place = graph.call_function(_aten.slice.Tensor, (flat, 0, start, start + math.prod(p.shape)))
        ordered = graph.call_function(_aten.view.default, (place, [p.shape[dim] for dim in outward]))
        return graph.create_node("call_function", _aten.permute.default, (ordered, inward), name="slot")


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
