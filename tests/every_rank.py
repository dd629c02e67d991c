"""What the graphs of each rank send, one rank after another in this process, by groups that send nothing.

The first rank and the last stand for all but in full runs: pieces only get shorter from one to the next.
"""

import contextlib
import re

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.graph import GraphLowering

from tests import ranks
from torchshard import _torch


class Compiled(Exception):
    """All graphs are there; a group that sends nothing need not run them."""


def sent_by_ranks(world, program, partition, **options):
    """The collectives of the graphs, forward and backward, of each rank that is asked, as they must be on all of a group.

    Of each the name, the ranks that take part, counted from the first, and dtype and shape of what is sent; of an
    exchange the dtype alone, as each rank gives other lengths.

    Args:
        world: number of ranks.
        program: called on each rank, in its group: a function, and what it is called with.
        partition: of AOTAutograd's, what parts both graphs.
        options: of torch.compile.
    """

    def backend(graphs):
        def keep(module, _inputs):
            graphs.append([_sent(node) for node in _nodes(module) if _is_collective(node.target)])
            return _stop

        return aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)

    return [_graphs_of(rank, world, program, backend, options) for rank in _asked(world)]


def sent_by_code(world, program, **options):
    """As above, in the order of inductor's code; of a program without gradients, its only graph."""

    def backend(graphs):
        def keep(lowered):
            graphs.append(_sent_by_code(lowered))
            return Module

        def compiled(graph, inputs):
            with _instead(GraphLowering, "compile_to_module", keep):
                return _torch.compile_with_inductor(graph, inputs, {"force_disable_caches": True})

        return compiled

    return [_graphs_of(rank, world, program, backend, options) for rank in _asked(world)]


def _asked(world):
    return range(world) if ranks.all_are_asked else (0, world - 1)


def _graphs_of(rank, world, program, backend, options):
    graphs = []
    torch._dynamo.reset()
    with ranks.fake_ranks(world, rank):
        function, values = program(rank)
        both_at_once = torch._functorch.config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False)
        with both_at_once, contextlib.suppress(Compiled):
            torch.compile(function, backend=backend(graphs), fullgraph=True, **options)(*values)
    return graphs


def _nodes(module):
    """Of a graph, and of those that its operators call."""
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            yield from part.graph.nodes


def _stop(*_values):
    raise Compiled


class Module:
    """What inductor's code would be, as it is loaded."""

    __file__ = __file__
    call = staticmethod(_stop)


@contextlib.contextmanager
def _instead(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _is_collective(target):
    return getattr(target, "namespace", None) == "_c10d_functional" and "wait" not in target._opname


def _sent(node):
    operand, *_, group = node.args
    value = operand.meta["val"]
    return _told(node.target._opname, group, value.dtype, [_length(n) for n in value.shape])


def _sent_by_code(lowered):
    """What inductor's schedule calls, which is what its code calls."""
    code = lowered.codegen()[0].value
    nodes = [part.node for node in lowered.scheduler.nodes for part in node.get_nodes()]
    calls = [node for node in nodes if _is_collective(getattr(node, "op_overload", None))]
    written = re.findall(r"_c10d_functional\.(\w+)\.default\(", code)
    assert [node.op_overload._opname for node in calls] == [name for name in written if "wait" not in name]
    sent = []
    for node in calls:
        operand, group = node.inputs[0], node.constant_args[-1]
        shape = [int(lowered.sizevars.optimization_hint(n)) for n in operand.get_size()]
        sent.append(_told(node.op_overload._opname, group, operand.get_dtype(), shape))
    return sent


def _told(name, group, dtype, shape):
    first, *others = dist.get_process_group_ranks(_torch.group_named(group))
    members = (0, *[rank - first for rank in others])
    return name, members, dtype, None if name == "all_to_all_single" else shape


def _length(n):
    return n if isinstance(n, int) else n.node.hint
