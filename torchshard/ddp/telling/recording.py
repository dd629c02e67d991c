"""When things happened in a step, for some steps: the first ten, then one in a hundred, and those that are asked for.

A step that is not recorded pays for a comparison with None here and there, and for no clock.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchshard.buckets import PlannedBucket
from torchshard.timeline import Span, Timeline

_FIRST = 10


@dataclass(slots=True)
class BucketTimes:
    """Of one bucket, in ns of time.time_ns(): when it was full, when it left, when the result was there."""

    ready: int = 0
    launched: int = 0
    done: int = 0


@dataclass(slots=True)
class Step:
    """One forward with its backward, on the host's clock: what an accelerator does later is not seen.

    Attributes:
        number: which forward it was, from 1.
        keep: called when the step is over.
        plan: the buckets of its backward.
        times: of each bucket.
        forward, forward_end, backward, backward_end, end: ns; when forward and backward began and ended, and when
            all gradients were reduced.
    """

    number: int
    keep: Callable[["Step"], None]
    forward: int = field(default_factory=time.time_ns)
    forward_end: int = 0
    backward: int = 0
    backward_end: int = 0
    end: int = 0
    plan: tuple[PlannedBucket, ...] = ()
    times: list[BucketTimes] = field(default_factory=list)

    def begin_backward(self, plan: tuple[PlannedBucket, ...]) -> None:
        """The backward has reached an output, or a gradient has come."""
        self.lay_out(plan)
        self.backward = time.time_ns()

    def lay_out(self, plan: tuple[PlannedBucket, ...]) -> None:
        """None of its buckets has been full before."""
        self.plan, self.times = plan, [BucketTimes() for _ in plan]

    def ready(self, number: int) -> None:
        """A bucket is full; said again, it counts from the first time."""
        times = self.times[number]
        times.ready = times.ready or time.time_ns()

    def launch(self, number: int) -> None:
        """It will be reduced now."""
        self.ready(number)
        self.times[number].launched = time.time_ns()

    def launched(self, number: int, work: Any) -> None:
        """It is being reduced; the future of `work` tells when it is done, if it has one."""
        if hasattr(work, "get_future"):
            work.get_future().add_done_callback(functools.partial(_mark_done, self.times[number]))

    def computed(self) -> None:
        """Autograd is through."""
        self.backward_end = time.time_ns()

    def finish(self) -> None:
        """All gradients are reduced."""
        self.end = time.time_ns()
        for times in self.times:
            times.done = times.done or self.end
        self.keep(self)

    @property
    def communication(self) -> tuple[int, int]:
        """From the first bucket that left to the last result, in ns."""
        sent = [t for t in self.times if t.launched]
        begin = min((t.launched for t in sent), default=self.backward_end)
        return begin, max(begin, *(t.done for t in sent), 0)

    @property
    def timeline(self) -> Timeline:
        """The step as spans, in seconds from the beginning of its forward."""
        second = 1e-9
        spans = [
            Span("forward", f"forward {self.number}", 0.0, (self.forward_end - self.forward) * second),
            Span(
                "backward",
                f"backward {self.number}",
                (self.backward - self.forward) * second,
                (self.backward_end - self.forward) * second,
            ),
        ]
        for k, t in enumerate(self.times):
            if not t.launched:  # nobody had anything for it
                continue
            begin, end = (t.launched - self.forward) * second, (t.done - self.forward) * second
            spans.append(Span(f"bucket {k}", "all-reduce", begin, max(begin, end), "communication"))
        return Timeline(spans)


def _mark_done(times: BucketTimes, _future: object) -> None:
    times.done = time.time_ns()


class Recorder:
    """Decides which steps are recorded, and keeps the last one.

    Attributes:
        rate: after the first ten, every so-many-th step is recorded.
        forwards: how many have begun whose gradients will be reduced.
        last: the last step that was recorded to its end.
    """

    def __init__(self, rate: int = 100) -> None:
        self.rate, self.forwards = rate, 0
        self.last: Step | None = None
        self._wanted = False

    def is_sampled(self, number: int) -> bool:
        """Whether this step, counted from 1, is recorded unasked."""
        return 0 < number <= _FIRST or number % self.rate == 0

    def want(self) -> None:
        """Record the next step in any case."""
        self._wanted = True

    def begin(self) -> Step | None:
        """A forward begins: the step to be recorded, if it is."""
        self.forwards += 1
        if self.is_sampled(self.forwards) or self._wanted:
            self._wanted = False
            return Step(self.forwards, self._keep)
        return None

    def _keep(self, step: Step) -> None:
        self.last = step
