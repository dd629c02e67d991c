"""What most ranks need, imported once in the process that they are forked from."""

import expecttest  # noqa: F401
import pytest  # noqa: F401
import sympy.physics
import sympy.tensor.tensor  # noqa: F401
import torch._inductor.compile_fx
import torch._inductor.fx_passes.joint_graph
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.experimental
import torch.utils.cpp_extension

import torchshard
import torchshard.compiler.backend
import torchshard.ddp
import torchshard.parallel
import torchshard.state_dict

for name in torchshard.__all__:
    getattr(torchshard, name)


@torch.no_grad()  # a backward would start threads of autograd, which a fork loses
def _compile() -> None:
    """Fill what torch fills when first it compiles: tables of rules, and of patterns."""
    from torch._inductor.compile_fx import compile_fx

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    torch.compile(model, backend=lambda g, xs: compile_fx(g, xs, inner_compile=lambda g, *_, **__: g))(torch.ones(2, 4))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


_compile()
