"""Parameters whose gradients are all reduced at once, when the gradient of a parameter of the user's choice comes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchshard import _torch
from torchshard.ddp import messages
from torchshard.ddp.exchange import Exchange


class Delayed:
    """delay_all_reduce_named_params: their gradients are views of one buffer for each dtype, which is reduced whole.

    A backward under no_sync adds to the buffer and leaves the reduction to the next one that is reduced.

    Args:
        params: to be delayed; the wrapper's buckets know nothing of them.
        trigger: once the gradient of this parameter is there, all of theirs are.
        exchange: with the ranks to average over.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], trigger: torch.Tensor, exchange: Exchange) -> None:
        self._params, self._exchange = params, exchange
        self._buffers: list[torch.Tensor] = []
        self._views: dict[int, torch.Tensor] = {}
        self._sync = False
        self._works: list[dist.Work] = []
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
        self._sync = sync
        for p in self._params:
            view = self._views[id(p)]
            if p.grad is None:
                p.grad = view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():
                p.grad = view.copy_(p.grad)

    def _reduce(self, _gradient: torch.Tensor) -> None:
        if _torch.in_compiled_autograd():
            raise NotImplementedError(messages.excluded_text("delay_all_reduce_named_params"))
        if not self._sync:
            return
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.div_(self._exchange.group.size())
                work = dist.all_reduce(buffer, group=self._exchange.group, async_op=True)
                assert work is not None, "asynchronous collectives return their work"
                self._works.append(work)
        self._exchange.issued += 1
        _torch.queue_callback(self._wait)

    def _wait(self) -> None:
        works, self._works = self._works, []
        self._exchange.wait(works, "gradients that are reduced with delay")

    def remove(self) -> None:
        """Reduce no more."""
        self._handle.remove()
