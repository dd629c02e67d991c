"""What crosses the cuts: modes of autograd, scalars, sizes, higher-order operators; and what is left behind."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as over_rows

from torchshard.compiler import split_backend


class Layers(nn.Module):
    """Layers a, b, c."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))


class WithoutGradients(Layers):
    def forward(self, x):
        x = self.a(x)
        with torch.no_grad():
            y = self.b(x).relu()
            y = y + self.c(y)
        return self.b(x) + self.c(y)


class Autocast(Layers):
    def forward(self, x):
        x = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.c(self.b(x))
        return x.float()


class Cond(Layers):
    def forward(self, x):
        x = self.a(x)
        x = torch.cond(x.sum() > 0, lambda t: self.b(t).cos(), lambda t: self.b(t).sin(), (x,))
        return self.c(x)


class Map(Layers):
    def forward(self, x):
        return self.c(over_rows(lambda row, w: F.linear(row, w), self.a(x), self.b.weight))


class Scalars(Layers):
    """A number that is read from a tensor, a constant, and a size go across and out."""

    def forward(self, x):
        n = (x[0, 0] > 0).to(torch.int64).item()
        torch._check(n >= 0)
        torch._check(n < 2)
        x = self.b(self.a(x) * (n + 1)) + n
        return self.c(x) * 2.5, n, 3, x.shape[0]


class Packed(Layers):
    """Views and a list of results, one of them an input."""

    def forward(self, x):
        left, right = self.a(x).chunk(2, 1)
        y = self.b(torch.cat([right, left], 1))
        return [self.c(y.t().contiguous().t()), x, (y[:, ::2], None)]


class Known(Layers):
    """A size that a layer makes known after it was taken."""

    def forward(self, x):
        k = x.shape[1]
        y = self.a(x).reshape(x.shape[0] * k)
        return self.c(self.b(y.view(x.shape[0], k)) / k)


def _run(model, module):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    output = model(x)
    leaves = torch.utils._pytree.tree_leaves(output)
    sum(leaf.sum() for leaf in leaves if isinstance(leaf, torch.Tensor)).backward()
    return leaves, [p.grad for p in module.parameters()]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("make", [WithoutGradients, Autocast, Cond, Map, Scalars, Packed])
def test_the_pieces_make_the_whole(make, inner):
    module = make()
    reference = copy.deepcopy(module)
    backend = split_backend(0, 0, inner=inner)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        for _ in range(2):
            module.zero_grad()
            reference.zero_grad()
            torch.testing.assert_close(_run(compiled, module), _run(reference, reference))
    assert len(backend.last_plan.pieces) == 3


def test_sizes_that_become_known():
    module = Known()
    reference = copy.deepcopy(module)
    backend = split_backend(0, 0, inner="aot_eager")
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    torch.testing.assert_close(_run(compiled, module), _run(reference, reference))
    assert len(backend.last_plan.pieces) == 3


def test_a_compiler_that_fails_leaves_nothing_behind():
    contexts, afterwards = [], []

    def failing(graph, inputs):
        contexts.append(torch._guards.TracingContext.get())
        if len(contexts) == 2:
            raise ValueError("on purpose")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def backend(graph, inputs):
        whole = torch._guards.TracingContext.get()
        try:
            return split_backend(0, 0, inner=failing)(graph, inputs)
        finally:
            afterwards.append(torch._guards.TracingContext.get() is whole)
            afterwards.append(whole.fw_metadata is None and not whole.fake_mode.allow_non_fake_inputs)

    with pytest.raises(Exception, match="on purpose") as kept:
        torch.compile(WithoutGradients(), backend=backend)(torch.ones(2, 8))
    assert kept.tb  # and with it the frames of the failure
    assert torch.is_grad_enabled()
    assert afterwards == [True, True]
    assert contexts[0] is not contexts[1]  # a backward that is compiled later finds what its own forward has noted


def test_pieces_say_why_they_are_pieces():
    seen = []

    def compiler(graph, inputs):
        seen.append((graph.compile_subgraph_reason.reason, graph.meta, [n.op for n in graph.graph.nodes][-1]))
        return graph.forward

    wholes = []

    def backend(graph, inputs):
        wholes.append(graph.meta)
        return split_backend(0, 0, inner=compiler)(graph, inputs)

    torch.compile(Packed(), backend=backend)(torch.ones(2, 8))
    assert len(seen) == 3
    assert all("intentional graph-break" in reason for reason, *_ in seen)
    assert all(meta is wholes[0] for _, meta, _ in seen)


def test_hooks_on_saved_tensors_run_at_run_time_only():
    packed = []

    def pack(x):
        packed.append(type(x))
        return x

    backend = split_backend(0, 0, inner="aot_eager")
    compiled = torch.compile(Packed(), backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        compiled(torch.ones(2, 8))[0].sum().backward()
    assert packed
    assert set(packed) <= {torch.Tensor, nn.Parameter}
