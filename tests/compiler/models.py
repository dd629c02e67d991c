"""Models and a training loop in two forms: compiled on ranks, and plain on the whole batch."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models import GPT, GPTConfig, mlp

eager = torch._dynamo.disable(lambda module, x: torch.tanh(module(x)))


class Parts(nn.Module):
    """Layers a, b, c; `how` says what happens around b."""

    def __init__(self, how="plain"):
        super().__init__()
        self.a, self.b, self.c, self.how = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32), how

    def forward(self, x):
        x = F.gelu(self.a(x))
        if self.how == "tied":  # a's weight twice in one graph, c's not used
            return F.linear(self.b(x), self.a.weight.t(), self.c.bias)
        if self.how == "checkpoint":
            x = checkpoint(lambda t: F.gelu(self.b(t)), x, use_reentrant=False)
        elif self.how == "break":  # b runs eagerly, between two graphs
            x = eager(self.b, x)
        elif self.how == "both":  # b is used by two graphs and once eagerly
            x = self.b(eager(self.b, self.b(x)))
        elif self.how != "unused":
            x = self.b(x)
        return self.c(F.gelu(x))


class BatchNormed(Parts):
    """Batch norm before the layers: buffers that a forward changes, and that are broadcast before the next."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        return super().forward(self.norm(x))


class Normed(nn.Module):
    """Convolution, normalisation, a frozen layer, an embedding, mixed dtypes."""

    def __init__(self):
        super().__init__()
        self.embedding, self.conv, self.norm = nn.Embedding(16, 32), nn.Conv1d(1, 3, 3), nn.LayerNorm(30)
        self.frozen, self.f64 = nn.Linear(30, 30).requires_grad_(False), nn.Linear(30, 4).double()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        x = x + self.embedding((x[:, 0] * 4).long().clamp(0, 15))
        y = self.frozen(self.norm(self.conv(x[:, None]).relu())) * self.scale
        return self.f64(y.mean(1).double()).repeat(1, 8).float()


class Shared(nn.Module):
    """Weights whose gradients are sums: of an embedding and a product, of two products; of a batch of products."""

    def __init__(self):
        super().__init__()
        self.tokens, self.twice = nn.Embedding(32, 16, padding_idx=0), nn.Linear(16, 16, bias=False)
        self.heads, self.experts = nn.Parameter(torch.randn(16, 4, 4) / 4), nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.inward = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        h = self.tokens((x * 8).long() % 32)
        h = torch.einsum("btd,dhk->bthk", h, self.heads).flatten(2)
        h = h.view(-1, 4, 8, 16).transpose(0, 1).flatten(1, 2)  # a quarter of the tokens to each expert
        h = torch.bmm(h, self.experts).view(4, -1, 8, 16).transpose(0, 1).flatten(1, 2).tanh() @ self.inward
        return F.linear(self.twice(self.twice(h).tanh()), self.tokens.weight).mean(1)


class Picked(nn.Module):
    """Weights of which an index picks rows, some more than once and some counted from the end."""

    def __init__(self):
        super().__init__()
        self.rows, self.pairs = nn.Parameter(torch.randn(8, 32)), nn.Parameter(torch.randn(6, 2, 16))

    def forward(self, x):
        at = (x * 4).long()
        return x * self.rows[at[:, :2].clamp(-8, 7)].sum(1) + self.pairs[at[:, 2].clamp(-6, 5)].flatten(1)


class Strided(nn.Module):
    """Parameters that lie in memory in another order than their dims, and than their gradients are made in."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Parameter((torch.randn(16, 16) / 4).t())
        self.heads = nn.Parameter((torch.randn(4, 16, 4) / 4).permute(1, 0, 2))
        self.experts = nn.Parameter((torch.randn(2, 16, 16) / 4).transpose(1, 2))
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        h = torch.einsum("btd,dhk->bthk", x.view(-1, 2, 16) @ self.inward, self.heads).flatten(2)
        h = torch.bmm(h.transpose(0, 1), self.experts).transpose(0, 1)
        return self.conv(h.reshape(-1, 2, 4, 4)).tanh().flatten(1)[:, ::2]


MAKERS = {
    "mlp": lambda: mlp(32, 4),
    "normed": Normed,
    "shared": Shared,
    "strided": Strided,
    "picked": Picked,
    "gpt": lambda: GPT(GPTConfig()),
    "tied gpt": lambda: GPT(GPTConfig(tied=True, checkpoint=True)),
    **{how: (lambda how=how: Parts(how)) for how in ("plain", "tied", "checkpoint", "break", "both", "unused")},
}


def make(name):
    return MAKERS[name]()


def batch(name, size):
    """Inputs and targets of a whole batch; the same on all ranks."""
    random = torch.Generator().manual_seed(size)
    if "gpt" in name:
        tokens = torch.randint(0, 256, (size, 9), generator=random)
        return tokens[:, :-1], tokens[:, 1:]
    return torch.randn(size, 32, generator=random), torch.randn(size, 32, generator=random)


def loss_of(output, target):
    if target.dtype == torch.int64:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())
    return F.mse_loss(output.to(target.dtype), target)  # torch 2.11 has no backward of mixed ones


def train_step(wrapped, model, name, size, rank, world, parts=1):
    """Gradients of this rank's share of the batch, in `parts` portions of which the last is reduced."""
    x, y = batch(name, size)
    for k, (xs, ys) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        xs, ys = xs.chunk(world)[rank], ys.chunk(world)[rank]
        with wrapped.no_sync() if k < parts - 1 else contextlib.nullcontext():
            (loss_of(model(xs), ys) / parts).backward()


def error(wrapped, reference):
    """The worst relative error among the gradients; None must be None on both sides."""
    worst = 0.0
    for p, q in zip(wrapped.module.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            assert p.grad.layout == q.grad.layout
            found, want = p.grad.to_dense(), q.grad.to_dense()
            worst = max(worst, ((found - want).abs().max() / want.abs().max().clamp_min(1e-12)).item())
    return worst
