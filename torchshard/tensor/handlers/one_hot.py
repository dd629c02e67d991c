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


def is_one_hot(name: str, arguments: Sequence[Any]) -> bool:
    """Whether this is one_hot; raises on every rank what that raises for plain tensors.

    In torch's own implicit_replication() users write comparisons, too; only `classes[..., None] == torch.arange(n)`
    cannot be told from one_hot there.

    Args:
        name: of an operator for which torch itself may have made a plain tensor.
        arguments: of its call.

    Raises:
        RuntimeError: a class below 0, or from n on.
    """
    if name != "eq.Tensor":
        return False
    classes, numbers = arguments
    if not isinstance(classes, DTensor) or classes.dtype != torch.int64 or classes.shape[-1:] != (1,):
        return False
    if not _counts(numbers):
        return False
    below, largest = _extremes(classes)
    if below >= 0 or largest >= len(numbers):
        raise RuntimeError(f"Class values must be {'non-negative' if below >= 0 else 'smaller than num_classes'}.")
    return True


def _extremes(classes: DTensor) -> list[int]:
    """How far the smallest class of all ranks is below -1, and the largest one; -1 where there are none.

    Below -1, as every number has that distance: that of the smallest number to 0 is none.
    """
    layout = classes._spec
    mesh = layout.mesh
    if is_traced(classes._local_tensor) or mesh.coordinate is None:
        return [int(x) for x in (~classes.min(), classes.max())] if classes.numel() else [-1, -1]
    assert isinstance(mesh, BoundMesh), "a layout that belongs to no DeviceMesh"
    local = part(classes, layout.sharding.without_partial())
    least, most = torch.aminmax(local) if local.numel() else local.new_tensor([0, -1])
    axes = tuple(sorted([a for split in layout.sharding.splits.values() for a in split]))
    found = torch.stack((~least, most))
    extremes: list[int] = (collectives.all_reduce(found, "max", mesh.group(axes)) if axes else found).tolist()
    return extremes


def _counts(x: Tensor) -> bool:
    """Whether that is a plain 0, 1, 2, ..."""
    if isinstance(x, DTensor) or x.ndim != 1 or x.dtype != torch.int64:
        return False
    return torch.equal(x, torch.arange(len(x), device=x.device))
