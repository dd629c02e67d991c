"""Buckets lent to compiled graphs, and gradients that come beside what a graph has reduced already."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from torchshard.ddp.flat import FlatBucket
from torchshard.ddp.graphs import GraphBucket

if TYPE_CHECKING:
    from torchshard.ddp.reducer import Reducer


class Lending:
    """What a reducer knows about the compiled graphs that fill its buckets.

    Attributes:
        shared: parameters with gradients from a graph and from elsewhere.
        late: gradients that came after a graph had filled their place, in the backward that runs.
        refused: every gradient has to come through its hook.
    """

    def __init__(self, reducer: "Reducer") -> None:
        self._reducer = reducer
        self.shared: set[int] = set()
        self.late: dict[int, torch.Tensor] = {}
        self.refused = False
        self._known: set[tuple[int, ...]] = set()  # the layout knew of them, or they have been asked for since
        self._wish = False  # for another layout

    def lend(self, slots: tuple[int, ...]) -> GraphBucket | None:
        """See Reducer.lend."""
        reducer = self._reducer
        bucket = next((b for b in reducer.buckets if isinstance(b, GraphBucket) and b.slots == slots), None)
        if self.refused or bucket is None or not bucket.ready_for_graph():
            self._wish = self._wish or (reducer.arrived is None and slots not in self._known and not self.refused)
            self._known.add(slots)
            return None
        return bucket if all(map(reducer.will_run, bucket.members)) else None

    def know(self, slots: Iterable[tuple[int, ...]]) -> None:
        """A layout that takes these into account is about to be made."""
        self._known = set(slots)

    def again(self, bucket: FlatBucket, index: int) -> bool:
        """Autograd is done with a parameter whose place is taken. Whether that is as it should be."""
        if not isinstance(bucket, GraphBucket) or not bucket.is_filled(index):
            return False
        param = self._reducer.params[index]
        if param.grad is not None:  # something came beside what the graph gave
            self.late[index], param.grad = param.grad, None
            self._wish = self._wish or index not in self.shared
            self.shared.add(index)
        return True

    def reduce_late(self) -> None:
        """Reduce contributions that came after their parameters' buckets had left, and add them to `.grad`."""
        if not self.late:
            return
        reducer, kinds = self._reducer, dict[tuple[torch.dtype, torch.device], list[int]]()
        reducer.exchange.confirm("late: " + ", ".join(reducer.names[i] for i in sorted(self.late)))
        for i in sorted(self.late):
            kinds.setdefault((self.late[i].dtype, self.late[i].device), []).append(i)
        for number, members in enumerate(kinds.values(), len(reducer.buckets)):
            stand_ins = {i: self.late[i].detach() for i in members}
            for i, stand_in in stand_ins.items():
                stand_in.grad = self.late[i]
            bucket = FlatBucket(stand_ins, reducer.reduction.scale, views_stay=False)
            bucket.pending.clear()
            bucket.take_large()
            bucket.close()
            reducer.reduction.start(bucket, number, False)
            reducer.exchange.wait([bucket.work], "gradients that came late")
            reducer.reduction.accept(bucket)
            bucket.finish(members)
            for i, stand_in in stand_ins.items():
                assert stand_in.grad is not None, "just reduced"
                reducer.params[i].grad.add_(stand_in.grad)  # type: ignore[union-attr]
        reducer.exchange.issued += 1
        self.late.clear()

    def somebody_wishes(self) -> bool:
        """Whether the buckets do not fit the graphs of some rank; all ranks ask at the same point."""
        (wishes,) = self._reducer.exchange.largest([int(self._wish)])
        self._wish = False
        return bool(wishes)
