"""Which parameters are averaged: those that were to be trained when the module was wrapped, and no others."""

import warnings
import weakref
from collections.abc import Collection, Sequence

import torch

from torchshard import _torch
from torchshard.ddp import messages, options

Named = Sequence[tuple[str, torch.nn.Parameter]]


class Members:
    """Notices when others are trained: frozen ones that no longer are, and new ones in the place of those.

    Args:
        module: that is wrapped; may go before this does.
        ignored: names of parameters that are not in buckets.
        delayed: those of them that are averaged all the same.

    Attributes:
        trained: the parameters to be averaged in buckets, with their names.
    """

    def __init__(
        self, module: torch.nn.Module, ignored: Collection[str], delayed: Sequence[torch.nn.Parameter] = ()
    ) -> None:
        self._module, self._ignored = weakref.ref(module), ignored
        apart = {id(p) for p in delayed}
        self._delayed = {n for n, p in module.named_parameters(remove_duplicate=False) if id(p) in apart}
        every = self._present(module)
        self._averaged = [(n, p) for n, p in every if p.requires_grad or id(p) in apart]
        self.trained: Named = [(n, p) for n, p in self._averaged if id(p) not in apart]
        rest = [(n, p) for n, p in every if not p.requires_grad and id(p) not in apart]
        frozen = [(n, p) for n, p in rest if p.is_floating_point() or p.is_complex()]
        self._names = {id(p): n for n, p in frozen}
        self._handles = [_torch.register_after_grad(p, self._warn) for _, p in frozen if not p.is_inference()]
        self._pins = [weakref.ref(p) for _, p in self._averaged]  # torch swaps no tensor that has one, and says so
        self._doubts = 0
        self._absent: Collection[int] | None = None

    def look(self, silent: bool, absent: Collection[int] | None) -> None:
        """If there is a doubt, see to it now and then that the parameters are in their places; raises if others are.

        Args:
            silent: the last forward to be reduced brought no gradient.
            absent: those that had none in the last backward.
        """
        changed, self._absent = absent != self._absent, absent
        if silent or changed:
            self.doubt()

    def doubt(self) -> None:
        """Some had no gradient: `check` at the 1st, 2nd, 4th, 8th time ..., as it takes some time."""
        self._doubts += 1
        if not self._doubts & (self._doubts - 1):
            self.check()

    def check(self) -> None:
        """Raise RuntimeError if parameters have taken the place of others."""
        module = self._module()
        now = {id(p): (n, p) for n, p in self._present(module)} if module else {}
        gone = [n for n, p in self._averaged if id(p) not in now]
        known = {*self._names, *[id(p) for _, p in self._averaged]}
        # Plain tensors stand in for parameters during torch.func.functional_call only.
        trained = [(n, p) for n, p in now.values() if p.requires_grad and isinstance(p, torch.nn.Parameter)]
        new = [n for n, p in trained if id(p) not in known]
        if gone and new:
            raise RuntimeError(messages.replaced_text(gone, new))

    def _present(self, module: torch.nn.Module) -> Named:
        return options.reduced(module, {*self._ignored} - self._delayed)

    @_torch.untraced
    def _warn(self, param: torch.Tensor) -> None:
        self._stop_watching()
        warnings.warn(messages.thawed_text(self._names[id(param)]), stacklevel=2)

    def _stop_watching(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def remove(self) -> None:
        """Leave the parameters as they were found."""
        self._stop_watching()
        self._pins.clear()
