"""What torch needs to compile, imported and filled once in the process that others are forked from."""

import sympy.physics
import sympy.tensor.tensor  # noqa: F401
import torch._functorch.partitioners
import torch._inductor.compile_fx
import torch.utils.cpp_extension


@torch.no_grad()  # a backward would start threads of autograd, which a fork loses, as it does those of inductor
def _compile() -> None:
    """Fill what torch fills when first it compiles: tables of rules and of patterns, and headers that are read at once."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    alone = torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False)
    with alone, torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(model)(torch.ones(2, 4))
    torch._functorch.partitioners.get_default_op_list()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


_compile()
