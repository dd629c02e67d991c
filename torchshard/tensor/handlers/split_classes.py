"""Negative log likelihood of classes that are split between ranks.

Each rank's kernel sees the targets that are among its classes and ignores the others, so that loss and total weight are
sums over ranks. No logits are gathered.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import is_traced
from torchshard.layout.layout import Sharding
from torchshard.layout.placements import Partial, R, Shard
from torchshard.rules.losses import MEAN, NONE, SUM
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.gradients.autograd import redistribute
from torchshard.tensor.handlers import losses
from torchshard.tensor.handlers.parts import eliminated, in_boxes, made_of, part
from torchshard.tensor.handlers.softmax import note_sums

_IGNORED = -100  # what a rank's kernel is to ignore


def _nll_loss(func: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
    """Loss and total weight; the mean is a sum over a total weight, and both are sums over ranks."""
    x, dim = _split_classes(x)
    if dim is None or target.dtype is not torch.int64:
        return losses.nll_loss(func, x, target, weight, reduction, ignore)
    split = _SplitClasses(x, dim)
    loss, total = split.terms(func, target, weight, NONE if reduction == NONE else SUM, ignore)
    if reduction != MEAN:
        return redistribute(loss, split.reduced(loss)), total
    return losses.mean(loss, total)


def _nll_loss_backward(
    func: Any, grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int, total: Any
) -> Any:
    x, dim = _split_classes(x)
    if dim is None:
        return NotImplemented
    return _SplitClasses(x, dim).backward(func, grad, target, weight, reduction, ignore, total)


class _SplitClasses:
    """Scores of which the dim of classes is split, and what follows for all that goes with them."""

    def __init__(self, x: DTensor, dim: int) -> None:
        layout = x._spec
        self.sharding = layout.sharding.without_partial()
        self.shape, self.dim, self.axes = layout.shape, dim, self.sharding.splits[dim]
        self.scores = part(x, self.sharding)
        box = layout.to(self.sharding).box
        assert box is not None, "a rank outside of the mesh takes part"
        self.start, self.count, self.classes = box.offset[dim], box.size[dim], layout.shape[dim]
        self.of_target, _ = eliminated(self.sharding, (dim,), False)

    def terms(self, func: Any, target: Any, weight: Any, reduction: int, ignore: int) -> tuple[DTensor, DTensor]:
        """Loss (a sum, or one for each target) and total weight, each a sum over the ranks that hold other terms."""
        self._require_shapes(func, target, weight, reduction, ignore)
        target, weight = self._whole(target, weight)
        loss, total = func(self.scores, self._targets(target, ignore), self._weights(weight), reduction, _IGNORED)
        term = [Partial("sum") if isinstance(p, Shard) else R for p in self.sharding.placements]
        scalar = self.sharding.mesh.sharding(term)
        if reduction == SUM:
            return made_of(loss, scalar, ()), made_of(total, scalar, ())
        one_each = [Partial("sum") if a in self.axes else p for a, p in enumerate(self.of_target.placements)]
        shape = tuple([n for d, n in enumerate(self.shape) if d != self.dim])
        sharding = self.sharding.mesh.sharding(one_each, dict(self.of_target.splits))
        return made_of(loss, sharding, shape), made_of(total, self.sharding.mesh.replicated(), ())

    def reduced(self, loss: DTensor) -> Sharding:
        """The sharding of a loss whose terms along the axes of the classes have been added up."""
        sharding = loss._spec.sharding
        placements = [R if a in self.axes else p for a, p in enumerate(sharding.placements)]
        return sharding.mesh.sharding(placements, dict(sharding.splits))

    def backward(
        self, func: Any, grad: Any, target: Any, weight: Any, reduction: int, ignore: int, total: Any
    ) -> DTensor:
        """The gradient of the scores, split as they are; each row has one element, which every rank knows."""
        grad = part(grad, self.of_target if reduction == NONE else None)
        target, weight = self._whole(target, weight)
        targets, weights = self._targets(target, ignore), self._weights(weight)
        divisor = part(total) if reduction == MEAN else self.scores.new_zeros(())  # which is not read then
        local = func(grad, self.scores, targets, weights, reduction, _IGNORED, divisor)
        made = made_of(local, self.sharding, self.shape)
        if not is_traced(local):
            note_sums(made, self._one_a_row(grad / divisor if reduction == MEAN else grad, target, weight, ignore))
        return made

    def _one_a_row(self, grad: Tensor, target: Tensor, weight: Tensor | None, ignore: int) -> Tensor:
        """The one element that a row of the gradient has on some rank; zero where the target is ignored."""
        ignored = target == ignore
        if weight is not None:
            grad = grad * weight[target.masked_fill(ignored, 0)]
        return (-grad).expand(target.shape).masked_fill(ignored, 0).unsqueeze(self.dim)

    def _whole(self, target: Any, weight: Any) -> tuple[Tensor, Tensor | None]:
        """The targets of this rank's rows, and the weights of all classes."""
        return part(target, self.of_target).long(), None if weight is None else part(weight)

    def _require_shapes(self, func: Any, target: Any, weight: Any, reduction: int, ignore: int) -> None:
        """Raise what the operator raises for shapes that do not go together: kernels see those of parts."""
        batch = self.shape[: self.dim] + self.shape[self.dim + 1 :]
        if tuple(target.shape) == batch and (weight is None or tuple(weight.shape) == (self.classes,)):
            return
        asked = [x if x is None else self.scores.new_zeros((), dtype=x.dtype).expand(x.shape) for x in (target, weight)]
        func(self.scores.new_zeros(()).expand(self.shape), *asked, reduction, ignore)

    def _targets(self, t: Tensor, ignore: int) -> Tensor:
        """Targets as numbers of this rank's classes; a number that is no class at all is none here either."""
        mine = (t >= self.start) & (t < self.start + self.count)
        elsewhere = (t >= 0) & (t < self.classes) & ~mine | (t == ignore)
        none = torch.where(t == _IGNORED, self.count, t)
        return torch.where(mine, t - self.start, none).masked_fill_(elsewhere, _IGNORED)

    def _weights(self, weight: Tensor | None) -> Tensor | None:
        return None if weight is None else weight.narrow(0, self.start, self.count)


def _split_classes(x: Any) -> tuple[Any, int | None]:
    """Scores in boxes, and the dim of classes where it is split; None where it is not, and the rule serves."""
    if type(x) is not DTensor or not x.ndim or x._spec.mesh.coordinate is None:
        return x, None
    dim = 1 if x.ndim > 1 else 0
    if dim not in x._spec.sharding.splits:
        return x, None
    x = in_boxes(x)
    return x, dim if dim in x._spec.sharding.splits else None


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "nll_loss_forward.default": _nll_loss,
    "nll_loss2d_forward.default": _nll_loss,
    "nll_loss_backward.default": _nll_loss_backward,
    "nll_loss2d_backward.default": _nll_loss_backward,
}
