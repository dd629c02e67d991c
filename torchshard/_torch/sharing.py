"""AOTAutograd: gradients of wrapper subclasses that would share memory with another, or with what a graph is given."""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from torchshard._torch.partitioning import count_written_parts, expect_gradients_of_written, fill_unused_results
from torchshard._torch.recomputing import FORWARD, LATER, PASS, change_joint_graphs


def mend_graphs() -> None:
    """Tell torch, once, what it has to know of wrapper subclasses in graphs: each of these says of what."""
    fill_unused_results()
    expect_gradients_of_written()
    count_written_parts()
    part_gradients()


@functools.cache
def part_gradients() -> bool:
    """Have a compiled backward give each gradient of a wrapper subclass memory of its own; whether that can be told.

    Autograd takes what comes first for a leaf as its `.grad`, to which it adds later, if nobody else refers to that
    tensor; else a copy. A graph returns one part for several gradients (of both terms of a sum), or that of a gradient
    which came; but each is wrapped anew, and nobody else refers to a wrapper. So what is added to one `.grad` reaches
    the other.
    (torch._functorch._aot_autograd.descriptors, 2.11-2.15)
    """
    return change_joint_graphs(_copy_shared)


def _copy_shared(graph: torch.fx.Graph) -> None:
    """Of a joint graph, copy each gradient that lies in memory of forward, of an input, or of a gradient before it."""
    (output,) = graph.find_nodes(op="output")
    results: list[Any] = [*output.args[0]]
    given = (node for node in graph.nodes if node.op == "placeholder" or node.meta.get(PASS) == FORWARD)
    taken = {place for node in given for place in _memory(node)}
    for k, what in enumerate(output.meta.get("desc", ())):
        node = results[k]
        if not isinstance(node, torch.fx.Node) or not _is_gradient_of_part(what):
            continue
        value: torch.Tensor = node.meta["val"]
        places = {*_memory(node)}
        if not taken.isdisjoint(places) and not _is_expanded(value):
            with graph.inserting_before(output):
                results[k] = graph.call_function(torch.ops.aten.clone.default, (node,))
            results[k].meta.update({"val": value.clone(), PASS: LATER})
        taken |= places
    output.args = (type(output.args[0])(results), *output.args[1:])


def _is_gradient_of_part(what: Any) -> bool:
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, SubclassGetAttrAOTOutput

    is_part = isinstance(what, SubclassGetAttrAOTOutput)
    while isinstance(what, SubclassGetAttrAOTOutput):
        what = what.base
    return is_part and isinstance(what, GradAOTOutput)


def _memory(node: torch.fx.Node) -> Iterator[Any]:
    from torch.multiprocessing.reductions import StorageWeakRef

    x = node.meta.get("val")
    for value in x if isinstance(x, (list, tuple)) else (x,):
        if isinstance(value, torch.Tensor):
            yield StorageWeakRef(value.untyped_storage())


def _is_expanded(x: torch.Tensor) -> bool:
    """Whether elements lie on one another: of such a gradient autograd takes a copy."""
    return any(type(step) is int and step == 0 and n != 1 for n, step in zip(x.shape, x.stride(), strict=True))
