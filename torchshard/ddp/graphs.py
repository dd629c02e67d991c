"""Buckets that compiled graphs fill: gradients are born in their place, and the bucket leaves while the graph runs.

A graph that has the gradients of some parameters in one bucket of its own asks the reducer for the memory of the
bucket with just these parameters. It writes each gradient, scaled, into its slot and hands autograd nothing for it;
`.grad` is set when the backward is over. So what autograd still brings for such a parameter came from elsewhere, and
is reduced by itself: averaging is linear.
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from torchshard import _torch
from torchshard.buckets import slices
from torchshard.ddp.flat import FlatBucket


class GraphBucket(FlatBucket):
    """A bucket laid out by a compiled graph. Hooks fill it in a backward in which the graph does not.

    Args:
        slots: numbers of the parameters, in the graph's order.
        members: those whose gradients this bucket reduces; the slots of others are holes, with unused contents.
        params: all parameters of the reducer.
        scale, views_stay, never: as for FlatBucket.
    """

    _is_dense = False

    def __init__(
        self,
        slots: Sequence[int],
        members: Collection[int],
        params: Sequence[torch.nn.Parameter],
        scale: float,
        views_stay: bool,
        never: Collection[int] = (),
    ) -> None:
        chosen = {i: params[i] for i in slots if i in members}
        super().__init__(chosen, scale, views_stay, never, small=0)
        self.slots = tuple(slots)
        starts, self._numel = slices(params[i].numel() for i in slots)
        self._offsets = {i: start for i, start in zip(slots, starts, strict=True) if i in members}
        self._accumulated: set[int] = set()  # gradients that lie in their slots already
        self._before: dict[int, torch.Tensor] = {}  # gradients that were there and take part
        self._filled: Mapping[int, torch.Tensor] = {}

    def ready_for_graph(self) -> bool:
        """Whether nothing has come yet, and autograd would give each member's gradient to `.grad` and nobody else."""
        return (
            self.work is None
            and len(self.pending) == len(self.members)
            and not any(map(_torch.has_other_hooks, self.members.values()))
        )

    def lend(self) -> torch.Tensor:
        """The flat memory, for a graph to write; beforehand, see what lies there."""
        flat = self._open()
        start, size = flat.data_ptr(), flat.element_size()
        self._accumulated = {
            i
            for i, p in self.members.items()
            if p.grad is not None and p.grad.data_ptr() == start + size * self._offsets[i]
        }
        return flat.detach()

    def factors(self, index: int) -> tuple[float, float]:
        """How a gradient is written: alpha times the new one plus beta times what lies in its slot."""
        if index not in self.members:
            return 1.0, 0.0
        return self.scale, self.scale if index in self._accumulated else 0.0

    def fill(self, views: Mapping[int, torch.Tensor]) -> None:
        """The graph has written the members' gradients; these are its views of the slots."""
        for i, p in self.members.items():
            grad = p.grad
            if grad is not None:
                if i not in self._accumulated:
                    views[i].add_(grad, alpha=self.scale)
                self._before[i] = grad
                p.grad = None
        self._filled, self.graph_filled = views, len(views)
        self.pending.clear()

    def is_filled(self, index: int) -> bool:
        """Whether a graph has given this parameter's gradient in the backward that runs."""
        return index in self._filled

    def install(self) -> None:
        """The backward is over: make what the graph has written the members' gradients."""
        for i, view in self._filled.items():
            p, before = self.members[i], self._before.get(i)
            if before is None:
                p.grad = self._places()[i] if self._views_stay else view
            else:
                if i not in self._accumulated:
                    before.copy_(view)
                p.grad = before
        self._filled = {}
        self._before.clear()

    def finish(self, used: Collection[int]) -> None:
        """As for any bucket."""
        with torch.no_grad():
            self.install()
        super().finish(used)

    def reset(self) -> None:
        """Get ready for the next backward."""
        super().reset()
        self._filled, self.graph_filled = {}, 0
        for i, grad in self._before.items():  # the backward failed after they were put aside
            self.members[i].grad = grad
        self._before.clear()

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self._numel, dtype=like.dtype, device=like.device)  # between the slots nobody writes
