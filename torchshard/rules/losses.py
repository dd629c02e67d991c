"""Losses: element by element, then nothing, a mean or a sum; the mean is over all ranks' elements, not one rank's."""

import math
from collections.abc import Callable
from typing import Any

from torchshard.layout.layout import Layout
from torchshard.rules.reducing import argument, broadcast_shape
from torchshard.rules.rule import Made, Rule, named, options, reduces

NONE, MEAN, SUM = 0, 1, 2  # as ATen numbers reductions


def _loss(at: int) -> Callable[..., Made]:
    """A loss whose reduction is argument number `at`; a mean is the sum over this rank's part, over the whole count."""

    def build(*args: Any, **kwargs: Any) -> Made:
        reduction = argument(args, kwargs, at + 1, "reduction", MEAN)
        layouts = [a for a in (*args, *kwargs.values()) if isinstance(a, Layout)]
        operands = ", ".join(["..."] * len(layouts))
        if reduction == NONE:
            return Made(f"{operands} -> ...")
        count = math.prod(broadcast_shape([x.shape for x in layouts]))
        more = {"reduces": reduces({"...": "sum"})}
        return Made(f"{operands} -> ", options=more, local=_summed(at, count) if reduction == MEAN else None)

    return build


def _summed(at: int, count: int) -> Callable[..., Any]:
    def local(op: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > at:
            args = (*args[:at], SUM, *args[at + 1 :])
        else:
            kwargs["reduction"] = SUM
        made = op(*args, **kwargs)
        if count == 1:
            return made
        return (made[0].div_(count), *made[1:]) if isinstance(made, tuple) else made.div_(count)

    return local


def _loss_backward(at: int) -> Callable[..., Made]:
    """The gradient of a mean over all ranks' elements: that of the sum, with the gradient divided by their count."""

    def build(*args: Any, **kwargs: Any) -> Made:
        reduction = argument(args, kwargs, at + 1, "reduction", MEAN)
        layouts = [a for a in (*args, *kwargs.values()) if isinstance(a, Layout)]
        line = f"{', '.join(['...'] * len(layouts))} -> ..."
        count = math.prod(broadcast_shape([x.shape for x in layouts[1:]]))
        return Made(line, local=_summed_backward(at, count) if reduction == MEAN else None)

    return build


def _summed_backward(at: int, count: int) -> Callable[..., Any]:
    summed = _summed(at, 1)
    return lambda op, grad, *args, **kwargs: summed(op, grad / max(count, 1), *args, **kwargs)


def _margin_loss(at: int, results: int) -> Callable[..., Made]:
    """A loss of rows of scores, each handled as a whole; a second result has the shape of the rows."""

    def build(x: Layout, target: Layout, *args: Any, **kwargs: Any) -> Made:
        reduction = argument(args, kwargs, at - 1, "reduction", MEAN)
        weights = [a for a in (*args, *kwargs.values()) if isinstance(a, Layout)]
        row = "n C" if x.ndim == 2 else "C"
        operands = [row, row if target.ndim == x.ndim else row[:-1], *["C"] * len(weights)]
        loss = "n" if reduction == NONE and x.ndim == 2 else ""
        line = f"{', '.join(operands)} -> {', '.join([loss, row][:results])}"
        count = x.shape[0] if x.ndim == 2 else 1
        more = {"reduces": reduces({"n": "sum"})}
        return Made(line, options=more, local=_summed(at, count) if reduction == MEAN else None)

    return build


def _margin_loss_backward(at: int) -> Callable[..., Made]:
    def build(grad: Layout, x: Layout, target: Layout, *args: Any, **kwargs: Any) -> Made:
        reduction = argument(args, kwargs, at - 2, "reduction", MEAN)
        row = "n C" if x.ndim == 2 else "C"
        others = [a for a in (*args, *kwargs.values()) if isinstance(a, Layout)]
        operands = ["n" if grad.ndim else "", row, row if target.ndim == x.ndim else row[:-1]]
        operands += [row if o.shape == x.shape else "C" for o in others]
        count = x.shape[0] if x.ndim == 2 else 1
        return Made(f"{', '.join(operands)} -> {row}", local=_summed_backward(at, count) if reduction == MEAN else None)

    return build


RULES = {
    **named("mse_loss smooth_l1_loss huber_loss soft_margin_loss", Rule(_loss(2))),
    **named("binary_cross_entropy", Rule(_loss(3))),
    **named("binary_cross_entropy_with_logits", Rule(_loss(4))),
    **named("multi_margin_loss", Rule(_margin_loss(5, 1), options("full"))),
    **named("multilabel_margin_loss_forward", Rule(_margin_loss(2, 2), options("full"))),
    **named("multi_margin_loss_backward", Rule(_margin_loss_backward(6), options("lin=0 full"))),
    **named("multilabel_margin_loss_backward", Rule(_margin_loss_backward(3), options("lin=0 full"))),
    **named("mse_loss_backward smooth_l1_loss_backward", Rule(_loss_backward(3), options("lin=0"))),
    **named("huber_loss_backward soft_margin_loss_backward", Rule(_loss_backward(3), options("lin=0"))),
    **named("binary_cross_entropy_backward", Rule(_loss_backward(4), options("lin=0"))),
}
