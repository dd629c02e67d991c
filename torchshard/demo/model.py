"""A byte-level GPT in plain torch, and which of its parameters are cut where when it runs tensor-parallel."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of the model.

    Attributes:
        width: of the residual stream; a multiple of `heads`.
        context: longest sequence, in bytes.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    context: int = 128
    vocabulary: int = 256


class Attention(nn.Module):
    """Causal self-attention over [batch, time, width]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_width = c.width // c.heads
        self.query = nn.Linear(c.width, c.width)
        self.key = nn.Linear(c.width, c.width)
        self.value = nn.Linear(c.width, c.width)
        self.out = nn.Linear(c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend; the shape stays."""
        q, k, v = [self._heads(f(x)) for f in (self.query, self.key, self.value)]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(2, (-1, self.head_width))
        return heads.transpose(1, 2)


class Block(nn.Module):
    """Attention and a feed-forward network, each on the normalised residual stream."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(c.width), Attention(c)
        self.norm2 = nn.LayerNorm(c.width)
        self.up, self.down = nn.Linear(c.width, 4 * c.width), nn.Linear(4 * c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        """One block; the shape stays."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Predicts the next byte: int64 [batch, time] to logits [batch, time, vocabulary]."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        c = self.config = config or Config()
        self.tokens, self.positions = nn.Embedding(c.vocabulary, c.width), nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList([Block(c) for _ in range(c.layers)])
        self.norm, self.head = nn.LayerNorm(c.width), nn.Linear(c.width, c.vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte after each byte."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of a byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Where tensor parallelism cuts the weight of a linear layer: 0 along its outputs (and the bias with them), 1 along its
# inputs, so that its output is a sum over ranks. All other parameters are replicated.
CUTS = {"query": 0, "key": 0, "value": 0, "out": 1, "up": 0, "down": 1, "head": 0}


def tensor_parallel(model: GPT, mesh: Any, axis: int = 0) -> GPT:
    """Make the parameters of a model DTensors on `mesh`, in place: cut along `axis`, replicated along all others.

    Args:
        model: the same on every rank.
        mesh: a DeviceMesh.
        axis: of the mesh, over which the model is spread.
    """
    from torchshard import Replicate, Shard, distribute_module, distribute_tensor

    def cut(path: str, module: nn.Module, mesh: Any) -> None:
        dim = CUTS.get(path.rpartition(".")[2])
        if dim is None:
            return
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > dim:
                placements: list[Any] = [Replicate()] * mesh.ndim
                placements[axis] = Shard(dim)
                made = distribute_tensor(parameter.detach(), mesh, placements)
                module.register_parameter(name, nn.Parameter(made))
        if dim == 1:
            module.register_forward_hook(lambda _, inputs, output: summed(output))

    def summed(x: Any) -> Any:
        """All-reduce over the ranks of the axis."""
        placements = list(x.placements)
        placements[axis] = Replicate()
        return x.redistribute(placements=placements)

    return distribute_module(model, mesh, cut)  # type: ignore[return-value]


@torch.no_grad()
def generate(model: GPT, start: bytes, length: int, generator: torch.Generator, temperature: float = 0.8) -> bytes:
    """`start` and `length` bytes drawn from the model."""
    text = list(start)
    device = model.head.weight.device
    for _ in range(length):
        window = torch.tensor([text[-model.config.context :]], device=device)
        chances = torch.softmax(model(window)[0, -1].float().cpu() / temperature, 0)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text)
