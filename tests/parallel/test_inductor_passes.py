"""Inductor's passes that look for torch's functional collectives find ours: those around products, and those in a row.

The first are joined for NVIDIA GPUs (`torch._inductor.config._micro_pipeline_tp`, with symmetric memory). Here passes run
on graphs of the CPU, which are the same, and what they make is not executed.
"""

import copy
from collections import Counter
from functools import partial
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.utils import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import bucketing, micro_pipeline_tp, post_grad
from torch._inductor.virtualized import V

from tests.older import require
from tests.parallel.llama import Block, Config, block_plan, rotary
from tests.ranks import fake_ranks

KINDS = "c10d_functional.all_gather", "c10d_functional.reduce_scatter", "fused_all_gather", "fused_matmul_reduce"


def counted(run, module, *args):
    """Collectives, and what a pass makes of them, before and after it: of the forward's graph, and of the backward's."""
    found = []

    def compiler(gm, inputs, **_):
        """What inductor does up to its own passes of this kind, and then no code."""
        post_grad.view_to_reshape(gm)
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad.post_grad_passes(gm, is_inference=False)
            made = copy.deepcopy(gm)  # no CPU could run it
            run(made.graph)
        found.append((count(gm.graph), count(made.graph)))
        return make_boxed_func(gm)

    torch.compile(module, fullgraph=True, backend=partial(compile_fx, inner_compile=compiler))(*args).sum().backward()
    torch._dynamo.reset()
    return found


def count(graph):
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return Counter(kind for kind in KINDS for name in names if kind in name)


def join_products(graph):
    with (
        mock.patch("torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group", return_value=True),
        mock.patch("torch.distributed.is_nccl_available", return_value=True),
    ):
        micro_pipeline_tp.micro_pipeline_tp_pass(graph)


def products(library, mesh):
    config = Config(width=64, heads=8)
    block = library.parallelize_module(Block(config), mesh, block_plan("sp", library))
    x = torch.randn(2, 16 // mesh.size(), config.width, requires_grad=True)
    return counted(join_products, block, x, rotary(16, config.head))


def test_products_beside_collectives_are_joined():
    from torch.distributed.tensor import parallel as upstream

    from torchshard import init_device_mesh, parallel

    require("products beside collectives")
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        ours, theirs = products(parallel, mesh), products(upstream, mesh)
    assert ours == theirs
    (before, after), backward = ours
    assert before == {"c10d_functional.all_gather": 2, "c10d_functional.reduce_scatter": 2}
    assert after == {"fused_all_gather": 2, "fused_matmul_reduce": 2}
    assert backward[1]["fused_all_gather"] == 2


def fill_buckets(graph):
    bucketing.bucket_all_gather(graph.owning_module)
    bucketing.bucket_reduce_scatter(graph.owning_module)


class Gathered(nn.Module):
    """Weights that are split, and whole while they are used."""

    def __init__(self, library, mesh):
        super().__init__()
        self.whole, self.terms = [library.Replicate()], [library.Partial("avg")]
        self.weights = nn.ParameterList(
            library.distribute_tensor(torch.randn(rows, 6), mesh, [library.Shard(0)], src_data_rank=None)
            for rows in (6, 6, 6, 5)
        )

    def forward(self, x):
        for weight in self.weights:
            whole = weight.redistribute(placements=self.whole).to_local(grad_placements=self.terms)
            x = nn.functional.linear(x, whole).relu()
        return x


def test_gathers_and_reductions_of_weights_are_joined():
    import torch.distributed.tensor as upstream

    import torchshard

    with fake_ranks(2):
        mesh = torchshard.init_device_mesh("cpu", (2,))
        x = torch.randn(3, 6)
        ours, theirs = (counted(fill_buckets, Gathered(library, mesh), x) for library in (torchshard, upstream))
    assert ours == theirs
    gathers, reductions = ({kind: number} for kind, number in zip(KINDS[:2], (4, 4), strict=True))
    assert [before for before, _ in ours] == [gathers, reductions]
    assert [after for _, after in ours] == [{KINDS[0]: 1}, {KINDS[1]: 1}]
