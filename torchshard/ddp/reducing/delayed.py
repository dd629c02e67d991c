"""Parameters whose gradients are reduced together, after all others, at the end of a backward."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchshard import _torch
from torchshard.ddp.buckets.flat import gradient_dtype, gradient_strides
from torchshard.ddp.reducing.backwards import Leaves
from torchshard.ddp.reducing.passes import Mode
from torchshard.ddp.telling import messages

if TYPE_CHECKING:
    from torchshard.ddp.reducing.reducer import Reducer


class Delayed:
    """delay_all_reduce_named_params: of no bucket, and free to get a gradient or none, on each rank as it comes.

    torch reduces them when the gradient of param_to_hook_all_reduce comes: what comes later in that backward is left
    out, and where it comes between buckets is each rank's own. At the end of the backward all are there, on all ranks
    after the last bucket. A backward under no_sync adds to what the next one that is reduced averages.

    A forward makes their gradients views of one buffer for each dtype. What stands there instead at the end, as after
    zero_grad() between forward and backward, is copied in and out.

    Args:
        params: to be delayed.
        reducer: of the other parameters; knows the ranks to average over, and what backward runs.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], reducer: "Reducer") -> None:
        self._params = params
        self._buffers: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        self._kinds: list[Any] = []  # of the parameters, when the buffers were made for them
        self._sync = False  # a forward that is to be reduced has run since the last reduction
        self._mode = Mode.IDLE
        self._arrived: set[int] = set()
        self._handles = [_torch.register_after_grad(p, self._arrive) for p in params]
        self.connect(reducer)

    def connect(self, reducer: "Reducer") -> None:
        """Follow this reducer from now on."""
        self._reducer = weakref.ref(reducer)
        reducer.at_begin.append(self._begin)
        reducer.at_end.append(self._end)
        reducer.leaves = Leaves([*reducer.params, *[p for p in self._params if p.requires_grad]])

    def after_forward(self, sync: bool) -> None:
        """Have the coming backward accumulate in the buffers; sync: and reduce them."""
        self._sync |= sync
        self._lay_out()
        with torch.no_grad():
            for p, view in zip(self._params, self._views, strict=True):
                if p.grad is None:
                    p.grad = view.zero_().detach()
                elif p.grad.data_ptr() != view.data_ptr():
                    p.grad = _take(view, p.grad).detach()

    def _lay_out(self) -> None:
        """Buffers for the parameters as they are now: modules may be converted between two steps."""
        kinds = [(gradient_dtype(p), p.device, p.shape, gradient_strides(p)) for p in self._params]
        if kinds == self._kinds:
            return
        self._kinds, self._buffers = kinds, []
        views: dict[int, torch.Tensor] = {}
        for kind in dict.fromkeys([kind[:2] for kind in kinds]):
            members = [i for i, other in enumerate(kinds) if other[:2] == kind]
            numels = [self._params[i].numel() for i in members]
            self._buffers.append(torch.zeros(sum(numels), dtype=kind[0], device=kind[1]))
            for i, piece in zip(members, self._buffers[-1].split(numels), strict=True):
                views[i] = piece.as_strided(*kinds[i][2:])
        self._views = [views[i] for i in range(len(kinds))]

    def _arrive(self, param: torch.Tensor) -> None:
        if _torch.in_compiled_autograd():
            raise NotImplementedError(messages.excluded_text("delay_all_reduce_named_params"))
        self._note(param)

    @_torch.untraced
    def _note(self, param: torch.Tensor) -> None:
        self._arrived.add(id(param))
        if reducer := self._reducer():
            reducer.ending.ask()

    def _begin(self) -> None:
        reducer = self._reducer()
        self._mode = reducer.mode if reducer else Mode.IDLE

    def _end(self) -> None:
        """The backward is over, and all buckets are on their way."""
        mode, self._mode = self._mode, Mode.IDLE
        arrived, self._arrived = self._arrived, set()
        # Idle: it has come from none of the wrapper's outputs, and brought gradients of these parameters.
        if mode is Mode.SYNC or (mode is Mode.IDLE and self._sync and arrived):
            self._sync = False
            self._reduce()

    def _reduce(self) -> None:
        reducer = self._reducer()
        assert reducer, "it is ending"
        exchange = reducer.exchange
        self._lay_out()
        elsewhere = []
        with torch.no_grad():
            for p, view in zip(self._params, self._views, strict=True):
                if p.grad is None:
                    view.zero_()
                elif p.grad.data_ptr() != view.data_ptr():
                    _take(view, p.grad)
                    if not p.grad.is_sparse:
                        elsewhere.append((p.grad, view))
                        continue
                p.grad = view.detach()
            works = [exchange.all_reduce(b.div_(exchange.group.size())) for b in self._buffers]
            exchange.issued += 1
            exchange.wait(works, "gradients that are reduced with delay")
            for grad, view in elsewhere:
                grad.copy_(view)

    def remove(self) -> None:
        """Reduce no more."""
        for handle in self._handles:
            handle.remove()


def _take(view: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return view.copy_(grad.to_dense() if grad.is_sparse else grad)
