"""A number that is added to terms in place: by the form that has it for an operand, of which there are terms, too."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import ForKind

aten = torch.ops.aten


def _of_terms(form: Any) -> Callable[..., Any]:
    def as_operand(func: Any, x: DTensor, other: Any, alpha: Any = 1) -> Any:
        return form(x, other, alpha=alpha)

    def choose(func: Any, x: Any, *_: Any, **__: Any) -> Callable[..., Any] | None:
        return as_operand if type(x) is DTensor and x._spec.sharding.partial else None

    return choose


HANDLERS: Mapping[str, ForKind] = {
    "add_.Scalar": ForKind(_of_terms(aten.add_.Tensor)),
    "sub_.Scalar": ForKind(_of_terms(aten.sub_.Tensor)),
}
