"""How parts of tensors travel: in types that every transport takes, one after another, padded to equal lengths."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchshard._torch import without_autocast
from torchshard.comm.group import Group

CARRIED = {torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8}
"""What every transport takes as it is; other types travel as one of these of the same width (complex: as pairs)."""

_SAME_WIDTH = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}

_Item = TypeVar("_Item")


def numel(shape: Sequence[int]) -> int:
    """How many elements a tensor of this shape has."""
    count = 1
    for n in shape:
        count *= n
    return count


def by_seat(items: Sequence[_Item], group: Group) -> Sequence[_Item]:
    """One item for each rank, from the order of the line into that of the process group."""
    if group.seats is None:
        return items
    return [items[place] for place in sorted(range(group.size), key=group.seats.__getitem__)]


def cut(x: Tensor, dim: int, lengths: Sequence[int], group: Group) -> tuple[Tensor, list[int]]:
    """The pieces of `x` along a dim, one after another in the order of the process group, and the elements of each.

    Along the first dim they lie so, and nothing is copied.
    """
    if dim == 0 and group.seats is None:
        row = numel(x.shape[1:])
        return x.contiguous().view(-1), [n * row for n in lengths]
    blocks = by_seat(x.split_with_sizes(list(lengths), dim), group)
    return one_after_another(blocks), [block.numel() for block in blocks]


def one_after_another(blocks: Sequence[Tensor]) -> Tensor:
    """All elements of these blocks, one block after another."""
    if all(block.shape == blocks[0].shape for block in blocks):  # copied once, where flattening first copies twice
        return joined(torch.stack, blocks).reshape(-1)
    return joined(torch.cat, [block.reshape(-1) for block in blocks])


def padded(x: Tensor, dim: int, length: int) -> Tensor:
    """With zeros behind, so that it is of this length along a dim."""
    missing = length - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return joined(torch.cat, [x, x.new_zeros(shape)], dim)


def unpadded(x: Tensor, dim: int, length: int) -> Tensor:
    """Without what `padded` has put behind it."""
    return x if x.shape[dim] == length else x.narrow(dim, 0, length)


def joined(join: Callable[..., Tensor], pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.cat or torch.stack: a move under torch.autocast is a move all the same."""
    with without_autocast(pieces[0].device):
        return join(pieces, dim)


def carried_out(x: Tensor) -> Tensor:
    """With the conjugation or negation carried out that torch may have put off; what is on its way, once it is here.

    In operators of DTensors torch does not do it for those that join, pad or mask. And what stands for a tensor that is
    on its way, and so can be waited for, would not go the way of one that is here, as another rank's may be.
    """
    if x.__class__ is not Tensor and (wait := getattr(x, "wait", None)) is not None:
        x = wait()
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
    return carried_out(x).view(_SAME_WIDTH[x.itemsize]).contiguous()  # some types torch cannot copy


def uncarried(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What `carried` was given, of this type, from what it gave."""
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
