"""Parameters filled beside a forward that already runs, and waited for where each is first used."""

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
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

    Meanwhile a module's table of parameters is one of class `_Table`, in which whoever looks one up waits until its
    values are there, whatever he does with it then, and whichever module he is in. What is held elsewhere, in a
    closure, is of the class `_Awaited`: any operation of torch's on it, any property that is read, waits.

    Args:
        module: whose forward it is.
        params: parameters of it; those of classes of their own, of scripted modules, and those that modules hold in
            other places too are filled before the forward.
    """

    def __init__(self, module: Module, params: Sequence[Parameter]) -> None:
        self._pieces: list[_Piece] = []
        self._tables: list[_Table] = []
        self._owners = [m for m in module.modules() if m._parameters]
        apart = {id(p) for m in module.modules() for p in _beside_table(m)}
        plain = [p for p in params if type(p) is Parameter and id(p) not in apart]
        devices = {p.device for p in plain}
        if len(devices) == 1 and sum(map(_bytes, plain)) >= _LEAST:
            (self._device,) = devices
            self._divide(plain)

    def _divide(self, params: Sequence[Parameter]) -> None:
        limit = sum(map(_bytes, params)) / _PIECES
        size = limit
        for p in params:
            if size >= limit:
                self._pieces.append(_Piece())
                size = 0
            self._pieces[-1].params.append(p)
            size += _bytes(p)

    def begin(self, unfilled: Unfilled) -> None:
        """Fill those that can be waited for, beside what the caller does from now on; they are taken out."""
        if not (self._pieces and unfilled) or _torch.is_watched():
            return
        if copier := copier_of(self._device):
            begun = {id(p): piece for piece in self._pieces for p in piece.begin(copier, unfilled)}
            for module in self._owners:
                pieces = {n: begun[id(p)] for n, p in module._parameters.items() if id(p) in begun}
                if pieces:
                    self._tables.append(_Table(module, pieces))

    def settle(self) -> None:
        """The forward is over, or has failed: all are filled."""
        while self._tables:
            self._tables.pop().leave()
        with ExitStack() as each:  # if one fails, the others too are parameters again
            for piece in self._pieces:
                each.callback(piece.wait)


class _Piece:
    """Parameters that are filled, and waited for, together."""

    def __init__(self) -> None:
        self.params: list[Parameter] = []
        self._filled: list[Parameter] = []
        self._wait: Wait | None = None

    def begin(self, copier: Copier, unfilled: Unfilled) -> Tensors:
        """From now on whoever uses one of those that are not filled, which are returned, waits for them."""
        self._filled = [p for p in self.params if p in unfilled and type(p) is Parameter]
        if self._filled:
            targets, sources = zip(*[unfilled.pop(p) for p in self._filled], strict=True)
            self._wait = copier(targets, sources)
        for p in self._filled:
            p._piece = self  # type: ignore[attr-defined]
            p.__class__ = _Awaited
        return self._filled

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


class _Table(MutableMapping[str, Any]):
    """Stands in the place of a module's table of parameters: one that is looked up is waited for.

    Args:
        module: whose table it is, until `leave`.
        pieces: by name, what fills a parameter of it.
    """

    def __init__(self, module: Module, pieces: Mapping[str, _Piece]) -> None:
        self._module, self._table, self._pieces = module, module._parameters, pieces
        vars(module)["_parameters"] = self

    def leave(self) -> None:
        """The module's own table is back."""
        if vars(self._module)["_parameters"] is self:
            self._module._parameters = self._table

    def __getitem__(self, name: str) -> Any:
        if piece := self._pieces.get(name):
            piece.wait()
        return self._table[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._table[name] = value

    def __delitem__(self, name: str) -> None:
        del self._table[name]

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __reduce__(self) -> Any:  # a copy of the module, or its pickle, is of its own
        return dict, (dict(self),)


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


def _beside_table(module: Module) -> Iterator[Parameter]:
    """Parameters that are not only looked up in the module's table: a list of weights, code that is compiled."""
    if isinstance(module, torch.jit.ScriptModule):
        yield from module.parameters()
    held = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
    yield from [x for x in _torch.leaves_of(held)[0] if isinstance(x, Parameter)]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
