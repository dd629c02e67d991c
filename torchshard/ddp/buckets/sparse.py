"""A bucket for one sparse gradient: it stays sparse on the wire and in `.grad`, with the rows of all ranks.

If it is told which rows any rank has, it sends just their values, dense: one collective of known size, not one for the
indices and then one for the values of each rank.
"""

from collections.abc import Collection, Mapping

import torch

from torchshard.ddp.buckets.flat import FlatBucket


class SparseBucket(FlatBucket):
    """The gradient of one parameter that gets sparse ones (nn.Embedding(sparse=True)).

    There is no memory to be a view of.

    Args:
        members, scale, views_stay, never: as for FlatBucket.
        rows: by number of the parameter, the rows that any rank has in the backward to come, the same on all ranks;
            kept up to date by the owner.
    """

    def __init__(
        self,
        members: dict[int, torch.nn.Parameter],
        scale: float,
        views_stay: bool,
        never: Collection[int] = (),
        rows: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(members, scale, views_stay, never, small=0)
        ((self._index, self._param),) = members.items()
        self._held: torch.Tensor | None = None  # on its way
        self._all_rows = {} if rows is None else rows

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
        self._hold(grad)

    def _take_absent(self, index: int) -> None:
        self._absent[index] = self._param.grad, None
        self._hold(self._param.grad)

    def _hold(self, grad: torch.Tensor | None) -> None:
        with torch.no_grad():
            if grad is None:
                self._held = self.zeros()
            else:
                self._held = self._values(grad.detach()) * self.scale

    @property
    def _rows(self) -> torch.Tensor | None:
        return self._all_rows.get(self._index)

    def _values(self, grad: torch.Tensor) -> torch.Tensor:
        """What goes over the wire of a sparse gradient."""
        if self._rows is None:
            return grad
        own = grad.coalesce().indices()[0]
        if len(others := own[~torch.isin(own, self._rows)]):
            raise ValueError(
                f"_set_sparse_metadata: rows {others[:5].tolist()} have a gradient, but are none of the "
                f"{len(self._rows)} ids that were given for the parameter of shape {list(self._param.shape)}"
            )
        return grad.index_select(0, self._rows).to_dense()

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
        if self._rows is None:
            return _no_rows(self._param)
        return self._param.new_zeros(len(self._rows), *self._param.shape[1:])

    def views(self) -> list[torch.Tensor]:
        """The one gradient."""
        return [self.outgoing()]

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """As for any bucket."""
        return [flat]

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
            if self._rows is not None:
                result = _over_rows(self._rows[None], result, self._param, check_invariants=True)
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
    return _over_rows(indices, param.new_empty(0, *param.shape[1:]), param, check_invariants=False)


def _over_rows(indices: torch.Tensor, rows: torch.Tensor, param: torch.Tensor, check_invariants: bool) -> torch.Tensor:
    """On the parameter's device, whatever the default one is; torch warns where nobody says whether to check."""
    return torch.sparse_coo_tensor(indices, rows, param.shape, device=param.device, check_invariants=check_invariants)
