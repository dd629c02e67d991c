"""What the graphs of each rank send, one rank after another in this process, by groups that send nothing."""

import contextlib

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchshard import _torch


class Compiled(Exception):
    """Both graphs are there; a group that sends nothing need not run them."""


def sent_by_ranks(world, program, partition, **options):
    """The collectives of the graphs, forward and backward, of each rank, as it must hold for all members of a group.

    Of each the name, the ranks that take part, counted from the first, and dtype and shape of what is sent; of an
    exchange the dtype alone, as each rank gives other lengths.

    Args:
        program: called on each rank, in its group: a function, and what it is called with.
        partition: of AOTAutograd's, what parts both graphs.
        options: of torch.compile.
    """
    return [_sent_by(rank, world, program, partition, options) for rank in range(world)]


def _sent_by(rank, world, program, partition, options):
    graphs = []

    def keep(module, _inputs):
        graphs.append([_sent(node) for node in module.graph.nodes if _is_sent(node)])
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
    return graphs


def _is_sent(node):
    return getattr(node.target, "namespace", None) == "_c10d_functional" and "wait" not in node.target._opname


def _sent(node):
    operand, *_, group = node.args
    name, value = node.target._opname, operand.meta["val"]
    first, *others = dist.get_process_group_ranks(_torch.group_named(group))
    members = (0, *[rank - first for rank in others])
    return name, members, value.dtype, None if name == "all_to_all_single" else [_length(n) for n in value.shape]


def _length(n):
    return n if isinstance(n, int) else n.node.hint
