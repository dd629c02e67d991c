"""one_hot, which torch makes of `classes == arange(n)` for tensor classes: without asking for classes that are none."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import is_traced
from torchshard.comm import collectives
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import part
from torchshard.tensor.mesh import BoundMesh


def require_classes(name: str, arguments: Sequence[Any]) -> None:
    """Raise on every rank what one_hot raises for plain tensors.

    In torch's own implicit_replication() users write comparisons, too; only `classes[..., None] == torch.arange(n)`
    cannot be told from one_hot there.

    Args:
        name: of an operator for which torch itself may have made a plain tensor.
        arguments: of its call.

    Raises:
        RuntimeError: a class below 0, or from n on.
    """
    if name != "eq.Tensor":
        return
    classes, numbers = arguments
    if not isinstance(classes, DTensor) or classes.shape[-1:] != (1,) or not _counts(numbers):
        return
    if wrong := _wrong(classes, len(numbers)):
        raise RuntimeError(f"Class values must be {'non-negative' if wrong > 1 else 'smaller than num_classes'}.")


def _wrong(classes: DTensor, count: int) -> int:
    """What is wrong with some class on some rank: 0 nothing, 1 it is too large, 2 and more below 0."""
    layout = classes._spec
    mesh = layout.mesh
    if is_traced(classes._local_tensor) or mesh.coordinate is None:
        return bool(((classes < 0) | (classes >= count)).any()) and 1 + bool((classes < 0).any())
    assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
    local = part(classes, layout.sharding.without_partial())
    wrong = (local < 0).any() * 2.0 + (local >= count).any()
    axes = tuple(sorted([a for split in layout.sharding.splits.values() for a in split]))
    return int(collectives.all_reduce_largest(wrong, mesh.group(axes)) if axes else wrong)


def _counts(x: Tensor) -> bool:
    """Whether that is a plain 0, 1, 2, ..."""
    if isinstance(x, DTensor) or x.ndim != 1 or x.dtype != torch.int64:
        return False
    return torch.equal(x, torch.arange(len(x), device=x.device))
