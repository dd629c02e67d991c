r"""Ready-made rules: names and shapes of Hugging Face transformers to those of a plain torch module, and back.

    plain.load_state_dict(gpt2()(model.state_dict()))
    model.load_state_dict(gpt2().inverse()(plain.state_dict()))

The plain modules have `tokens`, `positions`, `blocks.N`, `norm` and `head`; a block has `norm1`, `qkv`, `out`, `norm2`
and its feed-forward: `up` and `down` (GPT-2), or `gate_up` and `down` (Llama). Every rule must fit, and every key.

With live tensors, pass the class: `gpt2(state_dict.KeyRules)`.
"""

from torchshard.keys.key_rules import KeyRules
from torchshard.keys.rules import fuse, rename, transpose


def gpt2(kind: type[KeyRules] = KeyRules) -> KeyRules:
    """GPT2LMHeadModel: its Conv1D weights are those of nn.Linear transposed; its head is tied to the tokens.

    Args:
        kind: the class of rules.
    """
    names = [
        (r"transformer.wte", "tokens"),
        (r"transformer.wpe", "positions"),
        (r"transformer.ln_f", "norm"),
        (r"lm_head", "head"),
        (r"transformer.h.(\d+).ln_1", r"blocks.\1.norm1"),
        (r"transformer.h.(\d+).ln_2", r"blocks.\1.norm2"),
        (r"transformer.h.(\d+).attn.c_attn", r"blocks.\1.qkv"),
        (r"transformer.h.(\d+).attn.c_proj", r"blocks.\1.out"),
        (r"transformer.h.(\d+).mlp.c_fc", r"blocks.\1.up"),
        (r"transformer.h.(\d+).mlp.c_proj", r"blocks.\1.down"),
    ]
    turned = [transpose(rf"blocks.(\d+).{name}.weight") for name in ("qkv", "out", "up", "down")]
    return kind([*[rename(*pair) for pair in names], *turned], strict=True)


def llama(heads: int, kv_heads: int, kind: type[KeyRules] = KeyRules) -> KeyRules:
    """LlamaForCausalLM without biases: query, key and value in one weight, gate and up in another.

    Args:
        heads: number of attention heads.
        kv_heads: number of heads of keys and values.
        kind: the class of rules.
    """
    names = [
        (r"model.embed_tokens", "tokens"),
        (r"model.norm", "norm"),
        (r"lm_head", "head"),
        (r"model.layers.(\d+).input_layernorm", r"blocks.\1.norm1"),
        (r"model.layers.(\d+).post_attention_layernorm", r"blocks.\1.norm2"),
        (r"model.layers.(\d+).self_attn.o_proj", r"blocks.\1.out"),
        (r"model.layers.(\d+).mlp.down_proj", r"blocks.\1.down"),
    ]
    attention = [rf"model.layers.(\d+).self_attn.{name}_proj.weight" for name in "qkv"]
    forward = [rf"model.layers.(\d+).mlp.{name}_proj.weight" for name in ("gate", "up")]
    fused = [
        fuse(attention, r"blocks.\1.qkv.weight", sizes=(heads, kv_heads, kv_heads)),
        fuse(forward, r"blocks.\1.gate_up.weight"),
    ]
    return kind([*[rename(*pair) for pair in names], *fused], strict=True)
