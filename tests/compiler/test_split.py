"""Where graphs are cut, and that the pieces make the whole."""

import copy
import os
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from tests.compiler.models import batch, loss_of, make
from tests.inductor_cache import own_cache
from tests.models import GPT, GPTConfig
from torchshard.compiler import split_backend


def _gradients(model, compiled, name, size):
    x, y = batch(name, size)
    model.zero_grad()
    loss_of(compiled(x), y).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("inner", ["aot_eager", "eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["gpt", "tied gpt", "normed", "both", "checkpoint"])
def test_pieces_make_the_whole(name, inner):
    model = make(name)
    reference = copy.deepcopy(model)
    backend = split_backend(0.02, 0.005, inner=inner)
    compiled = torch.compile(model, backend=backend)
    for size in (8, 8, 4, 6):
        expected = _gradients(reference, reference, name, size)
        torch.testing.assert_close(_gradients(model, compiled, name, size), expected)
    if name in ("gpt", "tied gpt", "checkpoint"):
        assert len(backend.last_plan.pieces) > 1


def _plan(model, x, **sizes):
    backend = split_backend(inner="eager", **sizes)
    torch.compile(model, backend=backend)(x)
    return backend.last_plan


def test_the_plan_of_a_gpt():
    plan = _plan(GPT(GPTConfig(tied=True)), batch("gpt", 2)[0], bucket_cap_mb=0.03, first_bucket_mb=0.01)
    assert_expected_inline(
        str(plan),
        """\
bucket    parameters                                     bytes     operators    extra operators    extra bytes
--------  ---------------------------------------------  --------  -----------  -----------------  -------------
0         norm.weight .. blocks.1.down.bias (4)          16.4 KiB  4            0                  0 B
1         blocks.1.up.weight .. blocks.1.qkv.bias (8)    33.2 KiB  14           0                  0 B
2         blocks.1.norm1.weight .. blocks.0.up.bias (6)  32.9 KiB  5            0                  0 B
3         blocks.0.norm2.weight .. tokens.weight (10)    51.0 KiB  17           0                  0 B""",
    )


def test_scalars_and_sizes_cross_pieces():
    class Scalars(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            n = x.shape[0] * 2
            y = self.a(x)
            return self.b(y.repeat(2, 1)[: n - 1]) / n, n

    model = Scalars()
    reference = copy.deepcopy(model)
    backend = split_backend(0, 0, inner="aot_eager")
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for size in (3, 5):
        x = torch.randn(size, 8)
        (ours, n), (theirs, m) = compiled(x), reference(x)
        torch.testing.assert_close(ours, theirs)
        assert n == m == 2 * size
    assert len(backend.last_plan.pieces) == 2


class Lists(nn.Module):
    """Weights that come in lists, keywords and methods."""

    def __init__(self):
        super().__init__()
        self.w = nn.ParameterList(torch.randn(8, 8) for _ in range(4))
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, x):
        x = torch.addmm(input=x, mat1=x, mat2=self.w[0])
        x = x @ torch.cat([self.w[1], self.w[2]]).view(2, 8, 8).sum(0)
        return x.matmul(self.w[3].t()) @ self.frozen


def test_weights_count_wherever_they_enter():
    plan = _plan(Lists(), torch.randn(2, 8), bucket_cap_mb=0, first_bucket_mb=0)
    assert [piece.params for piece in plan.pieces] == [("w.3",), ("w.1", "w.2"), ("w.0",)]
    assert [bucket.nbytes for bucket in plan.buckets] == [256, 512, 256]


def test_a_piece_without_outputs_is_extended():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

        def forward(self, x):
            y = x * self.a
            with torch.no_grad():
                x.mul_(2).add_(self.b)
            return y

    plan = _plan(InPlace(), torch.randn(8), bucket_cap_mb=0, first_bucket_mb=0)
    assert sum(piece.extra_nodes for piece in plan.pieces) > 0


def test_a_model_without_parameters_is_one_piece():
    assert len(_plan(nn.ReLU(), torch.ones(3)).pieces) == 1


def test_mistakes():
    with pytest.raises(ValueError, match="bucket_cap_mb=-1 is no size"):
        split_backend(bucket_cap_mb=-1)
    with pytest.raises(ValueError, match="inner='nothing' is no compiler"):
        split_backend(inner="nothing")


def test_caches_keep_pieces(tmp_path):
    """Without biases nothing is left for inductor to generate."""
    module, x = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))), torch.ones(2, 8)
    wanted = torch.autograd.grad(module(x).sum(), [*module.parameters()])
    with mock.patch.dict(os.environ, own_cache(str(tmp_path))):
        for kind in ("saved", "hit"):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            loss = torch.compile(module, backend=split_backend(0, 0))(x).sum()
            torch.testing.assert_close(torch.autograd.grad(loss, [*module.parameters()]), wanted)
            assert torch._dynamo.utils.counters["aot_autograd"][f"autograd_cache_{kind}"] == 3
