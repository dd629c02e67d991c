"""How what a bucket holds is reduced over the ranks: summed by one collective, or by a hook of the user's."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from torchshard import _torch
from torchshard.comm.waiting import Promise
from torchshard.ddp.buckets.flat import FlatBucket
from torchshard.ddp.buckets.gradbucket import GradBucket
from torchshard.ddp.exchange import Exchange

CommHook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


_AVERAGING: Mapping[Any, torch.dtype | None] = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
"""Hooks of torch's that are linear, up to the rounding of the dtype that they send; None for the gradients' own."""

_FUTURE: Any = (torch.futures.Future, torch.futures.Future.__base__)
_FROM_PYTHON = "\n\nAt:\n"
"""What torch puts between the text of a Python exception raised in a callback and where that was."""
_FROM_GLOO = "gloo/transport/"
"""What is in the text of an exception of a collective that has failed, in a callback too."""


class Sum:
    """One all-reduce for each bucket. Gradients have been divided by the number of ranks on their way in.

    Attributes:
        scale: what gradients are multiplied with on their way in.
        hooked: whether a hook of the user's decides about the result.
        is_linear: whether gradients may as well be reduced in two parts, and added up.
        dtype: that they are sent in, if it is another than theirs; not known of a hook that is not linear.
        text: what becomes of them, for ranks to compare.
        may_step: whether it may write to parameters, as hooks do that step optimizers.
    """

    hooked, is_linear, dtype, text = False, True, None, "averaged"
    may_step = False

    def __init__(self, exchange: Exchange) -> None:
        self.scale = 1.0 / exchange.group.size()
        self._all_reduce: Callable[[torch.Tensor], Any] = exchange.all_reduce

    def use(self, all_reduce: Callable[[torch.Tensor], Any]) -> None:
        """Have this start the sums from now on."""
        self._all_reduce = all_reduce

    def start(self, bucket: FlatBucket, index: int, last: bool) -> None:
        """Begin to reduce a bucket that is full."""
        bucket.work = self._all_reduce(bucket.outgoing())

    def accept(self, bucket: FlatBucket) -> None:
        """The bucket's work is done."""

    def send(self, given: GradBucket) -> Any:
        """Begin to reduce what is in no bucket of the reducer's; the work."""
        return self._all_reduce(given.buffer())

    def received(self, given: GradBucket, work: Any) -> torch.Tensor:
        """What has become of it, once the work is done."""
        return given.complete(given.buffer())

    def ask(self, bucket: GradBucket) -> "torch.futures.Future[Any]":
        """The same as a future, as communication hooks give one."""
        future: torch.futures.Future[Any] = self.send(bucket).get_future()
        return future


class Hooked:
    """A communication hook reduces each bucket, and divides if it wants to; see register_comm_hook.

    Args:
        hook: called with the state and a GradBucket when a bucket is full; what the future that it returns will
            hold replaces the contents of the bucket.
        state: for the hook.

    Attributes:
        in_turn: waits for the bucket before, where buckets must not be on their way together. A callback that waits for
            a collective of its own, as PowerSGD's do, holds one of gloo's two threads; two of them would wait for ever.
    """

    scale, hooked, is_linear = 1.0, True, False
    dtype: torch.dtype | None = None
    text = "given to a communication hook"
    in_turn: Callable[[list[Any]], None] | None = None
    may_step = False  # the hook has not asked a bucket for its parameters yet

    def __init__(self, hook: CommHook, state: object) -> None:
        self.hook, self._state = hook, state
        self._before: list[Any] = []  # the answer that comes first

    def start(self, bucket: FlatBucket, index: int, last: bool) -> None:
        """Begin to reduce a bucket that is full."""
        if index == 0:
            self._before.clear()
        with torch.no_grad():
            given = GradBucket.make(index, *bucket.shown(), bucket.parameters, last)
            bucket.work = self.send(given)

    def accept(self, bucket: FlatBucket) -> None:
        """The bucket's work is done: take its result; raise what the hook's callbacks have raised."""
        self._before.clear()
        if bucket.work is not None:
            bucket.receive(bucket.work.result())
            self.may_step = self.may_step or bucket.work.gave_parameters

    def send(self, given: GradBucket) -> Any:
        """As for Sum."""
        if self.in_turn and self._before:
            self.in_turn(self._before)
        answer = Answer(self.ask(given), given, self.hook)
        self._before = [answer]
        return answer

    def received(self, given: GradBucket, work: Any) -> torch.Tensor:
        """As for Sum."""
        result: torch.Tensor = work.result()
        return result

    def ask(self, bucket: GradBucket) -> "torch.futures.Future[torch.Tensor]":
        """What the hook returns for this bucket; RuntimeError if that is not a future."""
        future = self.hook(self._state, bucket)
        if not _is_future(future):
            kind = type(future)
            raise RuntimeError(
                "DDP communication hook: callback must return a torch.futures.Future object, but got "
                f"{kind.__module__}.{kind.__qualname__}"
            )
        return future


class Averaging(Hooked):
    """One of torch's hooks that average; their sums are made as those of buckets without a hook.

    Args:
        hook, state: as for Hooked.
        exchange: of the wrapper whose hook it is.

    Attributes:
        group: whose ranks it averages over.
    """

    is_linear = True

    def __init__(self, hook: CommHook, state: object, exchange: Exchange) -> None:
        super().__init__(hook, state)
        self.dtype, self._exchange = _AVERAGING[hook], exchange
        self.text = Sum.text if self.dtype is None else f"{Sum.text} in {str(self.dtype).removeprefix('torch.')}"
        self.group = _torch.default_group() if state is None else cast(Any, state)

    def send(self, given: GradBucket) -> Any:
        """As for Sum."""
        buffer = given.buffer()
        sent = (buffer if self.dtype is None else buffer.to(self.dtype)).div_(self.group.size())
        work = self._exchange.all_reduce(sent, self.group)
        future = work.get_future().then(partial(_received, None if self.dtype is None else buffer))
        return Answer(future, given, self.hook, work)

    def ask(self, bucket: GradBucket) -> "torch.futures.Future[torch.Tensor]":
        """As for Sum."""
        future: torch.futures.Future[torch.Tensor] = self.send(bucket).get_future()
        return future


def _received(buffer: torch.Tensor | None, sent: "torch.futures.Future[list[torch.Tensor]]") -> torch.Tensor:
    (result,) = sent.value()
    return result if buffer is None else buffer.copy_(result)


def hooked(hook: CommHook, state: object, exchange: Exchange) -> Hooked:
    """How buckets are reduced if this hook is registered."""
    averages = any(hook is known for known in _AVERAGING)  # it need not be one that can be hashed
    return Averaging(hook, state, exchange) if averages else Hooked(hook, state)


def _is_future(value: object) -> bool:
    return isinstance(value, _FUTURE)


class Answer(Promise):
    """The promise of a communication hook.

    Args:
        future: of the result.
        given: the bucket that the hook was given.
        hook: which one, for messages.
        collective: whose result the future awaits, if that is known: it says best what has failed.
    """

    def __init__(
        self,
        future: "torch.futures.Future[torch.Tensor]",
        given: GradBucket,
        hook: CommHook,
        collective: Any = None,
    ) -> None:
        super().__init__(future)
        self._given, self._hook, self._collective = given, hook, collective

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when there is a result, or an exception of the hook's own.

        Raises RuntimeError if the time is over, or if a collective of the hook's failed.
        """
        if self._collective is not None:
            self._collective.wait(*([] if timeout is None else [timeout]))
        try:
            return super().wait(timeout)
        except Exception as error:  # of the hook's own, which `result` raises; collectives raise RuntimeErrors alone
            if isinstance(error, RuntimeError) and (_FROM_PYTHON not in str(error) or _FROM_GLOO in str(error)):
                raise
        return True

    @property
    def gave_parameters(self) -> bool:
        """See GradBucket."""
        return self._given.gave_parameters

    def result(self) -> torch.Tensor:
        """What the hook gave; RuntimeError if a callback raised, TypeError or ValueError if it does not fit."""
        result = self._future.wait()
        if not self._given.fits(result):
            wrong = ValueError if isinstance(result, torch.Tensor) else TypeError
            raise wrong(self._given.unfit_text(self._hook, result))
        return self._given.complete(result)
