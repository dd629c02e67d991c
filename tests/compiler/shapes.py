"""Models of many shapes, with inputs for each: what plans and traces are compared on."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models import GPT, GPTConfig, mlp


class ConvNet(nn.Module):
    """Convolutions with batch norm, a residual connection, pooling."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = x + self.b(self.a(x).relu())
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Branches(nn.Module):
    """Two branches that join; one of them is longer."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.join = mlp(16, 2), mlp(16, 5), nn.Bilinear(16, 16, 8)

    def forward(self, x):
        return self.join(self.left(x), self.right(x))


class Bare(nn.Module):
    """Parameters without layers, used by functions and by methods."""

    def __init__(self):
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(16, 16)) for _ in range(5))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for w in self.w:
            x = torch.tanh(x @ w.t())
        return x * self.scale


class Recurrent(nn.Module):
    """A cell applied several times: one weight, many uses."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = torch.zeros_like(x)
        for _ in range(3):
            h = self.cell(x, h)
        return self.head(h)


class Tagged(nn.Module):
    """Embeddings summed in bags, a frozen layer in the middle, an unused one."""

    def __init__(self):
        super().__init__()
        self.bags = nn.EmbeddingBag(64, 16, mode="sum")
        self.frozen, self.unused = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16)
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 4)

    def forward(self, tokens):
        return self.head(self.norm(self.frozen(self.bags(tokens))))


class Mixture(nn.Module):
    """Experts, all of them computed and weighed."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 3), nn.ModuleList(mlp(16, 2) for _ in range(3))

    def forward(self, x):
        weight = self.gate(x).softmax(-1)
        return sum(weight[:, k : k + 1] * expert(x) for k, expert in enumerate(self.experts))


class MixedTypes(nn.Module):
    """Half of it in double precision, half in bfloat16."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16).double(), nn.Linear(16, 16).bfloat16()

    def forward(self, x):
        return self.b(self.a(x.double()).bfloat16()).float()


class Checkpointed(nn.Module):
    """Two layers whose values are computed again in the backward: a higher-order operator in the graph."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = mlp(16, 2), mlp(16, 2), nn.Linear(16, 4)

    def forward(self, x):
        x = checkpoint(self.a, x, use_reentrant=False)
        return self.c(checkpoint(self.b, x, use_reentrant=False))


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)


def _tokens(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


def _values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


SHAPES = {
    "mlp": (lambda: mlp(16, 6), lambda: _values(4, 16)),
    "wide": (lambda: nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 16)), lambda: _values(4, 16)),
    "gpt": (lambda: GPT(GPTConfig()), lambda: _tokens(256, 2, 8)),
    "convolutions": (ConvNet, lambda: _values(2, 3, 8, 8)),
    "encoder": (encoder, lambda: _values(2, 4, 16)),
    "branches": (Branches, lambda: _values(4, 16)),
    "bare": (Bare, lambda: _values(4, 16)),
    "tagged": (Tagged, lambda: _tokens(64, 4, 6)),
    "mixture": (Mixture, lambda: _values(4, 16)),
    "mixed types": (MixedTypes, lambda: _values(4, 16)),
    "recurrent": (Recurrent, lambda: _values(4, 16)),
    "tied gpt": (lambda: GPT(GPTConfig(tied=True)), lambda: _tokens(256, 2, 8)),
    "checkpointed": (Checkpointed, lambda: _values(4, 16)),
}
"""Name -> how the model is made, and an input."""
