"""Where graphs are cut, beside torch's DDPOptimizer on the same graph."""

import logging

import pytest
import torch
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer

from tests.compiler.shapes import SHAPES
from torchshard import _torch
from torchshard.buckets import BucketPolicy
from torchshard.compiler import split_backend
from torchshard.compiler.split import SplitBackend

CAPS = [(1_000, 200), (3_000, 1_000), (9_000, 3_000), (20_000, 20_000), (100_000, 1_000), (25 << 20, 1 << 20)]
"""Bytes: of a bucket, and of the first."""

MORE = {"recurrent", "tied gpt"}
"""torch counts a parameter at each use; here it counts at its first, where its gradient is complete."""


def _compiler(graph, inputs):
    return graph.forward


def _both(model, *inputs, **keywords):
    """For each cap, the names in each bucket: torch's and ours."""
    found = {}

    def backend(graph, inputs):
        names = {node.target: _torch.source_name(node) for node in graph.graph.find_nodes(op="placeholder")}
        for cap, first in CAPS:
            theirs = DDPOptimizer(cap, _compiler, first)
            theirs.compile_fn(graph, inputs)
            ours = SplitBackend(_compiler, BucketPolicy(cap, first))
            ours(graph, inputs)
            split = [tuple(names[name] for name in bucket.params) for bucket in reversed(theirs.buckets)]
            found[cap, first] = split, [piece.params for piece in ours.last_plan.pieces]
        return graph.forward

    torch.compile(model, backend=backend, fullgraph=True)(*inputs, **keywords)
    return found


@pytest.fixture(autouse=True)
def quiet():
    log = logging.getLogger("torch._dynamo.backends.distributed")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - MORE))
def test_the_same_buckets_as_torch(name):
    make, inputs = SHAPES[name]
    found = _both(make(), inputs())
    for caps, (theirs, ours) in found.items():
        assert ours == theirs, caps
    assert len(found[CAPS[0]][1]) > 1


@pytest.mark.parametrize("name", sorted(MORE))
def test_a_weight_with_several_uses_counts_once(name):
    make, inputs = SHAPES[name]
    model = make()
    theirs, ours = _both(model, inputs())[CAPS[0]]
    named = [param for bucket in ours for param in bucket]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())
    assert sum(map(len, theirs)) > len(named)
    if name == "tied gpt":  # the head's use comes last, but only the embedding's completes the gradient
        assert (theirs[0], ours[-1]) == (("tokens.weight",), ("tokens.weight",))


class Elsewhere(nn.Module):
    """Weights that come in keywords, lists and as arguments of methods."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(16, 16)) for _ in range(4))

    def forward(self, x):
        x = torch.addmm(x, mat1=x, mat2=self.a)
        x = x @ torch.cat([self.b, x.new_zeros(16, 16)], 1)[:, :16]
        return x.matmul(self.c) + self.d


def test_weights_count_wherever_they_enter():
    theirs, ours = _both(Elsewhere(), torch.randn(16, 16))[CAPS[0]]
    assert ours == [("d",), ("c",), ("b",), ("a",)]
    assert sum(theirs, ()) == ("d",)  # torch looks at positional arguments of functions only


class Measured(nn.Module):
    """Weights that are looked at before they are used."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x):
        size = sum(layer.weight.detach().abs().mean() for layer in self.layers)
        with torch.no_grad():
            size = size + sum(layer.weight.sum() for layer in self.layers)
        for layer in self.layers:
            x = layer(x)
        return x / size, torch.stack([(layer.weight > 0).any() for layer in self.layers])


def test_uses_without_a_gradient_do_not_count():
    _, ours = _both(Measured(), torch.randn(16, 16))[CAPS[0]]
    assert ours == [(f"layers.{k}.weight",) for k in (3, 2, 1, 0)]


def test_parameters_that_torch_ignores_do_not_count():
    model = SHAPES["mlp"][0]()
    for name in ("10.weight", "2.weight"):
        model.get_parameter(name)._ddp_ignored = True  # what torch's wrapper leaves
    theirs, ours = _both(model, torch.randn(4, 16))[CAPS[0]]
    assert not {"10.weight", "2.weight"} & set(sum(ours, ()))
    assert {"10.weight", "2.weight"} < set(sum(theirs, ()))  # the mark is lost on what torch looks at


def test_nothing_is_cut_where_there_is_no_backward():
    backend = split_backend(0, 0, inner="eager")
    with torch.no_grad():
        torch.compile(SHAPES["mlp"][0](), backend=backend)(torch.randn(4, 16))
    assert [len(piece.params) for piece in backend.last_plan.pieces] == [12]


def test_a_plan_for_tools(monkeypatch):
    """The table goes to the log at level debug, and to torch's structured trace."""
    seen = []
    monkeypatch.setattr(_torch, "trace_artifact", lambda name, text: seen.append((name, text())))
    backend = split_backend(0, 0, inner="eager")
    torch.compile(SHAPES["bare"][0](), backend=backend)(torch.randn(4, 16))
    assert seen == [("torchshard_pieces", str(backend.last_plan))]
