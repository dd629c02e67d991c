"""The bucket as communication hooks see it: what dist.GradBucket is to torch's reducer."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


class GradBucket(dist.GradBucket):  # type: ignore[misc,name-defined]
    """One full bucket, with the methods of dist.GradBucket; made by `make`, as torch's class has no constructor.

    A subclass, so that hooks that ask for torch's class find it; nothing of torch's is behind it. Complex gradients are
    shown as pairs of real ones, in a last dim of 2, as torch's reducer does: hooks convert to real dtypes.
    """

    _index: int
    _buffer: torch.Tensor
    _views: Callable[[], Sequence[torch.Tensor]]
    _own: torch.Tensor
    _parameters: list[torch.Tensor]
    _last: bool
    _is_complex: bool
    gave_parameters = False
    """Whether the hook, which may write to them, has asked for the parameters."""

    @classmethod
    def make(
        cls,
        index: int,
        buffer: torch.Tensor,
        views: Callable[[], Sequence[torch.Tensor]],
        parameters: list[torch.Tensor],
        last: bool,
    ) -> "GradBucket":
        """A bucket for a hook.

        Args:
            index: which bucket it is, in the order in which they are reduced.
            buffer: all gradients, flat; or one sparse gradient.
            views: gives the gradients in the buffer, in the shapes of the parameters, if somebody asks.
            parameters: theirs.
            last: whether it is the last one of this backward.
        """
        made: GradBucket = cls.__new__(cls)
        made._is_complex = buffer.is_complex() and not buffer.is_sparse
        shown = torch.view_as_real(buffer).flatten() if made._is_complex else buffer
        made._index, made._buffer, made._own, made._views = index, shown, shown, views
        made._parameters, made._last = parameters, last
        return made

    def index(self) -> int:
        """Which bucket it is; buckets are reduced in this order."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients in one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor in place of the flat one, of the same length and maybe of another dtype."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Each parameter's part of the buffer, in the parameter's shape."""
        views = [torch.view_as_real(v) if self._is_complex else v for v in self._views()]
        if self._buffer is self._own or self._own.is_sparse:
            return views
        begin = self._own.storage_offset()
        return [
            self._buffer.as_strided(v.shape, v.stride(), self._buffer.storage_offset() + v.storage_offset() - begin)
            for v in views
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients`."""
        self.gave_parameters = True
        return self._parameters

    def is_last(self) -> bool:
        """Whether no other bucket will follow in this backward."""
        return self._last

    def fits(self, result: object) -> bool:
        """Whether this can take the place of the gradients: as many numbers, of any real dtype, in any form."""
        own = self._own
        if result is own:
            return True
        if not isinstance(result, torch.Tensor) or result.is_meta:
            return False
        if own.is_sparse:
            return result.shape == own.shape
        if result.is_complex():
            return self._is_complex and 2 * result.numel() == own.numel()
        return result.numel() == own.numel() and result.layout is torch.strided

    def unfit_text(self, hook: object, result: object) -> str:
        """A hook has given something that cannot take the place of the gradients."""
        return (
            f"the future that the communication hook {getattr(hook, '__qualname__', hook)} returns for bucket "
            f"{self._index} must hold one tensor in the shape of the bucket's buffer, {_tensor_text(self._own)}, but "
            f"holds {_tensor_text(result) if isinstance(result, torch.Tensor) else type(result).__qualname__}"
        )

    def complete(self, result: torch.Tensor) -> torch.Tensor:
        """What a hook gives for the buffer, as numbers of the gradients' kind: pairs of real ones are complex again."""
        if not self._is_complex or result.is_complex():
            return result
        return torch.view_as_complex(result.to(self._own.dtype).reshape(-1, 2))


def _tensor_text(x: torch.Tensor) -> str:
    layout = "" if x.layout is torch.strided else f", {str(x.layout).removeprefix('torch.')},"
    return f"{x.dtype}{layout} of shape {list(x.shape)} on {x.device}"
