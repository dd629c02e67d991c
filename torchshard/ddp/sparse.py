"""A bucket for one sparse gradient: it stays sparse on the wire and in `.grad`, with the rows of all ranks."""

from collections.abc import Collection

import torch

from torchshard.ddp.flat import FlatBucket


class SparseBucket(FlatBucket):
    """The gradient of one parameter that gets sparse ones (nn.Embedding(sparse=True)).

    Arguments are those of FlatBucket; there is no memory to be a view of.
    """

    def __init__(
        self,
        members: dict[int, torch.nn.Parameter],
        scale: float,
        views_stay: bool,
        never: Collection[int] = (),
    ) -> None:
        super().__init__(members, scale, views_stay, never, small=0)
        ((self._index, self._param),) = members.items()
        self._held: torch.Tensor | None = None  # on its way

    def take(self, param: torch.Tensor, index: int) -> None:
        """Copy the gradient, scaled; none counts as unused."""
        grad = param.grad
        if grad is None:
            self._take_absent(index)
            return
        if not grad.is_sparse:
            raise RuntimeError(
                "Expected variable to have sparse gradient. It comes from an embedding with sparse=True and gets a "
                f"dense gradient as well; make the embedding with sparse=False (parameter of shape {list(param.shape)})"
            )
        with torch.no_grad():
            self._held = grad.detach() * self.scale

    def _take_absent(self, index: int) -> None:
        grad = self._param.grad
        self._absent[index] = grad, None
        with torch.no_grad():
            self._held = _no_rows(self._param) if grad is None else grad.detach() * self.scale

    def close(self) -> None:
        """As for any bucket."""
        if not self._closed:
            self._closed = True
            if self.pending or self._never:
                self._take_absent(self._index)

    def outgoing(self) -> torch.Tensor:
        """What is to be reduced, in place."""
        assert self._held is not None, "closed before it leaves"
        return self._held

    def zeros(self) -> torch.Tensor:
        """What a rank without gradients would contribute."""
        return _no_rows(self._param)

    def views(self) -> list[torch.Tensor]:
        """The one gradient."""
        return [self.outgoing()]

    def receive(self, result: torch.Tensor) -> None:
        """Take another tensor for the result."""
        self._held = result

    def adopt(self, result: torch.Tensor, used: Collection[int]) -> None:
        """As for any bucket."""
        self._held = result
        self.finish(used)
        self._held = None

    def finish(self, used: Collection[int]) -> None:
        """The sum is there: make it the gradient."""
        if self._index not in used:
            return
        with torch.no_grad():
            grad, result = self._param.grad, self.outgoing()
            if grad is not None and grad.is_sparse == result.is_sparse:
                grad.copy_(result)
            else:
                self._param.grad = result

    def reset(self) -> None:
        """Get ready for the next backward."""
        super().reset()
        self._held = None


def _no_rows(param: torch.Tensor) -> torch.Tensor:
    """A sparse gradient of zero, in the layout that embeddings make: sparse over rows, dense in each row."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
    return torch.sparse_coo_tensor(indices, param.new_empty(0, *param.shape[1:]), param.shape)
