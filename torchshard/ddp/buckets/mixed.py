"""Parameters of lower precision in forward and backward, gradients reduced in a dtype of its own."""

import copy
import dataclasses
import warnings
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch

from torchshard import _torch
from torchshard.ddp.buckets.flat import FlatBucket, gradient_dtype
from torchshard.ddp.buckets.graphs import GraphBucket
from torchshard.ddp.composite import is_composite
from torchshard.ddp.copying import Filling
from torchshard.ddp.options import reduced
from torchshard.ddp.reducing.passes import ForwardPass
from torchshard.ddp.telling import messages


class MixedPrecision:
    """Swaps the data of a module's parameters: low precision from a forward to the end of its backward.

    Each parameter has its full data as `_fp_param`, and as `_mp_param` what forward uses, which is empty between steps;
    the names are torch's. Buffers are cast once, for good.

    Args:
        config: torch's, with param_dtype, reduce_dtype and buffer_dtype; None leaves something as it is.
        module: whose parameters and buffers are cast.
        ignored: names of those that are not.
    """

    def __init__(self, config: Any, module: torch.nn.Module, ignored: Collection[str]) -> None:
        self.param_dtype: torch.dtype | None = config.param_dtype
        self.reduce_dtype: torch.dtype | None = config.reduce_dtype or config.param_dtype
        self._params = [p for _, p in reduced(module, ignored) if p.is_floating_point() and not is_composite(p)]
        self._forwards: set[weakref.ref[ForwardPass]] = set()  # that backward may still run through
        self._is_busy = False  # a forward or a backward runs
        for p in self._params:
            if hasattr(p, "_fp_param"):  # another wrapper's, which may have left it low
                raise_precision(p)
            p._fp_param = p.data  # type: ignore[attr-defined]
            p._mp_param = p.data.new_empty(0, dtype=self.param_dtype)  # type: ignore[attr-defined]
        self._filling = Filling(module, self._params)
        self._unfilled: dict[torch.nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}
        if config.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)

    def lower(self, gradients: bool) -> None:
        """Parameters are of low precision, to be filled; gradients: also cast those that are there.

        Backward will add to them.
        """
        if self.param_dtype is None:
            return
        self._is_busy = True
        with torch.inference_mode(False), torch.no_grad():  # what inference_mode makes is of no use later
            for p in self._params:
                if p.dtype is not self.param_dtype:
                    full, low = p.data, torch.empty_like(p.data, dtype=self.param_dtype)
                    self._unfilled[p] = low, full
                    p._fp_param, p._mp_param = full, low  # type: ignore[attr-defined]
                    p.data = low
                    p._low_version = _version(p)  # type: ignore[attr-defined]
                    if gradients and p.grad is not None:
                        p.grad.data = p.grad.to(self.param_dtype)

    def fill(self, beside_forward: bool = False) -> None:
        """Their values are there; or come while a forward runs that waits where it first uses them, until `settle`."""
        unfilled, self._unfilled = self._unfilled, {}
        with torch.inference_mode(False), torch.no_grad():
            if beside_forward:
                self._filling.begin(unfilled)
            if unfilled:
                _torch.copy_all(*zip(*unfilled.values(), strict=True))

    def lower_again(self) -> None:
        """Another backward of forwards that are over begins."""
        self.lower(gradients=True)
        self.fill()

    def settle(self) -> None:
        """The forward is over: all values are there."""
        self._is_busy = False
        self._filling.settle()

    def keep_for(self, forward: ForwardPass) -> None:
        """Low data is for the backward of this forward too; once it is gone with all others, it is of no use."""
        forward.kept = self
        self._forwards.add(weakref.ref(forward, self._let_go))

    def _let_go(self, forward: "weakref.ref[ForwardPass]") -> None:
        self._forwards.discard(forward)
        if not self._forwards:
            self.restore_between()

    def cast(self, inputs: Any) -> Any:
        """Inputs of a forward with their floating point tensors in the parameters' dtype."""
        if self.param_dtype is None:
            return inputs
        leaves, nesting = _torch.leaves_of(inputs)
        return _torch.tree_of(list(map(self._cast, leaves)), nesting)

    def _cast(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(self.param_dtype) if x.is_floating_point() else x
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            made = copy.copy(x)
            for field in dataclasses.fields(x):
                object.__setattr__(made, field.name, self.cast(getattr(x, field.name)))  # it may be frozen
            return made
        return x

    def restore(self) -> None:
        """The backward is over, or the forward failed: full precision again."""
        self._is_busy = False
        self._unfilled.clear()
        with torch.inference_mode(False):
            for p in self._params:
                raise_precision(p)

    def restore_between(self) -> None:
        """Full precision, where neither a forward nor a backward runs; a backward that comes lowers it again."""
        if not (self._is_busy or _torch.in_backward()):
            self.restore()


class MixedBucket(FlatBucket):
    """A bucket in the dtype of the reduction; gradients are copied in from theirs and out to the full parameter's.

    Args:
        dtype: of the reduction.
        bucket, options: as for the other class that this one is combined with, FlatBucket if there is none.
    """

    def __init__(self, dtype: torch.dtype, *bucket: Any, **options: Any) -> None:
        super().__init__(*bucket, **options)
        self._dtype = dtype

    def take(self, param: torch.Tensor, index: int) -> None:
        """Move the gradient of one parameter in, scaled; none counts as unused."""
        with torch.no_grad():
            if param.grad is None:
                self._take_absent(index)
            else:
                torch.mul(param.grad, self.scale, out=self._places()[index])

    def finish(self, used: Collection[int]) -> None:
        """The sum is there: give it out in full precision. A gradient that was there keeps its identity."""
        self.install()
        places = self._places()
        for i, p in self.members.items():
            if i in self._absent and i not in used:
                continue
            raise_precision(p)
            result = torch.empty_like(p, dtype=gradient_dtype(p)).copy_(places[i].detach()).detach()
            if p.grad is None:
                p.grad = result
            else:
                p.grad.data = result

    def zeros(self) -> torch.Tensor:
        """What a rank without gradients would contribute."""
        return super().zeros().to(self._dtype)

    def _dtype_like(self, like: torch.Tensor) -> torch.dtype:
        return self._dtype


class MixedGraphBucket(MixedBucket, GraphBucket):
    """Filled by a compiled graph, whose gradients are of the parameters' low precision."""

    def lend(self, slots: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As of GraphBucket; other memory if the graph's dtype is another."""
        flat = super().lend(slots, dtype)
        return flat if flat.dtype is dtype else torch.empty_like(flat, dtype=dtype)

    def fill(self, views: Mapping[int, torch.Tensor]) -> None:
        """As of GraphBucket; what was written elsewhere moves to the dtype of the reduction."""
        places = self._places()
        super().fill({i: v if v.dtype is self._dtype else places[i].copy_(v) for i, v in views.items()})

    def install(self) -> None:
        """A backward is over: gradients that were there are back; `finish` gives them, or new ones, the result."""
        for i in self.given:
            self.members[i].grad = self._before.get(i)
        self.given.clear()

    def _fits(self, dtype: torch.dtype) -> bool:
        return True


def raise_precision(param: torch.Tensor) -> None:
    """Give a parameter its full data back, if it has not, and its gradient the same dtype.

    What was written to the low data is kept, rounded as it is, and said.
    """
    if _is_low(param):
        if _version(param) != param._low_version:  # type: ignore[attr-defined]
            warnings.warn(messages.ROUNDED, stacklevel=2)
            param._fp_param.copy_(param.data)  # type: ignore[attr-defined]
        param.data = param._fp_param  # type: ignore[attr-defined]
        param._mp_param = param._mp_param.new_empty(0)  # type: ignore[attr-defined]
        if param.grad is not None:
            param.grad.data = param.grad.to(gradient_dtype(param))


def _version(param: torch.Tensor) -> int:
    return 0 if param.is_inference() else param._version


def _is_low(param: Any) -> bool:
    """Whether its data is the low one, and not what somebody has converted it to since."""
    return param.dtype is param._mp_param.dtype and bool(param.is_set_to(param._mp_param))
