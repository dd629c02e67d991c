"""What neural networks are made of: softmax, normalisation, embedding, losses."""

from collections.abc import Sequence
from typing import Any

from torchshard.layout.layout import Layout
from torchshard.rules.convolution import positions
from torchshard.rules.losses import MEAN, NONE
from torchshard.rules.reducing import dims_of, letters
from torchshard.rules.rule import Made, Rule, named, options, reduces, table

_LINES = table("""
    embedding              | V d, ... -> ... d         | lin=0
    _prelu_kernel          | ..., ... -> ...           |
    _prelu_kernel_backward | ..., ..., ... -> ..., ... | lin=0
""")


def _softmax(x: Layout, dim: int, *_: Any, **__: Any) -> str:
    names = " ".join(letters(x.ndim, dims_of(dim, x.ndim)))  # a row is normalised together
    return f"{names} -> {names}"


def _softmax_backward(grad: Layout, output: Layout, dim: int, *_: Any) -> str:
    names = " ".join(letters(grad.ndim, dims_of(dim, grad.ndim)))
    return f"{names}, {names} -> {names}"


def _layer_norm(
    x: Layout, shape: Sequence[int], weight: Layout | None = None, bias: Layout | None = None, *_: Any
) -> str:
    rows, normed, stats = _normalised(x, shape)
    weights = [normed] * ((weight is not None) + (bias is not None))
    return f"{', '.join([rows, *weights])} -> {rows}, {stats}, {stats}"


def _layer_norm_backward(grad: Layout, x: Layout, shape: Sequence[int], mean: Layout, rstd: Layout, *rest: Any) -> Made:
    rows, normed, stats = _normalised(x, shape)
    weights = [normed] * (len([w for w in rest[:2] if w is not None]))
    line = f"{', '.join([rows, rows, stats, stats, *weights])} -> {rows}, {normed}, {normed}"
    lead = letters(x.ndim)[: x.ndim - len(shape)]
    return Made(line, options={"reduces": reduces(dict.fromkeys(lead, "sum"))})


def _normalised(x: Layout, shape: Sequence[int]) -> tuple[str, str, str]:
    """Notation of the rows, of what is normalised together, and of one statistic a row."""
    lead = x.ndim - len(shape)
    names = letters(x.ndim, range(lead, x.ndim))
    return " ".join(names), " ".join(names[lead:]), " ".join(names[:lead] + ["1"] * len(shape))


def _embedding_backward(grad: Layout, indices: Layout, rows: int, padding: int, by_frequency: bool) -> Made:
    # Scaled by how often an index occurs in the whole batch, so the batch must be whole.
    batch = letters(indices.ndim, range(indices.ndim) if by_frequency else ())
    line = f"{' '.join([*batch, 'w'])}, {' '.join(batch)} -> V w"
    return Made(line, {"V": rows}, {"reduces": reduces({} if by_frequency else dict.fromkeys(batch, "sum"))})


def _nll_loss(x: Layout, target: Layout, weight: Layout | None, reduction: int, ignore: int) -> Made:
    """Loss and total weight. The mean needs the whole batch here; tensor/handlers makes it of sums instead."""
    scores, targets = _of_classes(x)
    line = f"{scores}, {targets}{', C' if weight is not None else ''} -> {targets if reduction == NONE else ''}, "
    return Made(line.upper() if reduction == MEAN else line, options={"reduces": reduces(dict.fromkeys("nhw", "sum"))})


def _nll_loss_backward(
    grad: Layout, x: Layout, target: Layout, weight: Layout | None, reduction: int, ignore: int, total: Layout
) -> Made:
    """The total weight is what a mean was divided by; others have none."""
    scores, targets = _of_classes(x)
    line = f"{targets if grad.ndim else ''}, {scores}, {targets}{', C' if weight is not None else ''}, -> {scores}"
    return Made(line, options={} if reduction == MEAN else {"unread": (3 + (weight is not None),)})


def _of_classes(x: Layout) -> tuple[str, str]:
    """Dims of scores, and of targets, which lack that of the classes: of one, of a batch, of the points of images."""
    if x.ndim == 1:
        return "C", ""
    points = " h w" * (x.ndim > 2)
    return f"n C{points}", f"n{points}"


def _group_norm(
    x: Layout, weight: Layout | None, bias: Layout | None, n: int, c: int, space: int, groups: int, eps: float
) -> Made | None:
    if x.ndim < 2 or tuple(x.shape[:2]) != (n, c):  # the kernel asks for the count of elements alone
        return None
    channels, sizes = _in_groups(c, groups)
    rows = " ".join(["n", channels, *positions(x.ndim, "X")])
    weights = [channels] * ((weight is not None) + (bias is not None))

    def local(op: Any, x: Any, weight: Any, bias: Any, *_: Any) -> Any:
        return op(x, weight, bias, x.shape[0], x.shape[1], space, _held_groups(x, c, groups), eps)

    return Made(f"{', '.join([rows, *weights])} -> {rows}, n g, n g", sizes, local=local)


def _group_norm_backward(
    grad: Layout, x: Layout, mean: Layout, rstd: Layout, weight: Layout | None, n: int, c: int, space: int, groups: int,
    *_: Any,
) -> Made:  # fmt: skip
    channels, sizes = _in_groups(c, groups)
    rows = " ".join(["n", channels, *positions(x.ndim, "X")])

    def local(op: Any, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, *rest: Any) -> Any:
        return op(grad, x, mean, rstd, weight, x.shape[0], x.shape[1], space, _held_groups(x, c, groups), rest[-1])

    operands = [rows, rows, "n g", "n g", *([channels] if weight is not None else [])]
    return Made(f"{', '.join(operands)} -> {rows}, {channels}, {channels}", sizes, local=local)


def _in_groups(channels: int, groups: int) -> tuple[str, dict[str, int]]:
    """The dim of channels, which may be split between groups, and the lengths of its factors."""
    if groups > 0 and channels % groups == 0 and channels:
        return "(g C)", {"g": groups, "C": channels // groups}
    return "C", {"g": groups}


def _held_groups(part: Any, channels: int, groups: int) -> Any:
    """How many groups a part of the channels holds; of none, all."""
    return groups * part.shape[1] // channels if channels else groups


def _batch_norm(
    x: Layout, weight: Layout | None, bias: Layout | None, mean: Layout | None, var: Layout | None, training: bool,
    *_: Any,
) -> Made:  # fmt: skip
    """With given statistics, or those of a batch that is whole on every rank; of a split one, see tensor/handlers."""
    rows = _batch(x, training)
    given = [t for t in (weight, bias, mean, var) if t is not None]
    channels_last = x.ndim in (4, 5) and x.stride[1] == 1
    saved = "c, c" if training else "Y, Z"
    return Made(f"{', '.join([rows, *['c'] * len(given)])} -> {rows}, {saved}", contiguous=not channels_last)


def _batch_norm_backward(
    grad: Layout, x: Layout, weight: Layout | None, mean: Layout | None, var: Layout | None, saved_mean: Layout | None,
    saved_rstd: Layout | None, training: bool, *_: Any,
) -> str:  # fmt: skip
    rows = _batch(x, training)
    given = ["c" if t is not None else "" for t in (weight, mean, var)]
    saved = ("c", "c") if training else ("Y", "Z")
    given += [f for f, t in zip(saved, (saved_mean, saved_rstd), strict=True) if t is not None]
    return f"{', '.join([rows, rows, *filter(None, given)])} -> {rows}, c, c"


def _batch(x: Layout, whole: bool) -> str:
    return " ".join(["N" if whole else "n", "c", *positions(x.ndim, "X")])


def _rms_norm(x: Layout, shape: Sequence[int], weight: Layout | None = None, *_: Any) -> str:
    rows, normed, stats = _normalised(x, shape)
    return f"{', '.join([rows, *([normed] if weight is not None else [])])} -> {rows}, {stats}"


def _embedding_bag(
    table: Layout, indices: Layout, offsets: Layout, by_frequency: bool = False, mode: int = 0, sparse: bool = False,
    weights: Layout | None = None, *_: Any, **__: Any,
) -> str | None:  # fmt: skip
    if indices.ndim != 1:
        return None
    return f"V d, N, B{', N' if weights is not None else ''} -> P d, X, Y, {'P d' if mode == 2 else 'Z'}"


def _embedding_bag_dense_backward(
    grad: Layout, indices: Layout, bags: Layout, sizes: Layout, largest: Layout, rows: int, by_frequency: bool,
    mode: int, weights: Layout | None, padding: int = -1,
) -> Made:  # fmt: skip
    line = f"P d, N, X, Y, {'P d' if largest.ndim == 2 else 'Z'}{', N' if weights is not None else ''} -> V d"
    return Made(line, {"V": rows})


def _embedding_bag_backward(
    grad: Layout, indices: Layout, offsets: Layout, bags: Layout, sizes: Layout, largest: Layout, rows: int,
    by_frequency: bool, mode: int, sparse: bool, weights: Layout | None, padding: int = -1,
) -> Made | None:  # fmt: skip
    if sparse:
        return None
    of_weights = ", N" if weights is not None else ""
    line = f"P d, N, B, X, Y, {'P d' if largest.ndim == 2 else 'Z'}{of_weights} -> V d"
    return Made(line, {"V": rows})


def _weight_norm(v: Layout, g: Layout, dim: int = 0) -> str:
    rows, norms = _normed(v, dim)
    return f"{rows}, {norms} -> {rows}, {norms}"


def _weight_norm_backward(grad: Layout, v: Layout, g: Layout, norms: Layout, dim: int) -> str:
    rows, normed = _normed(v, dim)
    return f"{rows}, {rows}, {normed}, {normed} -> {rows}, {normed}"


def _normed(v: Layout, dim: int) -> tuple[str, str]:
    """Dims of a weight, and of its norms over all dims but one."""
    names = letters(v.ndim, [d for d in range(v.ndim) if d != dim % v.ndim])
    return " ".join(names), " ".join(["1" if f.isupper() else f for f in names])


RULES = {
    **_LINES,
    **named("_softmax _log_softmax _safe_softmax", Rule(_softmax)),
    **named("_softmax_backward_data _log_softmax_backward_data", Rule(_softmax_backward)),
    **named("native_layer_norm", Rule(_layer_norm)),
    **named("native_layer_norm_backward", Rule(_layer_norm_backward)),
    **named("embedding_dense_backward", Rule(_embedding_backward, options("lin=0"))),
    **named("native_group_norm", Rule(_group_norm, options("full"))),
    **named("native_group_norm_backward", Rule(_group_norm_backward, options("lin=0 red=n:sum full"))),
    **named("native_batch_norm", Rule(_batch_norm, options("full red=n:same,c:same"))),
    **named("native_batch_norm_backward", Rule(_batch_norm_backward, options("full red=n:sum"))),
    **named("_fused_rms_norm", Rule(_rms_norm)),
    **named("_embedding_bag _embedding_bag_forward_only", Rule(_embedding_bag, options("red=d:same full"))),
    **named("_embedding_bag_backward", Rule(_embedding_bag_backward, options("lin=0"))),
    **named("_embedding_bag_dense_backward", Rule(_embedding_bag_dense_backward, options("lin=0"))),
    **named("_weight_norm_interface", Rule(_weight_norm, options("full"))),
    **named("_weight_norm_interface_backward", Rule(_weight_norm_backward, options("lin=0 full"))),
    **named("nll_loss_forward nll_loss2d_forward", Rule(_nll_loss)),
    **named("nll_loss_backward nll_loss2d_backward", Rule(_nll_loss_backward, options("lin=0"))),
}
