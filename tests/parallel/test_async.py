"""Inductor's pass for asynchronous tensor parallelism finds the products beside our collectives, and joins them.

It does so for NVIDIA GPUs (`torch._inductor.config._micro_pipeline_tp`, with symmetric memory); here it is run on graphs
of the CPU, which are the same, and what it makes is not executed.
"""

import copy
from collections import Counter
from unittest import mock

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import micro_pipeline_tp

from tests.older import require
from tests.parallel.llama import Block, Config, block_plan, rotary
from tests.ranks import fake_ranks


class Joining(CustomGraphPass):
    """Runs torch's pass, and counts collectives and what it has made of them, graph by graph."""

    def __init__(self):
        self.counted = []

    def __call__(self, graph):
        graph = copy.deepcopy(graph)  # the CPU has no such operators
        before = _names(graph)
        with (
            mock.patch("torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group", return_value=True),
            mock.patch("torch.distributed.is_nccl_available", return_value=True),
        ):
            micro_pipeline_tp.micro_pipeline_tp_pass(graph)
        self.counted.append((before, _names(graph)))

    def uuid(self):
        return None


def _names(graph):
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    kinds = "c10d_functional.all_gather", "c10d_functional.reduce_scatter", "fused_all_gather", "fused_matmul_reduce"
    return Counter(kind for kind in kinds for name in names if kind in name)


def _counted(library, mesh):
    joining, config = Joining(), Config(width=64, heads=8)
    block = library.parallelize_module(Block(config), mesh, block_plan("sp", library))
    x = torch.randn(2, 16 // mesh.size(), config.width, requires_grad=True)
    with torch._inductor.config.patch(post_grad_custom_post_pass=joining, force_disable_caches=True):
        torch.compile(block, fullgraph=True)(x, rotary(16, config.head)).sum().backward()
    torch._dynamo.reset()
    return joining.counted


def test_products_beside_collectives_are_joined():
    from torch.distributed.tensor import parallel as upstream

    from torchshard import init_device_mesh, parallel

    require("products beside collectives")
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        ours, theirs = _counted(parallel, mesh), _counted(upstream, mesh)
    assert ours == theirs
    (before, after), backward = ours
    assert before == {"c10d_functional.all_gather": 2, "c10d_functional.reduce_scatter": 2}
    assert after == {"fused_all_gather": 2, "fused_matmul_reduce": 2}
    assert backward[1]["fused_all_gather"] == 2
