"""clip_grad_norm_ of FSDP1 where parameters are split along more axes than FSDP's.

torch's method sums over FSDP's ranks only. With tensor parallelism every line of them finds another norm, scales by it,
and so the replicas of a parameter come apart.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard._torch import FSDPGradients
from torchshard.layout.placements import R
from torchshard.tensor.mesh import BoundMesh


def clip_grad_norm_(gradients: FSDPGradients, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients so that the norm of all of them, as one vector, is `max_norm` at most.

    Args:
        gradients: of an FSDP module, on this rank.
        max_norm: in the same units as the norm.
        norm_type: of the norm; math.inf for the largest element.

    Returns:
        The norm before, the same on all ranks.

    Raises:
        NotImplementedError: parameters are DTensors on more than one mesh.
    """
    meshes = {taken.layout.mesh for taken in gradients.taken if taken is not None}
    if len(meshes) > 1:
        raise NotImplementedError(f"clip_grad_norm_ of FSDP over DTensors on several meshes: {meshes}")
    mesh: BoundMesh = meshes.pop()
    norm_type = float(norm_type)
    largest = norm_type == math.inf
    total = torch.zeros((), dtype=torch.float32, device=gradients.device)  # whatever this rank has, if anything
    for piece, taken, replicas in gradients.pieces:
        norm = torch.linalg.vector_norm(piece, norm_type, dtype=torch.float32) if piece.numel() else total.new_zeros(())
        if largest:
            total = torch.maximum(total, norm)
            continue
        copies = mesh.size
        if taken is not None:
            copies = math.prod([n for n, p in zip(mesh.shape, taken.layout.placements, strict=True) if p is R])
        total = total + norm**norm_type / (copies * replicas)
    for group in (gradients.group, *(mesh.process_group((axis,)) for axis in range(mesh.ndim))):
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    if not largest:
        total = total ** (1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for piece, *_ in gradients.pieces:
        piece.mul_(scale)
    return total
