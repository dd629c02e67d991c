"""A small Llama: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU; and plans that spread it over ranks."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    vocabulary: int = 29  # uneven on two and on four ranks
    width: int = 32
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 44
    tied: bool = False

    @property
    def head(self):
        return self.width // self.heads


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def rotary(time, head):
    """Cosines and sines of [time, head / 2] angles, joined along a first dim of 2."""
    frequencies = 1e4 ** (-torch.arange(0, head, 2) / head)
    angles = torch.arange(time)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x, turns):
    """Turn pairs of [batch, heads, time, head] by the angles of their place."""
    cos, sin = turns.unbind()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head = c.head
        self.wq = nn.Linear(c.width, c.heads * c.head, bias=False)
        self.wk = nn.Linear(c.width, c.kv_heads * c.head, bias=False)
        self.wv = nn.Linear(c.width, c.kv_heads * c.head, bias=False)
        self.wo = nn.Linear(c.heads * c.head, c.width, bias=False)

    def forward(self, x, turns):
        # With local outputs this rank's heads: their number is what the size says.
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(rotate(q, turns), rotate(k, turns), v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(c.width, c.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(c.width), Attention(c)
        self.ffn_norm, self.feed_forward = RMSNorm(c.width), FeedForward(c)

    def forward(self, x, turns):
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.tok_embeddings = nn.Embedding(c.vocabulary, c.width)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.width)
        self.output = nn.Linear(c.width, c.vocabulary, bias=False)
        nn.init.normal_(self.tok_embeddings.weight, std=0.2)
        if c.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        turns = rotary(tokens.shape[1], self.config.head)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, turns)
        return self.output(self.norm(x))


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def in_heads(plan, config):
    """A plan whose attention is cut between heads, those of queries with the keys and values that they share."""
    from torchshard.parallel import ColwiseParallel, RowwiseParallel

    shared = config.heads // config.kv_heads * config.head
    local = plan["layers.*.attention.wo"].use_local_output
    query, key = (ColwiseParallel(use_local_output=local, unit=unit) for unit in (shared, config.head))
    out = RowwiseParallel(
        output_layouts=plan["layers.*.attention.wo"].output_layouts[0], use_local_output=local, unit=shared
    )
    attention = {"wq": query, "wk": key, "wv": key, "wo": out}
    whole = {name: style for name, style in plan.items() if ".attention.w" not in name}
    return {**whole, **{f"layers.*.attention.{name}": style for name, style in attention.items()}}


def block_plan(kind, library=None):
    """What a plan says of each block."""
    prefix = "layers.*."
    return {path.removeprefix(prefix): style for path, style in plan(kind, library).items() if path.startswith(prefix)}


def plan(kind, library=None):
    """The plan of a kind: "tp" cuts weights; "sp" also splits the sequence between blocks; "dtensor" is "sp" with
    DTensors all the way, which may be cut unevenly. `library` is what styles are of: torchshard.parallel, or torch's."""
    from torch.distributed.tensor import Replicate, Shard

    from torchshard import parallel

    library = library or parallel
    ColwiseParallel, RowwiseParallel = library.ColwiseParallel, library.RowwiseParallel
    if kind == "tp":
        return {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "layers.*.attention.w[qkv]": ColwiseParallel(),
            "layers.*.attention.wo": RowwiseParallel(),
            "layers.*.feed_forward.w[13]": ColwiseParallel(),
            "layers.*.feed_forward.w2": RowwiseParallel(),
            "output": ColwiseParallel(use_local_output=False),
        }
    local = kind == "sp"
    turns = None if local else Replicate()
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local),
        "layers.*.attention_norm": library.SequenceParallel(),
        "layers.*.attention": library.PrepareModuleInput(
            input_layouts=(Shard(1), turns), desired_input_layouts=(Replicate(), turns)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(use_local_output=local),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
        "layers.*.ffn_norm": library.SequenceParallel(),
        "layers.*.feed_forward": library.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "layers.*.feed_forward.w[13]": ColwiseParallel(use_local_output=local),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
        "norm": library.SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
