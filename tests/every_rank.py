"""What the graphs of each rank send, one rank after another in this process, by groups that send nothing."""

import contextlib

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore


class Compiled(Exception):
    """Both graphs are there; a group that sends nothing need not run them."""


def sent_by_ranks(world, program, partition, **options):
    """The collectives of the graphs, forward and backward, of each rank.

    Args:
        program: called on each rank, in its group: a function, and what it is called with.
        partition: of AOTAutograd's, what parts both graphs.
        options: of torch.compile.
    """
    return [_sent_by(rank, world, program, partition, options) for rank in range(world)]


def _sent_by(rank, world, program, partition, options):
    graphs = []

    def keep(module, _inputs):
        graphs.append(module.graph)
        return stop

    def stop(*_values):
        raise Compiled

    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        function, values = program(rank)
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
        both_at_once = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        with both_at_once, contextlib.suppress(Compiled):
            torch.compile(function, backend=backend, fullgraph=True, **options)(*values)
    finally:
        dist.destroy_process_group()
    return [[node.target._opname for node in graph.nodes if _is_sent(node)] for graph in graphs]


def _is_sent(node):
    return getattr(node.target, "namespace", None) == "_c10d_functional" and "wait" not in node.target._opname
