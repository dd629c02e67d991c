"""Buckets that compiled graphs fill: gradients are born in their place, and the bucket leaves while the graph runs.

A graph that has the gradients of some parameters in one segment asks the reducer for the memory of this segment in a
bucket. It writes each gradient, scaled, into its slot and hands autograd nothing for it; `.grad` is set when the
backward is over. So what autograd still brings for such a parameter came from elsewhere, and
is reduced by itself: averaging is linear.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_

import torch

from torchshard import _torch
from torchshard.buckets import slices
from torchshard.ddp.buckets.flat import FlatBucket, gradient_dtype

_grad = attrgetter("grad")


def _any_grad(params: Iterable[torch.Tensor]) -> bool:
    return not all(map(is_, map(_grad, params), repeat(None)))


class GraphBucket(FlatBucket):
    """A bucket laid out by compiled graphs. Hooks fill what graphs do not in some backward.

    Args:
        segments: what a graph fills at once: numbers of the parameters, in its order.
        members: those whose gradients this bucket reduces; the slots of others are holes, with unused contents.
        params: all parameters of the reducer.
        scale, views_stay, never: as for FlatBucket.
        gaps: it is reduced with the gaps between its gradients; else, for a hook, as a copy without them.

    Attributes:
        segments: those of its members that are in each.
    """

    _is_dense = False

    def __init__(
        self,
        segments: Sequence[tuple[int, ...]],
        members: Collection[int],
        params: Sequence[torch.nn.Parameter],
        scale: float,
        views_stay: bool,
        never: Collection[int] = (),
        gaps: bool = True,
    ) -> None:
        slots = [i for part in segments for i in part]
        chosen = {i: params[i] for i in slots if i in members}
        super().__init__(chosen, scale, views_stay, never, small=0)
        starts, self._numel = slices(params[i].numel() for i in slots)
        dense, self._offsets = self._shown, {i: start for i, start in zip(slots, starts, strict=True) if i in members}
        self._has_gaps = not gaps and dense[1] != self._numel
        self._shown = dense if self._has_gaps else (self._offsets, self._numel)
        self.segments = {part: {i: self.members[i] for i in part if i in self.members} for part in segments}
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}  # where each begins and ends
        end = 0
        for part in segments:
            begin, end = end, end + slices(params[i].numel() for i in part)[1]
            self._ends[part] = begin, end
        self._accumulated: set[int] = set()  # gradients that lie in their slots already
        self._before: dict[int, torch.Tensor] = {}  # gradients that were there and take part
        self._filled: dict[int, torch.Tensor] = {}
        self.given: set[int] = set()

    def ready_for_graph(self, slots: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether nothing of a segment has come, and autograd would give it to each `.grad` and nobody else.

        Args:
            slots: the segment.
            dtype: that the graph writes.
        """
        members = self.segments[slots]
        return (
            self.work is None
            and self._fits(dtype)
            and self.pending.issuperset(members)
            and not _torch.has_hooks(*members.values(), own=1)  # the reducer's
        )

    def lend(self, slots: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The flat memory of a segment, for a graph to write; beforehand, see what lies there. Args as above."""
        flat, members = self._open(), self.segments[slots]
        if _any_grad(members.values()):
            start, size = flat.data_ptr(), flat.element_size()
            for i, p in members.items():
                grad = p.grad
                if grad is not None and grad.data_ptr() == start + size * self._offsets[i]:
                    self._accumulated.add(i)
        begin, end = self._ends[slots]
        return flat.detach()[begin:end]

    def common_factors(self, slots: tuple[int, ...]) -> tuple[float, float] | None:
        """What `factors` says of all parameters of a segment, if that is the same."""
        return (self.scale, 0.0) if not self._accumulated and len(self.segments[slots]) == len(slots) else None

    def factors(self, index: int) -> tuple[float, float]:
        """How a gradient is written: alpha times the new one plus beta times what lies in its slot."""
        if index not in self.members:
            return 1.0, 0.0
        return self.scale, self.scale if index in self._accumulated else 0.0

    def fill(self, views: Mapping[int, torch.Tensor]) -> None:
        """The graph has written gradients of members; these are its views of the slots."""
        if _any_grad(map(self.members.__getitem__, views)):
            for i, view in views.items():
                p = self.members[i]
                grad = p.grad
                if grad is not None:
                    if i not in self._accumulated:
                        view.add_(grad, alpha=self.scale)
                    self._before[i] = grad
                    p.grad = None
        if self._views and any(self._views[i].stride() != view.stride() for i, view in views.items()):
            self._views = {}  # the parameters are stored otherwise than before
        self._filled.update(views)
        self.given.update(views)
        self.graph_filled += len(views)
        self.pending.difference_update(views)

    def is_filled(self, index: int) -> bool:
        """Whether a graph has given this parameter's gradient in the backward that runs."""
        return index in self.given

    def install(self) -> None:
        """A backward is over, though maybe not the last one for this bucket: give out what graphs have written."""
        places = self._places() if self._views_stay else self._filled
        for i, view in self._filled.items():
            p, before = self.members[i], self._before.get(i) if self._before else None
            if before is None or (self._views_stay and i not in self._accumulated):
                p.grad = places[i]
            else:
                if i not in self._accumulated:
                    before.copy_(view)
                p.grad = before
        self.given.clear()

    def shown(self) -> tuple[torch.Tensor, Callable[[], Sequence[torch.Tensor]]]:
        """As for any bucket."""
        if not self._has_gaps:
            return super().shown()
        flat = self._open()
        copy = torch.cat([flat[self._offsets[i] :][: p.numel()] for i, p in self.members.items()])
        return copy, partial(self.parts, copy)

    def receive(self, result: torch.Tensor) -> None:
        """As for any bucket."""
        if not self._has_gaps:
            super().receive(result)
            return
        with torch.no_grad():
            _torch.copy_all(self.views(), self.parts(result.reshape(-1)))

    def finish(self, used: Collection[int]) -> None:
        """As for any bucket."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.finish(used)
            return
        self.install()
        super().finish(used)

    def reset(self) -> None:
        """Get ready for the next backward."""
        super().reset()
        for i in self.given & self._before.keys():  # the backward failed after they were put aside
            self.members[i].grad = self._before[i]
        self._filled, self.graph_filled = {}, 0
        self._accumulated.clear()
        self.given.clear()
        self._before.clear()

    def _fits(self, dtype: torch.dtype) -> bool:
        return dtype is gradient_dtype(next(iter(self.members.values())))

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(
            self._numel, dtype=self._dtype_like(like), device=like.device
        )  # between the slots nobody writes
