"""What autograd calls when the gradient of a parameter is complete: one function for a bucket, given its number."""

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from torchshard import _torch
from torchshard.ddp.buckets.flat import FlatBucket
from torchshard.ddp.reducing.passes import Mode

if TYPE_CHECKING:
    from torchshard.ddp.reducing.reducer import Reducer

Hook = Callable[[torch.Tensor], object]
Method = TypeVar("Method", bound=Callable[..., Any])


def in_turn(method: Method) -> Method:
    """Have this method of a reducer wait for those that other threads are in: autograd has one for each device."""

    @functools.wraps(method)
    def taking_turns(self: "Reducer", *args: Any) -> Any:
        with self.hooks.turn:
            return method(self, *args)

    return cast(Method, taking_turns)


class Hooks:
    """The hooks that are on a reducer's parameters, behind those of others; false if there are none."""

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._counts: list[int] = []  # of hooks on each parameter that has some
        self.turn = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._handles)

    def put(self, reducer: "Reducer") -> None:
        """On each parameter the one that fits the present state, in place of what was there."""
        self.remove()
        for bucket in reducer.buckets:
            bucket.watched = {i for i in bucket.members if _torch.hooks_after(reducer.params[i])}
            for i, hook in _hooks_of(reducer, bucket).items():
                chosen = reducer.traced.hook(i, hook) if reducer.traced else hook
                self._handles.append(_torch.register_after_grad(reducer.params[i], chosen))
        self._counts = _torch.counts_after(reducer.params)

    def move_last(self, reducer: "Reducer") -> None:
        """If others have put some on since, behind them: what they do to a gradient comes before its reduction."""
        if self._handles and _torch.counts_after(reducer.params) != self._counts:
            self.put(reducer)

    def remove(self) -> None:
        """Leave the parameters as they were found."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _hooks_of(reducer: "Reducer", bucket: FlatBucket) -> dict[int, Hook]:
    """The hooks of a bucket's members, as they have to be now."""
    usage = reducer.usage
    if usage.learning:
        return {i: _counting(reducer, bucket, i) for i in bucket.members}
    quiet = set() if reducer.is_attentive or reducer.traced else bucket.quiet - usage.repeated.keys()
    hooks: dict[int, Hook] = {}
    hear, arrive = bucket.heard.append, _arriving(reducer, bucket, len(quiet))
    for i in bucket.members:
        hooks[i] = hear if i in quiet else functools.partial(arrive, i)
        if i in usage.repeated:
            hooks[i] = _repeating(reducer, i, hooks[i])
    return hooks


def _arriving(reducer: "Reducer", bucket: FlatBucket, quiet: int) -> Callable[[int, torch.Tensor], None]:
    """For parameters whose gradients come once in a backward, by their numbers; one function for all of a bucket.

    Args:
        reducer: whose parameters they are.
        bucket: of the parameters.
        quiet: how many others of the bucket only append themselves to `heard`, which is three times cheaper.
    """
    pending, take, arrived, given = bucket.pending, bucket.take, reducer.arrived, bucket.given
    large = () if reducer.holds else bucket.large

    @_torch.skip_frame
    def gradient_arrived(index: int, param: torch.Tensor) -> None:
        if index in given and param.grad is None:
            return
        if reducer.mode is not Mode.SYNC and not reducer.outside(index):
            return
        if index not in pending:
            reducer.again(bucket, index)
            return
        pending.remove(index)
        if arrived is not None:
            arrived.append(index)
        if index in large:
            take(param, index)
        if len(pending) <= quiet:
            reducer.complete(bucket)

    return gradient_arrived


def _repeating(reducer: "Reducer", index: int, act: Hook) -> Hook:
    """For a parameter whose gradient grows several times in each backward of a static graph: act on the last."""
    repeated, left = reducer.usage.repeated, reducer.usage.left

    @_torch.skip_frame
    def gradient_grew(param: torch.Tensor) -> None:
        if reducer.mode is not Mode.SYNC and not reducer.outside(index):
            return
        left[index] = left.get(index, repeated[index]) - 1
        if left[index] <= 0:
            act(param)

    return gradient_grew


def _counting(reducer: "Reducer", bucket: FlatBucket, index: int) -> Hook:
    """For the first backward of a static graph: everything is reduced at its end, and the last use counts."""
    uses, arrived = reducer.usage.uses, reducer.arrived

    @_torch.skip_frame
    def gradient_grew(_param: torch.Tensor) -> None:
        if reducer.mode is not Mode.SYNC and not reducer.outside(index):
            return
        uses[index] = uses.get(index, 0) + 1
        bucket.pending.discard(index)
        if arrived is not None:
            if uses[index] > 1:
                arrived.remove(index)
            arrived.append(index)

    return gradient_grew
