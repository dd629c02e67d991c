"""Parameters filled beside a forward that already runs, and waited for where each is first used."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch.nn import Module, Parameter

from torchshard import _torch

_PIECES = 8
_LEAST = 1 << 20
"""Bytes of parameters; to copy fewer takes no longer than to have a thread do it."""

Tensors = Sequence[torch.Tensor]
Unfilled = dict[Parameter, tuple[torch.Tensor, torch.Tensor]]
"""By parameter, the memory to be filled and the values for it."""

Wait = Callable[[], object]
Copier = Callable[[Tensors, Tensors], Wait]
"""Copies the second tensors into the first ones while its caller goes on; waits, when what it returns is called."""


class Filling:
    """Fills parameters while a forward runs that uses them, piece by piece in the order in which a module has them.

    One whose values are not there is of the class `_Awaited`: any operation of torch's on it, any property that is
    read, waits first, whichever module it comes from. What reads memory unseen by torch's Python, as extensions in C++
    do, does so in a module's forward: so a module that begins waits for all that is inside of it, or for its own where
    the pieces are inside of its children.

    Args:
        module: whose forward it is.
        params: parameters of it; those of classes of their own, and of scripted modules, are filled before the forward.
    """

    def __init__(self, module: Module, params: Sequence[Parameter]) -> None:
        self._pieces: list[_Piece] = []
        self._needs: list[tuple[Module, list[_Piece]]] = []
        self._hooks: list[Any] = []
        scripted = {id(p) for m in module.modules() if isinstance(m, torch.jit.ScriptModule) for p in m.parameters()}
        plain = [p for p in params if type(p) is Parameter and id(p) not in scripted]
        devices = {p.device for p in plain}
        if len(devices) == 1 and sum(map(_bytes, plain)) >= _LEAST:
            (self._device,) = devices
            self._divide(module, plain)

    def _divide(self, module: Module, params: Sequence[Parameter]) -> None:
        limit = sum(map(_bytes, params)) / _PIECES
        home: dict[int, _Piece | None] = {id(p): None for p in params}
        piece = _Piece()
        for part, inside in _parts(module, limit):
            inside = [p for p in inside if id(p) in home]
            for p in inside:
                if home[id(p)] is None:
                    home[id(p)] = piece
                    piece.params.append(p)
            if inside:
                self._needs.append((part, [*{id(i): i for p in inside if (i := home[id(p)])}.values()]))
            if sum(map(_bytes, piece.params)) >= limit:
                self._pieces.append(piece)
                piece = _Piece()
        self._pieces.append(piece)

    def begin(self, unfilled: Unfilled) -> None:
        """Fill those that can be waited for, beside what the caller does from now on; they are taken out."""
        if not (self._pieces and unfilled) or _torch.is_watched():
            return
        if copier := copier_of(self._device):
            for piece in self._pieces:
                piece.begin(copier, unfilled)
            for module, pieces in self._needs:
                self._hooks.append(module.register_forward_pre_hook(partial(_wait, pieces), prepend=True))

    def settle(self) -> None:
        """The forward is over, or has failed: all are filled."""
        while self._hooks:
            self._hooks.pop().remove()
        _wait(self._pieces)


class _Piece:
    """Parameters that are filled, and waited for, together."""

    def __init__(self) -> None:
        self.params: list[Parameter] = []
        self._filled: list[Parameter] = []
        self._wait: Wait | None = None

    def begin(self, copier: Copier, unfilled: Unfilled) -> None:
        """From now on whoever uses one of those that are not filled waits for them."""
        self._filled = [p for p in self.params if p in unfilled and type(p) is Parameter]
        if self._filled:
            targets, sources = zip(*[unfilled.pop(p) for p in self._filled], strict=True)
            self._wait = copier(targets, sources)
        for p in self._filled:
            p._piece = self  # type: ignore[attr-defined]
            p.__class__ = _Awaited

    def wait(self) -> None:
        """They are there, and parameters as before."""
        if wait := self._wait:
            try:
                wait()
            finally:  # not before: another thread of the forward may be here too
                for p in self._filled:
                    p.__class__ = Parameter
                    vars(p).pop("_piece", None)
                self._filled, self._wait = [], None


class _Awaited(Parameter):
    """A parameter that is being filled."""

    @classmethod
    @_torch.untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, _ = _torch.leaves_of((args, kwargs or {}))
        for x in leaves:
            if type(x) is _Awaited:
                x._wait()
        return func(*args, **kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._wait()
        return self.__deepcopy__(memo)  # a Parameter's, which this is now

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._wait()
        return self.__reduce_ex__(protocol)

    def _wait(self) -> None:
        if piece := vars(self).get("_piece"):
            piece.wait()


def copier_of(device: torch.device) -> Copier | None:
    """Who copies on a device beside a forward: a stream, or a thread where the ranks' forwards leave it a core.

    torchrun says in LOCAL_WORLD_SIZE how many ranks there are on a machine.
    """
    if device.type == "cpu":
        computing = torch.get_num_threads() * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return _copy_in_thread if computing < _cores() else None
    accelerator = torch.accelerator.current_accelerator()
    return _Stream.of(device) if accelerator and accelerator.type == device.type else None


def _cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _copy_in_thread(targets: Tensors, sources: Tensors) -> Wait:
    return _thread(os.getpid()).submit(_copy, targets, sources).result


def _copy(targets: Tensors, sources: Tensors) -> None:
    with torch.no_grad():
        _torch.copy_all(targets, sources)


@cache
def _thread(_process: int) -> ThreadPoolExecutor:
    """One for all wrappers of a process; it ends with the interpreter. A forked process has none of its parent's."""
    return ThreadPoolExecutor(1, "torchshard copies")


class _Stream:
    """Copies on a stream of its own, as torch's wrapper does.

    Memory is of the stream that computes: it is waited for before it is written to, and waits before it reads. It has
    waited for all when a forward is over, so that it may be given back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    of = staticmethod(cache(lambda device: _Stream(device)))

    def __call__(self, targets: Tensors, sources: Tensors) -> Wait:
        """Begin."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            _copy(targets, sources)
        done = self._stream.record_event()
        return lambda: torch.accelerator.current_stream(self._device).wait_event(done)


def _parts(module: Module, limit: float) -> Iterator[tuple[Module, list[Parameter]]]:
    """A module in parts of about `limit` bytes, each with the parameters that its forward may read."""
    inside, children = [*module.parameters()], [*module.children()]
    if not children or sum(map(_bytes, inside)) <= limit:
        yield module, inside
        return
    if own := [*module.parameters(recurse=False)]:
        yield module, own
    for child in children:
        yield from _parts(child, limit)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _wait(pieces: Sequence[_Piece], *_: object) -> None:
    with ExitStack() as each:  # if one fails, the others too are parameters again
        for piece in pieces:
            each.callback(piece.wait)
