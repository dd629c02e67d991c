"""One forward through a compiled graph, seen from its backward: who owns the gradients that the graph makes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchshard import _torch
from torchshard.ddp.buckets.graphs import GraphBucket
from torchshard.ddp.reducing.reducer import Reducer

_KEY = "torchshard"


class Call:
    """Kept by the autograd node of the compiled graph; the operators in the graph find it there.

    Args:
        reducer: of the wrapper whose forward it was.
        numbers: the reducer's number of the parameter at each graph input concerned.
        positions: where its gradient is among the node's results.
    """

    def __init__(self, reducer: Reducer, numbers: Mapping[int, int], positions: Mapping[int, int]) -> None:
        self._reducer, self._numbers, self._positions = reducer, numbers, positions
        self._open: dict[int, tuple[Sequence[int], tuple[int, ...], GraphBucket | None]] = {}
        self._instead: dict[int, torch.Tensor | None] = {}  # by position: what autograd gets

    def attach(self, node: Any) -> None:
        """Be found by what runs in this node."""
        node.metadata[_KEY] = self
        node.register_hook(self._hand_over)

    def open(self, bucket: int, params: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for the gradients of these graph inputs, of this dtype; None if it need not be the reducer's."""
        if not self._numbers.keys() >= {*params}:
            return None
        slots = tuple(map(self._numbers.__getitem__, params))
        lent = self._reducer.lend(slots, dtype)
        self._open[bucket] = params, slots, lent
        return lent.lend(slots, dtype) if lent else None

    def common_factors(self, bucket: int) -> tuple[float, float] | None:
        """What `factors` says of all slots of a bucket, if that is the same."""
        _, slots, lent = self._open.get(bucket, ((), (), None))
        return lent.common_factors(slots) if lent else (1.0, 0.0)

    def factors(self, bucket: int, slot: int) -> tuple[float, float]:
        """Alpha and beta: how a gradient is written to its slot."""
        _, slots, lent = self._open.get(bucket, ((), (), None))
        return lent.factors(slots[slot]) if lent else (1.0, 0.0)

    def launch(self, bucket: int, views: Sequence[torch.Tensor], results: Callable[[], Sequence[torch.Tensor]]) -> None:
        """All gradients of this bucket are in their slots; `results` tells what the graph returns for each."""
        if bucket not in self._open:
            return
        params, slots, lent = self._open.pop(bucket)
        if lent:
            filled, at = dict(zip(slots, views, strict=True)), [*map(self._positions.__getitem__, params)]
            self._instead.update(dict.fromkeys(at))
            if not lent.members.keys() >= filled.keys():
                for position, number in zip(at, slots, strict=True):
                    if number not in lent.members:  # another bucket's; the slot itself is about to be reduced
                        self._instead[position] = filled.pop(number).clone()
            lent.fill(filled)
        self._reducer.graph_filled(slots, lent, results)

    @_torch.skip_alone
    def _hand_over(self, results: tuple[Any, ...], _given: object) -> tuple[Any, ...] | None:
        """The node has run: keep from autograd the gradients that are being reduced."""
        if not self._instead:
            return None
        instead, self._instead = self._instead, {}
        return tuple(map(instead.get, range(len(results)), results))


def is_attached(node: Any) -> bool:
    """Whether there is a Call that will be found in this node."""
    return _KEY in node.metadata


def current_call() -> Call | None:
    """The call whose backward runs now in this thread."""
    node = _torch.current_node()
    return node.metadata.get(_KEY) if node is not None else None
