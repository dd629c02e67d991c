"""Parameters whose gradients are all reduced at once, when the gradient of a parameter of the user's choice comes."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchshard import _torch
from torchshard.comm.summing import all_reduce_of
from torchshard.ddp import messages
from torchshard.ddp.backwards import Ending
from torchshard.ddp.passes import Mode

if TYPE_CHECKING:
    from torchshard.ddp.reducer import Reducer


class Delayed:
    """delay_all_reduce_named_params: their gradients are views of one buffer for each dtype, which is reduced whole.

    A backward under no_sync adds to the buffer and leaves the reduction to the next one that is reduced.

    Args:
        params: to be delayed; the wrapper's buckets know nothing of them.
        trigger: its gradient starts the reduction, as soon as all of theirs are there; at the end of the backward
            where some are not, as they come together from a compiled graph, or do not come at all.
        reducer: of the other parameters; knows the ranks to average over, and what backward runs.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], trigger: torch.Tensor, reducer: "Reducer") -> None:
        self._params, self.reducer = params, reducer
        self._buffers: list[torch.Tensor] = []
        self._views: dict[int, torch.Tensor] = {}
        self._sync = False  # a forward that is to be reduced has run since the last reduction
        self._arrived: set[int] = set()
        self._when: str | None = None  # they were reduced the last time
        self._is_awaited = self._is_late = self._was_missed = self._said = False
        self._works: list[Any] = []
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for p in params:
            kinds.setdefault((p.dtype, p.device), []).append(p)
        for (dtype, device), members in kinds.items():
            numels = [p.numel() for p in members]
            self._buffers.append(torch.zeros(sum(numels), dtype=dtype, device=device))
            pieces = self._buffers[-1].split(numels)
            self._views.update((id(p), piece.view(p.shape)) for p, piece in zip(members, pieces, strict=True))
        self._ending = Ending(self._end, self._forget)
        self._handles = [
            trigger.register_hook(self._come),
            *[_torch.register_after_grad(p, self._arrive) for p in params],
        ]

    def after_forward(self, sync: bool) -> None:
        """Have the coming backward accumulate in the buffer; sync: and reduce it."""
        if self._was_missed and not self._said:
            self._said = True
            warnings.warn(messages.NOT_TRIGGERED, stacklevel=4)
        self._sync = self._sync or sync
        for p in self._params:
            view = self._views[id(p)]
            if p.grad is None:
                p.grad = view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():
                p.grad = view.copy_(p.grad)

    @_torch.untraced
    def _arrive(self, param: torch.Tensor) -> None:
        self._arrived.add(id(param))
        self._is_awaited |= self._is_due()
        self._ending.ask()

    def _come(self, _gradient: torch.Tensor) -> None:
        """The trigger's gradient is there."""
        if _torch.in_compiled_autograd():
            raise NotImplementedError(messages.excluded_text("delay_all_reduce_named_params"))
        if self._is_due():
            self._ending.ask()
            self._is_late = len(self._arrived) < len(self._params)
            if not self._is_late:
                self._reduce("when their trigger comes")

    def _is_due(self) -> bool:
        return self.reducer.mode is Mode.SYNC or (self._sync and self.reducer.mode is not Mode.LOCAL)

    def _reduce(self, when: str) -> None:
        exchange = self.reducer.exchange
        if when != self._when:  # other ranks, too, have to have them at this place among the buckets
            exchange.compare(f"delayed gradients are reduced {when}")
            self._when = when
        self._sync = self._is_awaited = self._was_missed = False
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.div_(exchange.group.size())
                self._works.append(all_reduce_of(exchange.group)(buffer))
        exchange.issued += 1

    def _end(self) -> None:
        """The backward is over."""
        if self._is_late:
            self._reduce("at the end of backward")
        self._was_missed |= self._is_awaited
        self._forget()
        self._ending.come()
        works, self._works = self._works, []
        self.reducer.exchange.wait(works, "gradients that are reduced with delay")

    def _forget(self) -> None:
        self._arrived.clear()
        self._is_awaited = self._is_late = False

    def remove(self) -> None:
        """Reduce no more."""
        for handle in self._handles:
            handle.remove()
