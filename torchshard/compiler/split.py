"""Split mode: the forward graph is cut where buckets are full, so that hooks reduce between pieces of the backward.

Works with any inner compiler, as each piece is compiled alone. The backward of a piece is over, and its gradients are
there, before that of the piece in front of it begins.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch.fx.passes.split_module import split_module

from torchshard import _torch
from torchshard.buckets import ONE_BUCKET, BucketPolicy, Gradient, PlannedBucket, names_text, size_text
from torchshard.compiler.options import Compiler, Options, check_inner, policy_of
from torchshard.compiler.undivided import inseparable, take_views_where_used
from torchshard.ddp.cutting import reduces_gradients

_log = logging.getLogger(__name__)


@dataclass
class Piece:
    """A part of the forward graph, and the parameters whose gradients are complete when its backward is over.

    Attributes:
        nodes: in reverse order of execution.
        gradients: in the order in which they are met going backwards.
        extra_nodes, extra_bytes: what it holds beyond its cap, because nothing in it was used outside before, or it
            could not be divided.
    """

    nodes: list[torch.fx.Node] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    extra_nodes: int = 0
    extra_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(g.nbytes for g in self.gradients)

    @property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(g.name for g in self.gradients)

    def is_used_outside(self) -> bool:
        """Whether a value made here is needed by another piece or as an output."""
        inside = set(self.nodes)
        return any(user not in inside for node in self.nodes for user in node.users)


@dataclass(frozen=True)
class SplitPlan:
    """Where a graph was cut.

    Attributes:
        pieces: in order of the backward; without parameters, the whole graph is one.
    """

    pieces: tuple[Piece, ...]

    @property
    def buckets(self) -> tuple[PlannedBucket, ...]:
        """The gradients of each piece."""
        return tuple(PlannedBucket(tuple(piece.gradients)) for piece in self.pieces if piece.gradients)

    def __str__(self) -> str:
        rows = [
            (
                number,
                names_text(piece.params),
                size_text(piece.nbytes),
                len(piece.nodes),
                piece.extra_nodes,
                size_text(piece.extra_bytes),
            )
            for number, piece in enumerate(self.pieces)
        ]
        headers = ["bucket", "parameters", "bytes", "operators", "extra operators", "extra bytes"]
        return str(tabulate(rows, headers, disable_numparse=True))


@reduces_gradients
class SplitBackend:
    """Cuts graphs and compiles the pieces; a backend for torch.compile.

    Args:
        compiler: of the pieces.
        policy: bytes of gradients in each piece; the first is the last of the forward.
        names: of the parameters that count, by their ids; None if all count that require a gradient.

    Attributes:
        last_plan: how the last graph was cut.
    """

    def __init__(self, compiler: Compiler, policy: BucketPolicy, names: Mapping[int, str] | None = None) -> None:
        self._compiler, self._policy, self._names = compiler, policy, names
        self.last_plan: SplitPlan | None = None

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **_configuration: Any) -> Callable[..., Any]:
        """Compile what Dynamo has captured."""
        _torch.write_known_sizes(graph.graph)
        take_views_where_used(graph.graph)
        # Without a backward there is nothing to overlap.
        policy = self._policy if torch.is_grad_enabled() else ONE_BUCKET
        plan = self.last_plan = cut(graph.graph, self._parameters(graph, inputs), policy)
        _log.debug("pieces of the graph:\n%s", plan)
        _torch.trace_artifact("torchshard_pieces", lambda: str(plan))
        if len(plan.pieces) == 1:
            return self._compiler(graph, inputs)
        number = {node: -at for at, piece in enumerate(plan.pieces) for node in piece.nodes}
        last = len(plan.pieces) - 1
        # What one piece writes another may read: their order is that of the graph, also where nothing flows.
        pieces = split_module(graph, None, lambda node: last + number[node], keep_original_order=True)  # type: ignore[arg-type]
        return _torch.compile_pieces(graph, pieces, self._compiler, inputs)

    def _parameters(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> dict[torch.fx.Node, Gradient]:
        placeholders = graph.graph.find_nodes(op="placeholder")
        found = list(zip(placeholders, inputs, strict=True))
        found += [(node, _attribute(graph, node.target)) for node in graph.graph.find_nodes(op="get_attr")]
        numbers: dict[int, int] = {}
        return {
            node: Gradient(numbers.setdefault(id(p), len(numbers)), self._name(node, p), p.numel() * p.element_size())
            for node, p in found
            if self._counts(p)
        }

    def _name(self, node: torch.fx.Node, param: torch.nn.Parameter) -> str:
        return self._names[id(param)] if self._names is not None else _torch.source_name(node)

    def _counts(self, value: Any) -> bool:
        if not isinstance(value, torch.nn.Parameter) or not value.requires_grad:
            return False
        return id(value) in self._names if self._names is not None else not _torch.is_ignored_by_ddp(value)


def cut(graph: torch.fx.Graph, parameters: dict[torch.fx.Node, Gradient], policy: BucketPolicy) -> SplitPlan:
    """Group a graph's nodes, from its end, into pieces that hold at least their bucket's size of gradients.

    A gradient belongs to the piece with its parameter's first use in the forward: it is complete only after that has
    run backward. Uses that pass no gradient on count only if there are no others. Nodes in front of all parameters join
    the piece behind them. What cannot be divided is not.

    Args:
        graph: the forward, as Dynamo captured it.
        parameters: the nodes that bring parameters in.
        policy: when a piece is full.
    """
    first_use, bound = _first_uses(graph, parameters), inseparable(graph)
    pieces, full = [Piece()], False
    for node in reversed(graph.nodes):
        if node.op in ("output", "placeholder", "get_attr"):
            continue
        piece = pieces[-1]
        if full:
            if piece.nodes[-1] not in bound and piece.is_used_outside():
                piece = Piece()
                pieces.append(piece)
                full = False
            else:
                piece.extra_nodes += 1
        piece.nodes.append(node)
        for gradient in first_use.get(node, ()):
            piece.gradients.append(gradient)
            piece.extra_bytes += gradient.nbytes if full else 0
        full = full or (bool(piece.gradients) and piece.nbytes >= policy.limit(len(pieces) - 1))
    if len(pieces) > 1 and not pieces[-1].gradients:
        preamble = pieces.pop()
        pieces[-1].nodes += preamble.nodes
    return SplitPlan(tuple(pieces))


def _first_uses(
    graph: torch.fx.Graph, parameters: dict[torch.fx.Node, Gradient]
) -> dict[torch.fx.Node, list[Gradient]]:
    """Node -> the gradients whose parameters it is the first to use, anywhere in its arguments."""
    uses = [node for node in graph.nodes if node.op != "output"]
    uses.sort(key=_torch.passes_no_gradient)  # in their order, those that do first
    first: dict[int, tuple[torch.fx.Node, Gradient]] = {}
    for node in uses:
        for given in node.all_input_nodes:
            if (gradient := parameters.get(given)) is not None:
                first.setdefault(gradient.index, (node, gradient))
    found: dict[torch.fx.Node, list[Gradient]] = {}
    for node, gradient in first.values():
        found.setdefault(node, []).append(gradient)
    return found


def _attribute(module: torch.nn.Module, path: Any) -> Any:
    found: Any = module
    for name in str(path).split("."):
        found = getattr(found, name, None)
    return found


def split_backend(
    bucket_cap_mb: float = 25, first_bucket_mb: float = 1, inner: str | Compiler = "inductor"
) -> SplitBackend:
    """A backend that cuts every graph where a bucket is full, whether the model is wrapped or not.

    Args:
        bucket_cap_mb: MiB of gradients in a piece.
        first_bucket_mb: the same for the last piece of the forward, whose gradients are ready first.
        inner: compiler of the pieces.

    Raises:
        ValueError: a negative size, or an inner compiler that is none.

    Example:
        >>> backend = split_backend(bucket_cap_mb=1)                   # doctest: +SKIP
        >>> torch.compile(model, backend=backend)(x)                   # doctest: +SKIP
        >>> print(backend.last_plan)                                   # doctest: +SKIP
    """
    check_inner(inner)
    return SplitBackend(Options(inner=inner).compiler(), policy_of(bucket_cap_mb, first_bucket_mb))
