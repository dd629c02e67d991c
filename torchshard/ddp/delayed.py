"""Parameters whose gradients are all reduced at once, when the gradient of a parameter of the user's choice comes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchshard import _torch
from torchshard.comm.summing import all_reduce_of
from torchshard.ddp import messages
from torchshard.ddp.passes import Mode

if TYPE_CHECKING:
    from torchshard.ddp.reducer import Reducer


class Delayed:
    """delay_all_reduce_named_params: their gradients are views of one buffer for each dtype, which is reduced whole.

    A backward under no_sync adds to the buffer and leaves the reduction to the next one that is reduced.

    Args:
        params: to be delayed; the wrapper's buckets know nothing of them.
        trigger: once the gradient of this parameter is there, all of theirs are.
        reducer: of the other parameters; knows the ranks to average over, and what backward runs.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], trigger: torch.Tensor, reducer: "Reducer") -> None:
        self._params, self.reducer = params, reducer
        self._buffers: list[torch.Tensor] = []
        self._views: dict[int, torch.Tensor] = {}
        self._sync = False  # a forward that is to be reduced has run since the last reduction
        self._works: list[Any] = []
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for p in params:
            kinds.setdefault((p.dtype, p.device), []).append(p)
        for (dtype, device), members in kinds.items():
            numels = [p.numel() for p in members]
            self._buffers.append(torch.zeros(sum(numels), dtype=dtype, device=device))
            pieces = self._buffers[-1].split(numels)
            self._views.update((id(p), piece.view(p.shape)) for p, piece in zip(members, pieces, strict=True))
        self._handle = trigger.register_hook(self._reduce)

    def after_forward(self, sync: bool) -> None:
        """Have the coming backward accumulate in the buffer; sync: and reduce it."""
        self._sync = self._sync or sync
        for p in self._params:
            view = self._views[id(p)]
            if p.grad is None:
                p.grad = view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():
                p.grad = view.copy_(p.grad)

    def _reduce(self, _gradient: torch.Tensor) -> None:
        if _torch.in_compiled_autograd():
            raise NotImplementedError(messages.excluded_text("delay_all_reduce_named_params"))
        mode, exchange = self.reducer.mode, self.reducer.exchange
        if mode is Mode.LOCAL or not (mode is Mode.SYNC or self._sync):
            return
        self._sync = False
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.div_(exchange.group.size())
                self._works.append(all_reduce_of(exchange.group)(buffer))
        exchange.issued += 1
        _torch.queue_callback(self._wait)

    def _wait(self) -> None:
        works, self._works = self._works, []
        self.reducer.exchange.wait(works, "gradients that are reduced with delay")

    def remove(self) -> None:
        """Reduce no more."""
        self._handle.remove()
