"""Tensors as transports take them: dense, with nothing put off, and in a dtype that every transport knows."""

import torch
from torch import Tensor

# What every transport takes as it is; other types travel as one of these of the same width (complex: as pairs).
CARRIED = {torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8}
_SAME_WIDTH = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def carried_out(x: Tensor) -> Tensor:
    """With the conjugation or negation carried out that torch may have put off.

    In operators of DTensors torch does not do it for those that join, pad or mask.
    """
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def dense(x: Tensor) -> Tensor:
    """Without gaps, and with nothing put off."""
    return carried_out(x).contiguous()


def carried(x: Tensor) -> Tensor:
    """The same bits in a type that travels; complex numbers get a last dim of 2."""
    if x.is_complex():
        return torch.view_as_real(dense(x))
    if _is_compiled(x, x.dtype):
        return dense(x).to(torch.uint8)
    return dense(x).view(_SAME_WIDTH[x.itemsize])


def uncarried(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What has travelled, in its own dtype."""
    if _is_compiled(x, dtype):
        return x.to(dtype)
    if not dtype.is_complex:
        return x.view(dtype)
    pairs = torch.view_as_complex(x)
    if x.__class__ is not Tensor:
        return pairs
    # No view of real numbers for autograd: Dynamo would make that view of them, where they have another shape.
    alone = torch.empty(0, dtype=dtype, device=x.device)
    return alone.set_(pairs.untyped_storage(), pairs.storage_offset(), pairs.shape, pairs.stride())


def _is_compiled(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether these truth values are traced: inductor has no code for bytes that are read as such (2.11-2.15)."""
    return dtype is torch.bool and x.__class__ is not Tensor
