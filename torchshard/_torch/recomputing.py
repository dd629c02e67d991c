"""What checkpoints compute once more in backward: what that sends, each rank sends, and in the same place."""

import functools
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

PASS, FORWARD, LATER = "partitioner_tag", "is_forward", "is_backward"  # what AOTAutograd writes to nodes
RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_CHECKPOINT, _NUMBER, _READ, _NEVER = "ac_graph_id", "seq_nr", "read_by_gradients", 1 << 62


def recomputed_region() -> tuple[Any, Any]:
    """Which checkpointed region of a graph is recorded now, and what it keeps (torch.fx.traceback, 2.11-2.15)."""
    from torch.fx import traceback

    return traceback.current_meta.get(_CHECKPOINT), traceback.current_meta.get("recompute")


def change_joint_graphs(change: Callable[[torch.fx.Graph], None]) -> bool:
    """Have each joint graph changed as soon as it is traced; whether torch can be told, beside what it was told before.

    (torch._functorch._aot_autograd.graph_compile.aot_dispatch_autograd_graph, 2.11-2.15)
    """
    from torch._functorch._aot_autograd import graph_compile

    capture = getattr(graph_compile, "aot_dispatch_autograd_graph", None)
    if capture is None:
        return False

    @functools.wraps(capture)
    def captured(*args: Any, **kwargs: Any) -> Any:
        made = capture(*args, **kwargs)
        for part in made if isinstance(made, tuple) else (made,):
            if isinstance(part, torch.fx.GraphModule):
                change(part.graph)
                part.recompile()
        return made

    setattr(graph_compile, capture.__name__, captured)
    return True


def mark_read(roots: list[Any]) -> None:
    """Mark what checkpoints received before the last of their operators that saves tensors for its gradient.

    Asked of the autograd nodes of whole tensors, the same on each rank, while a graph is traced: a rank without
    elements may read nothing. What is received after that need not be received once more.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    nodes = [] if mode is None else [node for node in mode.tracer.graph.nodes if _CHECKPOINT in node.meta]
    received = [node for node in nodes if node.target is _wait()]
    if not received:
        return
    last = dict[int, int]()
    for node in nodes:
        region = node.meta[_CHECKPOINT]
        last[region] = max(last.get(region, 0), node.meta.get(_NUMBER, 0))
    saving = {node._sequence_nr() for node in _behind(roots) if _saves(node)}
    for node in received:
        first = node.meta.get(_NUMBER, 0)
        node.meta[_READ] = any(first <= number <= last[node.meta[_CHECKPOINT]] for number in saving)


def _behind(roots: list[Any]) -> Iterator[Any]:
    seen, reached = set[Any](), list(roots)
    while reached:
        node = reached.pop()
        if node is not None and node not in seen:
            seen.add(node)
            reached += [function for function, _ in node.next_functions]
            yield node


def _saves(node: Any) -> bool:
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return bool(node._raw_saved_tensors)
    return any(name.startswith("_raw_saved_") for name in dir(node))


def read_alike(graph: torch.fx.Graph) -> None:
    """Of a joint graph as it was traced, before inductor finds out what is zero or empty here.

    All of forward is marked as such, but of backward not what an autograd.Function traced. And what a checkpoint sends
    once more, up to the last that gradients of the checkpoint read, is read where its backward begins, whatever becomes
    of other nodes that read it: so each rank sends it, and there.
    """
    forward = [node for node in graph.nodes if node.meta.get(PASS) == FORWARD]
    backward = [n for n in graph.nodes if n.op == "call_function" and n.meta.get(PASS) in (None, LATER)]
    if not forward or not backward:
        return
    for node in backward:
        node.meta[PASS] = LATER
    waits = dict[int, list[torch.fx.Node]]()
    for node in forward:
        if node.target is _wait() and (region := _region(node)) is not None:
            waits.setdefault(region, []).append(node)
    for region in sorted(waits, reverse=True):
        place = _place(region, waits[region][-1], forward, backward)
        while waits[region] and not waits[region][-1].meta.get(_READ, True):
            waits[region].pop()
        if place is not None:
            with graph.inserting_before(place):
                for node in waits[region]:
                    reader = graph.call_function(_wait(), (node,))
                    reader.meta.update({"val": node.meta.get("val"), PASS: LATER})


def _place(
    region: int, received: torch.fx.Node, forward: list[torch.fx.Node], backward: list[torch.fx.Node]
) -> torch.fx.Node | None:
    """Where the backward of a checkpoint begins at the latest, in the same place among collectives on each rank.

    What ranks record beside collectives differs: so this is behind all that is sent backward for operators from the
    next on that sent forward, and before what is sent between operators, as for the sum of two gradients.
    """
    end = max(node.meta.get(_NUMBER, 0) for node in forward)
    others = (node for node in forward[forward.index(received) + 1 :] if node.meta.get(_CHECKPOINT) != region)
    behind = next((node.meta.get(_NUMBER, _NEVER) for node in others if is_collective(node)), _NEVER)
    place = None
    for node in backward:
        number = node.meta.get(_NUMBER, _NEVER)
        if number < behind:
            return place or node
        if is_collective(node):
            place = None if number < end else place or node
    return place


def save_received(graph: torch.fx.Graph, later: Collection[torch.fx.Node]) -> None:
    """Save what a checkpoint made of what it received, where that is read before it is received once more, or outside.

    As eager mode does. So no node but those of `read_alike` decides what is sent once more, and when.
    """
    _save_each_of_several(graph)
    order = {node: place for place, node in enumerate(graph.nodes)}
    again = dict[torch.fx.Node, int]()  # what is received once more, and where in backward
    last = dict[torch.fx.Node, torch.fx.Node]()  # the last that a node was made of
    for node in graph.nodes:
        given = node.all_input_nodes[:1]
        if node in later:
            if node.target is _wait() and given[0].target is _wait() and given[0] not in later:
                again[given[0]] = order[node]
                given[0].meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        elif (region := _region(node)) is not None:
            of = [last[other] for other in node.all_input_nodes if other in last and _region(other) == region]
            of += [node] if node.target is _wait() else []
            if of:
                last[node] = max(of, key=order.__getitem__)

    def follows(user: torch.fx.Node, node: torch.fx.Node) -> bool:
        if user in later:
            return order[user] >= again.get(last[node], _NEVER)
        saved = user.meta.get("recompute") == CheckpointPolicy.MUST_SAVE and not _is_view(user)
        return user.op == "output" or saved or _region(user) == _region(node)

    for node in reversed(last):
        others = [user for user in node.users if not follows(user, node)]
        if others and node in again:
            with graph.inserting_after(node):
                kept = graph.call_function(_wait(), (node,))
            kept.meta.update({"val": node.meta.get("val"), PASS: FORWARD, "recompute": CheckpointPolicy.MUST_SAVE})
            for user in others:
                user.replace_input_with(node, kept)
        elif isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if others else node.meta["recompute"]
        else:  # several, of which each is a node of its own
            for user in others:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _save_each_of_several(graph: torch.fx.Graph) -> None:
    """Where torch says to save the parts of a split as one, because several checkpoints read them, and fails to."""
    for node in graph.nodes:
        told = node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE and node.meta.get(PASS) == FORWARD
        again = [user for user in node.users if user.meta.get("recompute") in RECOMPUTED] if told else []
        if again and isinstance(node.meta.get("val"), (list, tuple)):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            for user in again:
                if _region(user) != _region(node):
                    user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def need_forward(graph: torch.fx.Graph, found: Any) -> None:
    """Have all that is to be saved count as needed forward, of what torch has found of a joint graph (its NodeInfo).

    It saves nothing else for being told to: not what a rank whose terms are zeros reads in backward only.
    """
    if not any(map(is_collective, graph.nodes)):
        return
    for node in [*found.unclaimed_nodes]:
        if node.meta.get(PASS) == FORWARD and node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
            found.unclaimed_nodes.discard(node)
            found._required_fw_nodes.add(node)
    needed = (node for node in graph.nodes if found.is_required_fw(node))
    found.fw_order.update({node: place for place, node in enumerate(needed)})


def is_collective(node: torch.fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def _wait() -> Any:
    return torch.ops._c10d_functional.wait_tensor.default


def _region(node: torch.fx.Node) -> int | None:
    """The checkpoint that computes this once more, if one does; also of a part of several results."""
    if node.target is operator.getitem and "recompute" not in node.meta:
        return _region(node.all_input_nodes[0])
    if node.meta.get(PASS) == FORWARD and node.meta.get("recompute") in RECOMPUTED:
        return int(node.meta.get(_CHECKPOINT, -1))
    return None


def _is_view(node: torch.fx.Node) -> bool:
    """Whether what is saved is not this, but what it is a view of."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
