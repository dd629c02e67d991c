"""All-reduces whose results a graph only returns, joined into buckets: for backwards that compiled autograd traces.

There each gradient is averaged by a functional collective of its own, and waited for at once. This pass has one
collective for a bucket of them, where its last gradient is made, and waits at the end of the graph.
"""

import operator
from collections.abc import Iterable

import torch

from torchshard import _torch
from torchshard.buckets import BucketPolicy, Gradient, plan_buckets
from torchshard.compiler.rewrite import source_hash

_collectives = _torch.functional_collectives()
_REDUCE, _JOINED, _WAIT = (
    _collectives.all_reduce.default,
    _collectives.all_reduce_coalesced.default,
    _collectives.wait_tensor.default,
)


class JoinReductions:
    """Rewrites graphs; see above.

    Args:
        policy: sizes of buckets.

    Attributes:
        key: all that the result depends on, besides the graph; for inductor's cache.
        joined: how many collectives were joined into each bucket of the last graph.
    """

    def __init__(self, policy: BucketPolicy) -> None:
        self._policy = policy
        self.key: object = (source_hash(__file__), policy.cap, policy.first, policy.caps)
        self.joined: tuple[int, ...] = ()

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Join what can be joined, in the graph's order."""
        reductions = _returned(graph)
        plan = plan_buckets((_gradient(k, node) for k, node in enumerate(reductions)), self._policy)
        self.joined = tuple(len(bucket.gradients) for bucket in plan)
        late = _after(graph, reductions)
        for bucket in plan:
            _join(graph, [reductions[g.index] for g in bucket.gradients])
        output = graph.output_node()
        for node in late:
            output.prepend(node)


def _returned(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The all-reduces that are waited for, and on which no other collective depends."""
    needed: set[torch.fx.Node] = set()
    found = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.users):
            needed.add(node)
        elif node.target is _REDUCE and [user.target for user in node.users] == [_WAIT]:
            found.append(node)
        if getattr(node.target, "namespace", None) == "_c10d_functional" and node.target is not _WAIT:
            needed.add(node)
    return found[::-1]


def _gradient(number: int, node: torch.fx.Node) -> Gradient:
    value, how = node.meta["val"], node.args[1:]
    return Gradient(number, node.name, value.numel() * value.element_size(), (value.dtype, value.device, *how))


def _after(graph: torch.fx.Graph, reductions: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """What depends on the results, in the graph's order, less the waiting itself."""
    reached = {wait for node in reductions for wait in node.users}
    waits = set(reached)
    for node in graph.nodes:
        if node.op != "output" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return [node for node in graph.nodes if node in reached and node not in waits]


def _join(graph: torch.fx.Graph, nodes: list[torch.fx.Node]) -> None:
    """One collective where the last one was; its parts are waited for at the end."""
    output, how = graph.output_node(), nodes[0].args[1:]
    with graph.inserting_before(nodes[-1]):
        whole = graph.call_function(_JOINED, ([node.args[0] for node in nodes], *how))
    with graph.inserting_before(output):
        parts = [graph.call_function(operator.getitem, (whole, k)) for k in range(len(nodes))]
        waits = [graph.call_function(_WAIT, (part,)) for part in parts]
    for node, wait in zip(nodes, waits, strict=True):
        (before,) = node.users
        before.replace_all_uses_with(wait)
        graph.erase_node(before)
        graph.erase_node(node)
