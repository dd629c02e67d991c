"""Parameters that are frozen when a module is wrapped, and trained later: nobody averages their gradients."""

import warnings
from collections.abc import Iterable

import torch

from torchshard import _torch
from torchshard.ddp import messages


class Watch:
    """Warns once, when one of these gets a gradient all the same.

    Args:
        named: parameters that require no gradient, with their names.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._names = {id(p): name for name, p in named if p.is_floating_point() or p.is_complex()}
        self._handles = [
            _torch.register_after_grad(p, self._warn) for _, p in named if id(p) in self._names and not p.is_inference()
        ]

    @_torch.untraced
    def _warn(self, param: torch.Tensor) -> None:
        name = self._names[id(param)]
        self.remove()
        warnings.warn(messages.thawed_text(name), stacklevel=2)

    def remove(self) -> None:
        """Watch no more."""
        while self._handles:
            self._handles.pop().remove()
