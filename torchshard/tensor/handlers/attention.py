"""What torch.nn's attention and encoder layer call at inference, of weights that are split: by operators with rules.

The kernels take whole weights, for which theirs is the rule; to gather them would cost more than the sum over parts.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F

from torchshard.tensor.dtensor import DTensor


def _attention(
    func: Any, q: Any, k: Any, v: Any, width: int, heads: int, qkv: Any, qkv_bias: Any, out: Any, out_bias: Any,
    mask: Any = None, need_weights: bool = True, average: bool = True, kind: int | None = None,
) -> Any:  # fmt: skip
    if not _is_split(qkv, out) or q is not k or k is not v:
        return NotImplemented
    found, shares = _attended(q, (width, heads, qkv, qkv_bias, out, out_bias), mask, kind, average)
    return found, shares if need_weights else None


def _attended(x: Any, weights: tuple[Any, ...], mask: Any, kind: int | None, average: bool = True) -> tuple[Any, Any]:
    """What attends to itself, and to what; `weights` are as for the kernel."""
    width, heads, qkv, qkv_bias, out, out_bias = weights
    hidden = mask.bool() if mask is not None else None  # what shall not be seen: keys of a batch, or pairs
    padded, pairs = (hidden, None) if kind == 1 else (None, hidden)
    if pairs is not None and pairs.ndim == 4:
        pairs = pairs.flatten(0, 1)
    rows = x.transpose(0, 1)
    # With weights asked for, rows that see nothing become nan, as those of the kernel do.
    found, shares = F.multi_head_attention_forward(
        rows, rows, rows, width, heads, qkv, qkv_bias, None, None, False, 0.0, out, out_bias, training=False,
        key_padding_mask=padded, need_weights=True, attn_mask=pairs, average_attn_weights=average,
    )  # fmt: skip
    return found.transpose(0, 1), shares


def _encoder_layer(
    func: Any, x: Any, width: int, heads: int, qkv: Any, qkv_bias: Any, out: Any, out_bias: Any, gelu: bool,
    norm_first: bool, eps: float, weight1: Any, bias1: Any, weight2: Any, bias2: Any, inner: Any, inner_bias: Any,
    outer: Any, outer_bias: Any, mask: Any = None, kind: int | None = None,
) -> Any:  # fmt: skip
    if not _is_split(qkv, out, inner, outer):
        return NotImplemented

    def attend(x: Any) -> Any:
        return _attended(x, (width, heads, qkv, qkv_bias, out, out_bias), mask, kind)[0]

    def feed(x: Any) -> Any:
        return F.linear((F.gelu if gelu else F.relu)(F.linear(x, inner, inner_bias)), outer, outer_bias)

    for step, weight, bias in ((attend, weight1, bias1), (feed, weight2, bias2)):
        if norm_first:
            x = x + step(F.layer_norm(x, [width], weight, bias, eps))
        else:
            x = F.layer_norm(x + step(x), [width], weight, bias, eps)
    return x


def _is_split(*weights: Any) -> bool:
    return any(type(w) is DTensor and w._spec.sharding.splits for w in weights)


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "_native_multi_head_attention.default": _attention,
    "_transformer_encoder_layer_fwd.default": _encoder_layer,
}
