"""Attention: the kernels behind `scaled_dot_product_attention` on CPU and on GPUs, and torch's fused layers.

A batch and the heads may be split, as each head of each sample is on its own; queries and keys of one head stay whole.
Kernels with dropout have no rule: what they drop follows from the place in what they are given, and pieces would drop
other weights than a single device does. What they return of their generator means nothing without dropout.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torchshard.layout.layout import Layout
from torchshard.rules.linalg import rows_apart
from torchshard.rules.reducing import broadcasting
from torchshard.rules.rule import Made, Rule, named, options

_ON_GPU = options("full reads=dropout_p red=b:same,h:same")


def _for_cpu(
    q: Layout, k: Layout, v: Layout, dropout: float = 0.0, causal: bool = False, *,
    attn_mask: Layout | None = None, scale: float | None = None,
) -> Made:  # fmt: skip
    return _forward(q, k, _mask(q, k, attn_mask), "S")


def _flash(
    q: Layout, k: Layout, v: Layout, dropout: float = 0.0, causal: bool = False, debug: bool = False, *,
    scale: float | None = None,
) -> Made | None:  # fmt: skip
    return None if dropout or debug else _forward(q, k, "", "S, , , , , ..., ..., ...")


def _efficient(
    q: Layout, k: Layout, v: Layout, mask: Layout | None, logsumexp: bool, dropout: float = 0.0, causal: bool = False,
    *, scale: float | None = None,
) -> Made | None:  # fmt: skip
    if dropout:
        return None
    made = _forward(q, k, _full_mask(q, k, mask), "..., ..., ...")
    return replace(made, local=partial(_with_rows_apart, 3)) if mask else made


def _cudnn(
    q: Layout, k: Layout, v: Layout, mask: Layout | None, logsumexp: bool, dropout: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> Made | None:  # fmt: skip
    return None if dropout or debug else _forward(q, k, _mask(q, k, mask), "S ..., , , , , ..., ..., ...")


def _forward(q: Layout, k: Layout, mask: str, statistics: str) -> Made:
    """The output and, for the backward, the logarithms of a head's sums, with what else the kernel returns."""
    heads, sizes = _heads(q, k)
    return Made(f"b {heads} S E, b h T E, b h T F{mask} -> b {heads} S F, b {heads} {statistics}", sizes)


def _for_cpu_backward(
    grad: Layout, q: Layout, k: Layout, v: Layout, out: Layout, logsumexp: Layout, dropout: float, causal: bool, *,
    attn_mask: Layout | None = None, scale: float | None = None,
) -> Made:  # fmt: skip
    return _backward(q, k, "", logsumexp, _mask(q, k, attn_mask))


def _flash_backward(
    grad: Layout, q: Layout, k: Layout, v: Layout, out: Layout, logsumexp: Layout, first_q: Layout | None,
    first_k: Layout | None, most_q: int, most_k: int, dropout: float, causal: bool, seed: Layout, offset: Layout, *,
    scale: float | None = None,
) -> Made | None:  # fmt: skip
    if dropout or first_q or first_k:
        return None
    return _backward(q, k, "", logsumexp, _of_generator(seed, offset))


def _efficient_backward(
    grad: Layout, q: Layout, k: Layout, v: Layout, mask: Layout | None, out: Layout, logsumexp: Layout, seed: Layout,
    offset: Layout, dropout: float, wanted: list[bool], causal: bool = False, *, scale: float | None = None,
) -> Made | None:  # fmt: skip
    if dropout:
        return None
    of_mask = _full_mask(q, k, mask)
    made = _backward(q, k, of_mask, logsumexp, _of_generator(seed, offset), of_mask or ", ")
    return replace(made, local=partial(_with_rows_apart, 4)) if mask else made


def _cudnn_backward(
    grad: Layout, q: Layout, k: Layout, v: Layout, out: Layout, logsumexp: Layout, seed: Layout, offset: Layout,
    mask: Layout | None, first_q: Layout | None, first_k: Layout | None, most_q: int, most_k: int, dropout: float,
    causal: bool, *, scale: float | None = None,
) -> Made | None:  # fmt: skip
    if dropout or first_q or first_k:
        return None
    return _backward(q, k, "", logsumexp, _of_generator(seed, offset) + _mask(q, k, mask))


def _backward(q: Layout, k: Layout, mask: str, logsumexp: Layout, others: str, of_mask: str = "") -> Made:
    """The gradients of queries, keys and values, and that of a mask where the kernel has one."""
    heads, sizes = _heads(q, k)
    of_q, kv, rest = f"b {heads} S", "b h T E, b h T F", " ".join([f"L{d}" for d in range(2, logsumexp.ndim)])
    read = f"{of_q} F, {of_q} E, {kv}{mask}, {of_q} F, b {heads} {rest}{others}"
    return Made(f"{read} -> {of_q} E, {kv}{of_mask}", sizes)


def _heads(q: Layout, k: Layout) -> tuple[str, dict[str, int]]:
    """The heads of queries: those of keys, or a group of `R` for each of them (grouped-query attention)."""
    if q.shape[1] == k.shape[1]:
        return "h", {}
    return "(h R)", {"R": q.shape[1] // max(k.shape[1], 1)}


def _mask(q: Layout, k: Layout, mask: Layout | None) -> str:
    """The dims of a mask, which may be one for the whole batch, for all heads, queries or keys."""
    if mask is None:
        return ""
    return f", {' '.join(broadcasting(['b', _heads(q, k)[0], 'S', 'T'][4 - mask.ndim :]))}"


def _full_mask(q: Layout, k: Layout, mask: Layout | None) -> str:
    """The dims of a mask that has been expanded to all of them."""
    return "" if mask is None else f", b {_heads(q, k)[0]} S T"


_ALIGNED = 16
"""Numbers between the starts of a mask's rows, or a multiple: what torch pads masks to before it calls the kernel."""


def _with_rows_apart(at: int, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The kernel's call with the mask, argument `at`, in rows that it accepts, as those of a moved mask may not be."""
    return kernel(*args[:at], rows_apart(args[at], _ALIGNED), *args[at + 1 :], **kwargs)


def _of_generator(seed: Layout, offset: Layout) -> str:
    """The dims of what a forward returned of its generator: one number or two, by the device."""
    return "".join([f", {' '.join([f'{name}{d}' for d in range(x.ndim)])}" for name, x in (("X", seed), ("Y", offset))])


def _whole_attention(
    q: Layout, k: Layout, v: Layout, width: int, heads: int, qkv: Layout, qkv_bias: Layout, out: Layout,
    out_bias: Layout, mask: Layout | None = None, weights: bool = True, averaged: bool = True, kind: int | None = None,
) -> str:  # fmt: skip
    """What nn.MultiheadAttention is at inference: weights are whole, a batch may be split."""
    shares = "b S T" if averaged else "b H S T"
    return f"b S E, b T E, b T E, X E, X, Y Z, Y{_whole_mask(mask, kind)} -> b S E, {shares}"


def _encoder_layer(src: Layout, *args: Any) -> str:
    """What nn.TransformerEncoderLayer is at inference."""
    weights, mask = args[2:6] + args[9:17], args[17:]
    names = [" ".join([f"W{at}{d}" for d in range(w.ndim)]) for at, w in enumerate(weights)]
    return f"b S E, {', '.join(names)}{_whole_mask(*mask)} -> b S E"


def _whole_mask(mask: Layout | None = None, kind: int | None = None) -> str:
    """A mask of queries by keys (0), of a batch's keys (1), or of a batch's queries by keys, for each head."""
    if mask is None:
        return ""
    batch = kind == 1 or mask.ndim == 4
    return f", {' '.join([*(['b'] if batch else []), *[f'M{d}' for d in range(mask.ndim - batch)]])}"


RULES = {
    **named("_scaled_dot_product_flash_attention_for_cpu", Rule(_for_cpu, options("full"))),
    **named("_scaled_dot_product_flash_attention_for_cpu_backward", Rule(_for_cpu_backward, options("full"))),
    **named("_scaled_dot_product_flash_attention", Rule(_flash, _ON_GPU)),
    **named("_scaled_dot_product_flash_attention_backward", Rule(_flash_backward, _ON_GPU)),
    **named("_scaled_dot_product_efficient_attention", Rule(_efficient, _ON_GPU)),
    **named("_scaled_dot_product_efficient_attention_backward", Rule(_efficient_backward, _ON_GPU)),
    **named("_scaled_dot_product_cudnn_attention", Rule(_cudnn, _ON_GPU)),
    **named("_scaled_dot_product_cudnn_attention_backward", Rule(_cudnn_backward, _ON_GPU)),
    **named("_native_multi_head_attention", Rule(_whole_attention, options("full"))),
    **named("_transformer_encoder_layer_fwd", Rule(_encoder_layer, options("full"))),
}
