"""Local tensors that are still on their way: made by redistribute(async_op=True), waited for when first used."""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import is_on_its_way, no_torch_function, skip_methods, stand_in

_aten = torch.ops.aten


@skip_methods()
class Pending(Tensor):
    """Stands for a local tensor that a collective will bring.

    Shape, stride, dtype and device are known; whatever needs the values, or writes them, waits first and goes on with
    the tensor that has come. Being looked at, detached or viewed as it is waits for nothing.
    """

    __slots__ = ("_failure", "_finish", "_lock", "_value")
    __torch_function__ = no_torch_function()
    _finish: Callable[[], Tensor] | None
    _value: Tensor | None
    _failure: Exception | None
    _lock: threading.Lock

    @staticmethod
    def of(
        finish: Callable[[], Tensor],
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Pending":
        """The tensor of these properties that `finish` returns; called once, or never, or again after an interrupt."""
        made = stand_in(Pending, shape, stride, dtype, device)
        assert isinstance(made, Pending), "another class was made"
        made._finish, made._value, made._failure, made._lock = finish, None, None, threading.Lock()
        return made

    def wait(self) -> Tensor:
        """The tensor itself, once it is here; always the same one, in any thread. What fails, fails each time."""
        if self._value is not None:
            return self._value
        with self._lock:
            if self._finish is not None:
                try:
                    self._value = self._finish()
                except Exception as error:
                    self._failure = error
                self._finish = None  # but of an interrupt, which is no failure of the tensor's
            if self._failure is not None:
                raise self._failure
        assert self._value is not None, "neither a tensor nor a failure"
        return self._value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if _only_looks(func, args):
            x = args[0]
            return Pending.of(lambda: func(x.wait(), *args[1:]), x.shape, x.stride(), x.dtype, x.device)
        return func(*map(_waited, args), **{k: _waited(v) for k, v in (kwargs or {}).items()})

    # A compiled region takes what has come, and makes its graph for that.

    @property
    def _here(self) -> Tensor:
        return self.wait()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_here"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], told: None, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> "Pending":
        here = inner["_here"]
        return Pending.of(lambda: here, outer_size, outer_stride, here.dtype, here.device)

    def __coerce_same_metadata_as_tangent__(self, expected: Any, expected_type: Any = None) -> Tensor | None:
        return self.wait() if expected_type is Tensor else None

    def tolist(self) -> Any:
        """See torch.Tensor.tolist."""
        return self.wait().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """See torch.Tensor.numpy."""
        return self.wait().numpy(force=force)

    def data_ptr(self) -> int:
        """See torch.Tensor.data_ptr."""
        return self.wait().data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.wait())

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.wait(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.wait().__reduce_ex__(protocol)


def pending(x: Tensor) -> Tensor:
    """The tensor itself; in place of torch's own stand-in for one on its way, ours, for which every use waits."""
    if x.__class__ is Tensor or not is_on_its_way(x):
        return x
    return Pending.of(x.wait, x.shape, x.stride(), x.dtype, x.device)  # type: ignore[attr-defined]


def arrived(x: Tensor) -> Tensor:
    """The tensor itself, of one that may still be on its way."""
    return x.wait() if isinstance(x, Pending) else x


def _only_looks(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator gives the same elements in the same shape, as another tensor."""
    if func is _aten.detach.default or func is _aten.alias.default:
        return True
    return func is _aten.view.default and tuple(args[1]) == tuple(args[0].shape)


def _waited(x: Any) -> Any:
    """An argument with every tensor that is on its way waited for."""
    if isinstance(x, Pending):
        return x.wait()
    return [_waited(item) for item in x] if isinstance(x, (list, tuple)) else x
