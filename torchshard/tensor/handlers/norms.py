"""Norms and maxima of lists of tensors, as gradient clipping takes them; the tensors may live on several meshes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import is_traced
from torchshard.layout.layout import Sharding
from torchshard.layout.placements import Partial, R
from torchshard.layout.reductions import exists_of_nothing
from torchshard.rules.reducing import reduction_of_norms
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.handlers.parts import reduced
from torchshard.tensor.layout import TensorLayout, layout_for
from torchshard.unsupported import unsupported

aten = torch.ops.aten


def _foreach_norm(func: Any, tensors: Any, order: float = 2, dtype: Any = None) -> Any:
    """Norms of all parts, by one call of the kernel for lists, as terms of those of the tensors."""
    op = reduction_of_norms(order)
    if not (exists_of_nothing(op) and all(map(_has_part, tensors))):
        return [aten.linalg_vector_norm(x, order, dtype=dtype) for x in tensors]
    if any(x._spec.sharding.partial for x in tensors):
        tensors = reduced(*tensors)
    norms = func([x._local_tensor for x in tensors], order, dtype=dtype)
    splits = dict.fromkeys(x._spec.sharding for x in tensors)
    terms = {s: s.mesh.sharding([p if p is R else Partial(op) for p in s.placements]) for s in splits}
    return [_term(norm, terms[x._spec.sharding], x._spec) for norm, x in zip(norms, tensors, strict=True)]


def _has_part(x: Any) -> bool:
    return type(x) is DTensor and x._spec.mesh.coordinate is not None and not is_traced(x._local_tensor)


def _term(norm: Tensor, sharding: Sharding, of: TensorLayout) -> DTensor:
    layout = layout_for(sharding, (), (), norm.dtype)
    return wrap(norm, layout.marked(assumed=of.assumed) if of.assumed else layout)


def _foreach_max(func: Any, tensors: Any) -> Any:
    return [aten.max(x) for x in tensors]


def _foreach_powsum(func: Any, tensors: Any, order: float = 2, dtype: Any = None) -> Any:
    return [(x if dtype is None else x.to(dtype)).abs().pow(order).sum() for x in tensors]


def _stack(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Numbers of several meshes as one plain tensor: no mesh has them all, but this rank knows each of them.

    clip_grad_norm_ makes the total of all norms so. Where gradients are wanted, the meshes must be one.
    """
    numbers = all(type(x) is DTensor and x.ndim == 0 for x in tensors)
    if not numbers or len({x._spec.mesh for x in tensors}) == 1 or any(x.requires_grad for x in tensors):
        return NotImplemented
    known = [x._local_tensor for x in reduced(*tensors)]
    if any(x._spec.mesh.coordinate is None for x in tensors):
        raise unsupported(
            "A rank outside of a mesh does not know the norms of the tensors on it, nor the total.",
            expected="tensors of one mesh, or meshes that this rank belongs to",
            got=", ".join(sorted({str(x._spec.mesh) for x in tensors})),
            fix="clip the gradients of each mesh on their own",
        )
    return func(known, dim)


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "_foreach_norm.Scalar": _foreach_norm,
    "_foreach_max.default": _foreach_max,
    "_foreach_powsum.Scalar": _foreach_powsum,
    "stack.default": _stack,
}
