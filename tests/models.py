"""Small models that several rooms test with."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    """A byte-level GPT; the defaults are for tests."""

    layers: int = 2
    width: int = 32
    heads: int = 2
    context: int = 16
    vocabulary: int = 256
    tied: bool = False  # the head shares the embedding's weight
    checkpoint: bool = False  # activation checkpointing of each block


class Block(nn.Module):
    def __init__(self, c: GPTConfig):
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv, self.out = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.up, self.down = nn.Linear(c.width, 4 * c.width), nn.Linear(4 * c.width, c.width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Next-byte prediction: int64 [batch, time] to logits [batch, time, vocabulary]."""

    def __init__(self, config: GPTConfig = GPTConfig()):
        super().__init__()
        c = self.config = config
        self.tokens, self.positions = nn.Embedding(c.vocabulary, c.width), nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm, self.head = nn.LayerNorm(c.width), nn.Linear(c.width, c.vocabulary, bias=False)
        if c.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.config.checkpoint:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


def mlp(width: int = 32, layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())][:-1])


class Stops(torch.autograd.Function):
    """Passes through; in backward, `how` happens."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.how()
        return grad, None


def stumble():
    """What may happen there."""
    raise ValueError("stumbled")


class Parts(nn.Module):
    """Four layers, of which `pick` says which run, and so which parameters have gradients."""

    def __init__(self):
        super().__init__()
        self.parts, self.pick = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), (0, 1)

    def forward(self, x):
        for k in self.pick:
            x = self.parts[k](x)
        return x
