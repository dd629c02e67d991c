"""Memory and flat views of tensors."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from torchshard._torch.finding import find_once


def memory_of(tensor: torch.Tensor) -> int:
    """What two tensors have in common if they share memory (UntypedStorage._cdata, 2.11-2.15)."""
    return int(tensor.untyped_storage()._cdata)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor without gaps, where they lie; views keep a single element's stride, whatever it is."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects share this memory (torch._C._storage_Use_Count, 2.11-2.15).

    Without it, a number that no one can reach: memory is then never written again.
    """
    count = find_once("_C._storage_Use_Count")
    return int(count(storage._cdata)) if count else 1 << 30


def aliasing() -> AbstractContextManager[object]:
    """Views made in this context are plain tensors that share memory: autograd does not know them as views.

    torch._C._AutoDispatchBelowADInplaceOrView (2.11-2.15). Such a `.grad` can be detached in place as any other, and
    costs half as much to make. Without it they are ordinary views.
    """
    guard = find_once("_C._AutoDispatchBelowADInplaceOrView")
    return cast(AbstractContextManager[object], guard()) if guard else nullcontext()


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous tensors of one dtype as one flat tensor (torch._C._nn.flatten_dense_tensors, 2.11-2.15).

    Three times faster than the public torch.cat for many small ones, which is the fallback.
    """
    found = find_once("_C._nn.flatten_dense_tensors")
    return cast(torch.Tensor, found(tensors) if found else torch.cat([t.reshape(-1) for t in tensors]))


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of a flat tensor in the shapes of `like` (torch._C._nn.unflatten_dense_tensors, 2.11-2.15)."""
    found = find_once("_C._nn.unflatten_dense_tensors")
    if found:
        return cast(Sequence[torch.Tensor], found(flat, like))
    return [piece.view_as(t) for piece, t in zip(flat.split([t.numel() for t in like]), like, strict=True)]


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target in one call (torch._foreach_copy_, 2.11-2.15).

    Without it one by one; so too where it refuses targets whose values are conjugated or negated when they are read.
    """
    if found := find_once("_foreach_copy_"):
        try:
            found(targets, sources)
            return
        except RuntimeError:
            pass
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def take_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], alpha: float, beta: float) -> None:
    """Make each target alpha times its source plus beta times itself (torch._foreach_mul_ and add_, 2.11-2.15)."""
    scale, add = find_once("_foreach_mul_"), find_once("_foreach_add_")
    if not (scale and add):
        for target, source in zip(targets, sources, strict=True):
            if beta == 0.0:
                torch.mul(source, alpha, out=target)
            else:
                target.mul_(beta).add_(source, alpha=alpha)
    elif beta == 0.0:
        copy_all(targets, sources)
        if alpha != 1.0:
            scale(targets, alpha)
    else:
        scale(targets, beta)
        add(targets, sources, alpha=alpha)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """In this context torch.autocast leaves dtypes alone.

    It makes torch.cat and torch.stack refuse half-precision numbers of the other kind, which some values travel as.
    Whether it is on is asked first (torch._C._is_any_autocast_enabled, 2.11-2.15): to switch it off takes microseconds.
    """
    found = find_once("_C._is_any_autocast_enabled")
    if (found and not found()) or not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def device_index(device: Any) -> int:
    """Number of a CUDA device given as int, str or torch.device (torch._utils._get_device_index, 2.11-2.15)."""
    from torch._utils import _get_device_index

    return _get_device_index(device, True)
