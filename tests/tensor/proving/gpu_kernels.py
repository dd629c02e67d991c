"""GPUs' attention kernels, computed on a CPU, so that their rules can be proved and run where there is no GPU.

What they return has the shapes of CUDA's. It lies in memory with queries before heads, which meta functions do not say
of all of them.
"""

import contextlib
import math

import torch

aten = torch.ops.aten


@contextlib.contextmanager
def attention_kernels():
    """While it lasts, the operators run on CPU tensors."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in _KERNELS.items():
            library.impl(name, kernel, "CPU")
        yield
    finally:
        library._destroy()


def attention_calls():
    """(operator, arguments, keyword arguments): queries alone, grouped ones, masks; forward and backward."""
    g = torch.Generator().manual_seed(0)

    def floats(*shape):
        return (torch.randn(shape, generator=g).mul(512).round() * 2 + 1) / 1024

    for heads in (4, 2):  # of keys; a group of queries has one
        q, k, v, grad = floats(3, 4, 5, 8), floats(3, heads, 6, 8), floats(3, heads, 6, 8), floats(3, 4, 5, 8)
        bias = torch.nn.functional.pad(floats(3, 4, 5, 6), (0, 10))[..., :6]
        for causal in (False, True):
            made = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal)
            yield aten._scaled_dot_product_flash_attention.default, (q, k, v, 0.0, causal), {}
            state = (*made[:6], 0.0, causal, made[6], made[7])
            yield aten._scaled_dot_product_flash_attention_backward.default, (grad, q, k, v, *state), {}
        for mask in (None, bias, bias[:1].expand_as(bias)):
            made = aten._scaled_dot_product_efficient_attention.default(q, k, v, mask, True)
            yield aten._scaled_dot_product_efficient_attention.default, (q, k, v, mask, True), {"scale": 0.5}
            yield aten._scaled_dot_product_efficient_attention.default, (q, k, v, mask, False), {}
            state = (*made, 0.0, [True, True, True, mask is not None])
            yield aten._scaled_dot_product_efficient_attention_backward.default, (grad, q, k, v, mask, *state), {}
        for mask in (None, bias, bias[:1], bias[0, 0]):
            made = aten._scaled_dot_product_cudnn_attention.default(q, k, v, mask, True)
            yield aten._scaled_dot_product_cudnn_attention.default, (q, k, v, mask, True), {}
            state = (*made[:2], made[6], made[7], mask, *made[2:6], 0.0, False)
            yield aten._scaled_dot_product_cudnn_attention_backward.default, (grad, q, k, v, *state), {}


def _weighted(q, k, v, mask, causal, scale):
    """Scores, keys and values of each head of the queries, and what scores are scaled by."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores, k, v, scale


def _attended(*inputs):
    """The output, and the logarithms of sums."""
    scores, _, v, _ = _weighted(*inputs)
    out = scores.softmax(-1) @ v
    return out.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(-1)


def _gradients(grad, out, sums, q, k, v, mask, causal, scale):
    """Of queries, keys, values and scores, from what the forward has returned."""
    scores, keys, values, scale = _weighted(q, k, v, mask, causal, scale)
    weights = (scores - sums.unsqueeze(-1)).exp()
    of_scores = weights * (grad @ values.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    of_heads = of_scores.transpose(-1, -2) @ q * scale, weights.transpose(-1, -2) @ grad
    of_k, of_v = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in of_heads)
    return of_scores @ keys * scale, of_k, of_v, of_scores


def _flash(q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
    seed, lengths = torch.zeros(2, dtype=torch.uint64), (q.shape[2], k.shape[2])
    return *_attended(q, k, v, None, causal, scale), None, None, *lengths, seed, seed[0].clone(), q.new_empty(0)


def _flash_backward(grad, q, k, v, out, sums, *args, scale=None):
    return _gradients(grad, out, sums, q, k, v, None, args[5], scale)[:3]


def _refuse_misaligned(mask):
    """As CUDA's kernel does, with what torch pads masks to."""
    if mask is not None and (mask.stride(-1) != 1 or any(stride % 16 for stride in mask.stride()[:-1])):
        raise RuntimeError(f"attn_bias is not correctly aligned: strides {mask.stride()}")


def _efficient(q, k, v, mask, wanted, dropout=0.0, causal=False, *, scale=None):
    _refuse_misaligned(mask)
    out, sums = _attended(q, k, v, mask, causal, scale)
    sums = torch.nn.functional.pad(sums, (0, -sums.shape[2] % 32)) if wanted else sums[:, :, :0].clone()
    return out, sums, torch.tensor(0), torch.tensor(0)


def _efficient_backward(grad, q, k, v, mask, out, sums, seed, offset, dropout, wanted, causal=False, *, scale=None):
    _refuse_misaligned(mask)
    made = _gradients(grad, out, sums[..., : q.shape[2]], q, k, v, mask, causal, scale)
    return *made[:3], made[3] if wanted[3] else None


def _cudnn(q, k, v, mask, wanted, dropout=0.0, causal=False, debug=False, *, scale=None):
    out, sums = _attended(q, k, v, mask, causal, scale)
    sums, lengths = sums.unsqueeze(-1) if wanted else None, (q.shape[2], k.shape[2])
    return out, sums, None, None, *lengths, torch.tensor(0), torch.tensor(0), None


def _cudnn_backward(grad, q, k, v, out, sums, seed, offset, mask, *args, scale=None):
    return _gradients(grad, out, sums.squeeze(-1), q, k, v, mask, args[5], scale)[:3]


_KERNELS = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}
