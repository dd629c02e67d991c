"""Tensors made of others, as quantized weights are: ranks tell one another those, and gradients are refused."""

from collections.abc import Iterable

import torch

from torchshard.tensor.sharded.sharded_tensor import ShardedTensor
from torchshard.tensor.sharded.specs import upstream


def is_composite(t: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper of others, with the same values on every rank: no DTensor or ShardedTensor."""
    return hasattr(type(t), "__tensor_flatten__") and not hasattr(t, "device_mesh") and not isinstance(t, ShardedTensor)


def is_spread(t: torch.Tensor) -> bool:
    """Whether each rank holds other parts of a tensor: a DTensor or ShardedTensor, of torch's classes too."""
    if isinstance(t, ShardedTensor | upstream.ShardedTensor):
        return True
    return hasattr(type(t), "__tensor_flatten__") and not is_composite(t)


def parts(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """These tensors; in place of one made of others, as quantized weights are, those that it is made of."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, t in named:
        if is_composite(t):
            inner, _ = t.__tensor_flatten__()  # type: ignore[attr-defined]
            found += parts([(f"{name}.{each}", getattr(t, each)) for each in inner])
        else:
            found.append((name, t))
    return found


def require_plain(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError for a parameter made of other tensors whose gradient would have to be averaged."""
    if found := next(((n, t) for n, t in named if t.requires_grad and is_composite(t)), None):
        raise ValueError(
            f"DistributedDataParallel: the parameter {found[0]} is a {type(found[1]).__name__}, made of other tensors, "
            "and requires a gradient, which a bucket cannot hold: freeze it by requires_grad_(False) before the module "
            "is wrapped, and train others, as adapters do; or train it as a plain tensor"
        )
