"""What torch needs to compile, imported and filled once in the process that others are forked from."""

import sympy.physics
import sympy.tensor.tensor  # noqa: F401
import torch._inductor.compile_fx
import torch._inductor.fx_passes.joint_graph
import torch.utils.cpp_extension


@torch.no_grad()  # a backward would start threads of autograd, which a fork loses
def _compile() -> None:
    """Fill what torch fills when first it compiles: tables of rules, and of patterns."""
    from torch._inductor.compile_fx import compile_fx

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    torch.compile(model, backend=lambda g, xs: compile_fx(g, xs, inner_compile=lambda g, *_, **__: g))(torch.ones(2, 4))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


_compile()
