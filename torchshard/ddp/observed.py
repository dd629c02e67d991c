"""The reducer with what a wrapper asks of it besides: steps recorded, futures awaited, backwards of others shadowed."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from torchshard import _torch
from torchshard.buckets import LinkSpeed, best_policy
from torchshard.ddp.flat import FlatBucket
from torchshard.ddp.graphs import GraphBucket
from torchshard.ddp.recording import Step
from torchshard.ddp.reducer import Reducer


class ObservedReducer(Reducer):
    """See Reducer.

    Attributes:
        step: that is being recorded, if one is.
        has_learned: whether the buckets are those of a backward that was seen.
        link: between the ranks, if sizes of buckets are to be chosen by it.
        last_backward: seconds that the last recorded backward has taken before the last buckets were waited for.
        unused_bytes: of parameters that had no gradient in the last backward that was recorded.
    """

    step: Step | None = None
    has_learned = False
    link: LinkSpeed | None = None
    last_backward = 0.0
    unused_bytes = 0
    _uneven = False

    # ---------------------------------------------------------------------------------------------- recording

    def check_group(self) -> None:
        """Raise RuntimeError if the process group is no more."""
        if _torch.is_destroyed(self.group):
            raise RuntimeError(
                "DistributedDataParallel: the process group of this wrapper has been destroyed; wrap the module anew, "
                "or use ddp.module, the module inside, where nothing is to be reduced"
            )

    def _enter(self, mode: Any) -> None:
        if mode.name == "SYNC":
            self.check_group()
        super()._enter(mode)
        if self.step is not None and mode.name == "SYNC":
            self.step.begin_backward(self._plan)

    def _settle(self, bucket: FlatBucket) -> None:
        super()._settle(bucket)
        if self.step is not None and not bucket.pending:
            self.step.ready(self._buckets.index(bucket))

    def _launch(self, bucket: FlatBucket) -> None:
        if self.step is None:
            super()._launch(bucket)
            return
        number = self._buckets.index(bucket)
        self.step.launch(number)
        super()._launch(bucket)
        self.step.launched(number, bucket.work)

    def _end_of_sync(self) -> None:
        if self.step is not None:
            self.step.computed()
        super()._end_of_sync()

    def _reset(self) -> None:
        if self.step is not None and self.step.times:
            self.unused_bytes = sum(self._gradients[i].nbytes for b in self._buckets for i in b.absent)
            self.step.finish()
            self.last_backward = (self.step.backward_end - self.step.backward) * 1e-9
            self.step = None
        super()._reset()

    def _learn(self) -> None:
        if self.link is not None and self.last_backward:
            ready = [self._gradients[i] for i in reversed(range(len(self.params)))]
            self.policy = best_policy(ready, self.last_backward, self.link)
        super()._learn()
        self.has_learned = True

    # ---------------------------------------------------------------------------------------------- futures

    def _install_post_backward_futures(self, futures: Iterable[Any]) -> None:
        """Have these waited for at the end of the next backward, or before the next forward."""
        self._futures = [*self._futures, *futures]

    _futures: list[Any] = []  # noqa: RUF012

    def before_forward(self, sync: bool) -> None:
        """As for Reducer."""
        self._await_futures()
        if sync:
            self.check_group()
        if _torch.in_distributed_autograd():  # an error in its backward would lose its text
            raise NotImplementedError(
                "DistributedDataParallel: torch.distributed.autograd collects gradients in a context of its own, where "
                "torchshard does not reduce them yet; run the wrapper's forward outside of that context"
            )
        super().before_forward(sync)

    def _end(self) -> None:
        super()._end()
        self._await_futures()

    def _await_futures(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    # ---------------------------------------------------------------------------------------------- uneven inputs

    def rescale(self, ranks: int, uneven: bool) -> None:
        """Divide by this number of ranks from now on; uneven: others may only shadow the next backward."""
        self._uneven, scale = uneven, 1.0 / ranks
        if scale != self.scale:
            self.scale = scale
            for bucket in self._buckets:
                bucket.scale = scale

    def lend(self, slots: tuple[int, ...]) -> GraphBucket | None:
        """As for Reducer; with uneven inputs all gradients go through hooks, so that shadows know what comes."""
        return None if self._uneven else super().lend(slots)

    def shadow_backward(self) -> None:
        """Play the collectives of a backward that other ranks run, with nothing to give; take over their average."""
        self._forget_failed()
        self.exchange.agreement.restart()
        self.exchange.confirm(self._plan_text)
        flats = [bucket.nothing() for bucket in self._buckets]
        works = [dist.all_reduce(flat, group=self.group, async_op=True) for flat in flats]
        self.exchange.issued += len(works)
        flags = self.exchange.largest([0] * len(self.params)) if self.find_unused else [1] * len(self.params)
        self.exchange.wait(works, "the buckets of ranks that still have inputs")
        for bucket, flat in zip(self._buckets, flats, strict=True):
            bucket.adopt(flat, {i for i, flag in enumerate(flags) if flag})
        self.counters.backwards += 1
        self._rearrange()
