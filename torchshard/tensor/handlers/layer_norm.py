"""LayerNorm and RMSNorm of split rows: each rank says a few numbers of its pieces; in backward a sum or two a row.

Where rows are whole on every rank, the rule is as good, and is left to run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard.layout.placements import Partial, R, Shard
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import made_of, part, split_along, wide
from torchshard.tensor.handlers.rows import Rows


class _Normalised(Rows):
    """Rows that are normalised, and what follows for weights, which have their dims alone."""

    def __init__(self, x: DTensor, count: int) -> None:
        lead = x.ndim - count
        super().__init__(x._spec, tuple(range(lead, x.ndim)))
        mesh, placed = self.sharding.mesh, self.sharding.placements
        splits = {d - lead: axes for d, axes in self.sharding.splits.items() if d >= lead}
        cut = [p.at(p.dim - lead) if isinstance(p, Shard) and p.dim >= lead else R for p in placed]
        over = [isinstance(p, Shard) and p.dim < lead for p in placed]  # what differs between ranks is added up
        self.of_weights = mesh.sharding(cut, splits)
        self._of_gradients = mesh.sharding([Partial("sum") if o else p for o, p in zip(over, cut, strict=True)], splits)
        self._leading = tuple(range(lead))

    def weights(self, x: Any) -> Any:
        """This rank's part of a weight, if there is one."""
        return None if x is None else wide(part(x, self.of_weights))

    def gradient(self, local: Tensor, dtype: torch.dtype) -> DTensor:
        """That of a weight, from this rank's gradients of all that it was multiplied with, or added to."""
        if not self.outside and self._leading:
            local = local.sum(self._leading)
        return made_of(local.to(dtype), self._of_gradients, self.shape[len(self._leading) :])


def _forward(func: Any, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    if not _fits(x, shape, weight, bias):
        return NotImplemented
    rows, (dtype, *kinds) = _Normalised(x, len(shape)), _dtypes(x, weight, lambda a, w: func(a, [1], w, w, eps))
    made: Sequence[Tensor] = [x._local_tensor.new_empty(0)] * 3
    if not rows.outside:
        piece = rows.piece(x)
        mean, squares = rows.moments(piece)
        rstd = torch.rsqrt(squares / rows.length + eps)
        result = (piece - mean) * rstd
        result = result if weight is None else result * rows.weights(weight)
        made = result if bias is None else result + rows.weights(bias), mean, rstd
    return rows.wrapped(made[0], dtype), *[rows.of_each(t, kind) for t, kind in zip(made[1:], kinds, strict=True)]


def _rms(func: Any, x: Any, shape: Sequence[int], weight: Any, eps: float | None) -> Any:
    if not _fits(x, shape, weight):
        return NotImplemented
    rows, (dtype, kind) = _Normalised(x, len(shape)), _dtypes(x, weight, lambda a, w: func(a, [1], w, eps))
    result = rstd = x._local_tensor.new_empty(0)
    if not rows.outside:
        piece = rows.piece(x)
        least = torch.finfo(x.dtype).eps if eps is None else eps
        rstd = torch.rsqrt(rows.total(piece.square()) / rows.length + least)
        result = piece * rstd
        result = result if weight is None else result * rows.weights(weight)
    return rows.wrapped(result, dtype), rows.of_each(rstd, kind)


def _backward(
    func: Any, grad: Any, x: Any, shape: Sequence[int], mean: Any, rstd: Any, weight: Any, bias: Any,
    wanted: Sequence[bool],
) -> Any:  # fmt: skip
    if not _fits(x, shape, weight, bias) or grad.shape != x.shape:
        return NotImplemented
    return _gradients(grad, x, len(shape), mean, rstd, (weight, bias), wanted)


def _rms_backward(
    func: Any, grad: Any, x: Any, shape: Sequence[int], rstd: Any, weight: Any, wanted: Sequence[bool]
) -> Any:
    if not _fits(x, shape, weight) or grad.shape != x.shape:
        return NotImplemented
    return _gradients(grad, x, len(shape), None, rstd, (weight,), wanted)


def _gradients(
    grad: DTensor, x: DTensor, count: int, mean: DTensor | None, rstd: DTensor, weights: Sequence[Any],
    wanted: Sequence[bool],
) -> tuple[DTensor | None, ...]:  # fmt: skip
    """Those of the rows, and of the weights that they were multiplied with and added to; None where not wanted."""
    rows = _Normalised(x, count)
    of_x = of_weight = of_bias = x._local_tensor.new_empty(0)
    if not rows.outside:
        of_bias, spread = rows.piece(grad), rows.each(rstd)
        normal = (rows.piece(x) - (0 if mean is None else rows.each(mean))) * spread
        of_weight = of_bias * normal
        if wanted[0]:
            scaled = of_bias if weights[0] is None else of_bias * rows.weights(weights[0])
            sums = [scaled * normal] if mean is None else [scaled * normal, scaled]
            totals = rows.added(torch.stack([t.sum(rows.dims, keepdim=True) for t in sums])) / rows.length
            of_x = (scaled - normal * totals[0] - (0 if mean is None else totals[1])) * spread
    found = [rows.wrapped(of_x, x.dtype) if wanted[0] else None]
    for weight, local, asked in zip(weights, (of_weight, of_bias), wanted[1:], strict=False):
        found.append(rows.gradient(local, (x if weight is None else weight).dtype) if asked else None)
    return tuple(found)


def _fits(x: Any, shape: Sequence[int], *weights: Any) -> bool:
    """Whether rows are split, and all that is given goes together: else the rule serves, or says what is wrong."""
    of_rows = tuple(shape)
    if (
        type(x) is not DTensor
        or not x.numel()
        or not x.is_floating_point()
        or x.shape[x.ndim - len(shape) :] != of_rows
    ):
        return False
    dims = range(x.ndim - len(shape), x.ndim)
    return split_along(x, dims) and all(t is None or (type(t) is DTensor and t.shape == of_rows) for t in weights)


def _dtypes(x: DTensor, weight: Any, run: Callable[[Tensor, Any], Sequence[Tensor]]) -> Sequence[torch.dtype]:
    """Those of the results, as the kernel has them: told by one element, which it refuses as it would refuse all."""
    like = x._local_tensor.new_ones(1), None if weight is None else weight._local_tensor.new_ones(1)
    return [t.dtype for t in run(*like)]


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "native_layer_norm.default": _forward,
    "native_layer_norm_backward.default": _backward,
    "_fused_rms_norm.default": _rms,
    "_fused_rms_norm_backward.default": _rms_backward,
}
