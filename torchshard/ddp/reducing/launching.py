"""Buckets leave in their order, each as soon as it is full and those before it have left: all ranks send the same."""

from collections.abc import Collection

import torch.distributed as dist

from torchshard import _torch
from torchshard.ddp.buckets.flat import FlatBucket
from torchshard.ddp.buckets.layouts import Events
from torchshard.ddp.buckets.reduction import Hooked, Sum
from torchshard.ddp.exchange import Exchange
from torchshard.ddp.reducing.arrivals import Hooks, in_turn
from torchshard.ddp.reducing.usage import Usage
from torchshard.ddp.telling import messages


class Launching:
    """The part of a reducer that sends buckets, and waits for them.

    Hooks call `complete` in the threads of autograd, one for each device; `hooks.turn` lets them in one at a time.
    """

    names: list[str]
    group: dist.ProcessGroup
    hooks: Hooks
    usage: Usage
    exchange: Exchange
    reduction: Sum | Hooked
    buckets: list[FlatBucket]
    arrived: Events | None
    _plan_text: str
    _names: list[str]  # of the buckets, for messages
    _touched: set[int]

    def _complain(self, index: int) -> None:
        """The gradient of a parameter came that should not."""
        name = self.names[index]
        better = self.usage.too_often(index, name, self.group.rank())
        raise RuntimeError(better or messages.twice_text(index, name))

    @property
    def holds(self) -> bool:
        """Whether nothing leaves before a backward's end: by then buckets are laid out, and a hook sees these alone."""
        return self.arrived is not None and not self.reduction.is_linear

    @_torch.untraced
    @in_turn
    def complete(self, full: FlatBucket) -> None:
        """This bucket seems full. Launch those that are, in order, up to the first that is not."""
        if self.holds:
            return
        self._settle(full)
        if not full.pending:
            full.close()
        for number, bucket in enumerate(self.buckets):
            if bucket.work is None:
                if bucket is not full:
                    self._settle(bucket)
                if bucket.pending:
                    return
                if number == 0:
                    self._confirm()
                self._launch(number, bucket)

    def _launch_rest(self, skipped: Collection[int]) -> None:
        """The backward is over: launch what has not left, full or not, but for those with these numbers."""
        for number, bucket in enumerate(self.buckets):
            if bucket.work is None and number not in skipped:
                self._launch(number, bucket)

    def _settle(self, bucket: FlatBucket) -> None:
        try:
            if bucket.heard:
                bucket.settle()
        except KeyError as error:
            self._complain(error.args[0])

    def _leave_here(self, bucket: FlatBucket) -> None:
        """What was heard of came in a backward that is none of ours: it is reduced with what comes next."""
        self._touched.update(bucket.forget_since(()))

    def _launch(self, number: int, bucket: FlatBucket) -> None:
        bucket.close()
        self.reduction.start(bucket, number, number == len(self.buckets) - 1)
        self.exchange.issued += 1

    def _confirm(self) -> None:
        """Make sure that all ranks are about to send the same buckets, if none has left."""
        if self.buckets and self.buckets[0].work is None:
            self.exchange.confirm(self._plan_text)

    def _wait(self) -> int:
        """Wait for what was launched; how many buckets that were."""
        launched = [(number, bucket.work) for number, bucket in enumerate(self.buckets) if bucket.work is not None]
        for number, work in launched:
            self.exchange.wait([work], self._names[number])
        return len(launched)

    def _missing(self) -> list[int]:
        """Parameters whose gradients have not arrived since the last reduction."""
        return sorted(i for b in self.buckets for i in b.pending)
