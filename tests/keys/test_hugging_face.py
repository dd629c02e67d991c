"""Rules for models of transformers: with renamed weights, plain modules give the same logits. Needs `transformers`."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import GPT, GPTConfig
from tests.parallel.llama import RMSNorm, rotary, rotate
from torchshard.keys import hugging_face
from torchshard.state_dict import KeyRules


@pytest.fixture
def transformers():
    """Imported where it is used: that takes a second, and longer for the first model."""
    return pytest.importorskip("transformers")


class Block(nn.Module):
    """A block of a Llama with fused weights."""

    def __init__(self, c):
        super().__init__()
        self.heads, self.kv, self.head = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.norm1, self.norm2 = RMSNorm(c.hidden_size), RMSNorm(c.hidden_size)
        self.qkv = nn.Linear(c.hidden_size, (self.heads + 2 * self.kv) * self.head, bias=False)
        self.out = nn.Linear(self.heads * self.head, c.hidden_size, bias=False)
        self.gate_up = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x, turns):
        split = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.head)).transpose(1, 2)
        q, k, v = split.split([self.heads, self.kv, self.kv], 1)
        y = F.scaled_dot_product_attention(rotate(q, turns), rotate(k, turns), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(c.vocab_size, c.hidden_size), RMSNorm(c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        turns = rotary(tokens.shape[1], self.blocks[0].head)
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))


def check(theirs, ours, rules, tokens):
    """Logits are equal, and the weights come back bit for bit."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
        ours.load_state_dict(rules(theirs.state_dict()))
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    back = rules.inverse()(ours.state_dict())
    assert list(back) != list(ours.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(back[name], value), name
    theirs.load_state_dict(back)


def test_gpt2(transformers):
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=2, activation_function="gelu"
    )
    plain = GPT(GPTConfig(layers=2, width=24, heads=2, context=16, vocabulary=61, tied=True))
    tokens = torch.randint(0, 61, (2, 16))
    check(transformers.GPT2LMHeadModel(config).eval(), plain, hugging_face.gpt2(KeyRules), tokens)


def test_llama(transformers):
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False,
    )  # fmt: skip
    tokens = torch.randint(0, 61, (2, 16))
    rules = hugging_face.llama(4, 2, KeyRules)
    check(transformers.LlamaForCausalLM(config).eval(), Llama(config), rules, tokens)
