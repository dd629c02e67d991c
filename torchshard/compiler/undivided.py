"""What a cut of Dynamo's graph has to leave in one piece, and what is to be brought together before.

Spans of nodes are found by rules that know nothing of each other; where spans overlap, they are one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from torchshard import _torch

Span = tuple[int, int]
"""Positions of the first node and the last."""


def take_views_where_used(graph: torch.fx.Graph) -> None:
    """Move views of inputs, as parameters that are lent to a module are, in front of their first uses.

    A module may take all of them when it begins; the gradients of what they are views of would be complete when its
    backward is over. A view is the same whenever it is taken, as long as gradients are on or off as they were.
    """
    modes = dict(_torch.modes(graph.nodes))
    for view in reversed([*_input_views(graph.nodes)]):
        use = min(view.users, default=view)
        if use.op != "output" and modes[view] == modes[use]:
            use.prepend(view)


def _input_views(nodes: Iterable[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    """Differentiable views of inputs that nothing writes to."""
    views: set[torch.fx.Node] = set()
    for node in nodes:
        given = node.all_input_nodes
        if node.op.startswith("call_") and all(x.op in ("placeholder", "get_attr") or x in views for x in given):
            memory = {key for x in given for key, _ in _torch.memories(_torch.example_of(x))}
            found = [*_torch.memories(_torch.example_of(node))]
            same = any(_torch.example_of(x) is _torch.example_of(node) for x in given)  # as what writes in place
            if found and not same and all(key in memory and _is_lasting(x) for key, x in found):
                views.add(node)
                yield node


def _is_lasting(x: torch.Tensor) -> bool:
    return x.requires_grad and not _torch.was_written(x)


def inseparable(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that belong to the same piece as the node in front of them."""
    nodes = list(graph.nodes)
    reach: dict[int, int] = {}
    for find in (_regions, _settings, _values, _writes, _first_uses_of_views):
        for first, last in find(nodes):
            reach[first] = max(last, reach.get(first, last))
    found, end = set(), -1
    for at, node in enumerate(nodes):
        if at <= end:
            found.add(node)
        end = max(end, reach.get(at, at))
    return found


def _regions(nodes: Sequence[torch.fx.Node]) -> Iterator[Span]:
    """Regions that are entered and left, such as those of torch.vmap: from the outermost entry to its exit."""
    depth: Counter[str] = Counter()
    begin: dict[str, int] = {}
    for at, node in enumerate(nodes):
        if step := _torch.nesting(node):
            region, change = step
            if not depth[region]:
                begin[region] = at
            depth[region] += change
            if not depth[region]:
                yield begin[region], at


def _settings(nodes: Sequence[torch.fx.Node]) -> Iterator[Span]:
    """Regions in which something is set to another value than at the end of the graph."""
    calls: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for at, node in enumerate(nodes):
        if found := _torch.setting(node):
            calls[found[0]].append((at, found[1]))
    for changes in calls.values():
        begin = None
        for at, state in changes:
            if state != changes[-1][1]:
                begin = at if begin is None else begin
            elif begin is not None:
                yield begin, at
                begin = None


def _values(nodes: Sequence[torch.fx.Node]) -> Iterator[Span]:
    """Values that no piece can return, such as numbers, lists and handles: from where they are made to their last use.

    One that the graph returns leaves it in one piece.
    """
    place = {node: at for at, node in enumerate(nodes)}
    for at, node in enumerate(nodes):
        if node.op.startswith("call_") and node.users and not _torch.crosses(node):
            last = max(place[user] for user in node.users)
            yield (0 if nodes[last].op == "output" else at), last


def _first_uses_of_views(nodes: Sequence[torch.fx.Node]) -> Iterator[Span]:
    """Views of inputs that stand in front of their first use, with it."""
    place, views = {node: at for at, node in enumerate(nodes)}, set(_input_views(nodes))
    for view in views:
        first, last = place[view], place[min(view.users, default=view)]
        if all(node in views for node in nodes[first:last]):
            yield first, last


@dataclass
class Memory:
    """Who deals with one piece of memory, as positions of nodes.

    Attributes:
        holders: their values lie in it.
        users: they take a value that lies in it.
        writers: those of them that may write to it.
        written, differentiable: whether anything was written to it; whether a value in it requires a gradient.
    """

    holders: list[int] = field(default_factory=list)
    users: list[int] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)
    written: bool = False
    differentiable: bool = False


def _writes(nodes: Sequence[torch.fx.Node]) -> Iterator[Span]:
    """Memory that is written in place: from where it is made to the last write.

    Pieces would save values that another one writes to, and take aliases for separate tensors. What comes from outside
    and requires no gradient, as buffers, may be written by several: that is an input written in place.
    """
    for memory in _memories(nodes).values():
        is_input = nodes[memory.holders[0]].op in ("placeholder", "get_attr")
        if memory.written and memory.users and (memory.differentiable or not is_input):
            yield memory.users[0] if is_input else memory.holders[0], (memory.writers or memory.users)[-1]


def _memories(nodes: Sequence[torch.fx.Node]) -> dict[int, Memory]:
    found: defaultdict[int, Memory] = defaultdict(Memory)
    for at, node in enumerate(nodes):
        for key, tensor in _torch.memories(_torch.example_of(node)):
            memory = found[key]
            memory.holders.append(at)
            memory.written |= _torch.was_written(tensor)
            memory.differentiable |= tensor.requires_grad
        if node.op.startswith("call_"):
            given = {key for arg in node.all_input_nodes for key, _ in _torch.memories(_torch.example_of(arg))}
            for key in given:
                found[key].users.append(at)
                if _may_write(node):
                    found[key].writers.append(at)
    return found


def _may_write(node: torch.fx.Node) -> bool:
    """Whether a node returns an argument or no tensor, as what writes in place does, or says that it writes."""
    value = _torch.example_of(node)
    returns_argument = any(value is _torch.example_of(arg) for arg in node.all_input_nodes)
    return returns_argument or not any(_torch.memories(value)) or _torch.writes_arguments(node.target)
