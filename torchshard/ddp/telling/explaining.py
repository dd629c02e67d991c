"""What a wrapper does with its gradients, for people: the buckets, and the last step that was recorded."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchshard.buckets import BucketPolicy, PlannedBucket, names_text, plan_table, size_text
from torchshard.ddp.reducing.observed import ObservedReducer
from torchshard.ddp.telling.logging import Logger, facts_of
from torchshard.ddp.telling.recording import Recorder, Step
from torchshard.simulation import LinkSpeed
from torchshard.timeline import Timeline


@dataclass(frozen=True)
class Explanation:
    """The buckets of a wrapper and the course of one step; str() and text() say it, the others draw it.

    Attributes:
        plan: the buckets as they are laid out now.
        step: the step that is shown; None if none has been recorded.
        policy: sizes of buckets.
        link: between the ranks, if the sizes were chosen by it.
    """

    plan: tuple[PlannedBucket, ...]
    step: Step | None
    policy: BucketPolicy
    link: LinkSpeed | None = None

    @property
    def timeline(self) -> Timeline:
        """Forward, backward and every bucket on its way; RuntimeError if no step has been recorded."""
        if self.step is None:
            raise RuntimeError("no step has been recorded yet: call explain() after a forward and its backward")
        return self.step.timeline

    @property
    def exposed(self) -> float:
        """Seconds in which gradients were under way and nothing was computed."""
        return self.timeline.exposed()

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 72) -> str:
        """Both as text; times in ms since backward began, on the host's clock."""
        if self.step is None:
            return f"{plan_table(self.plan)}\n\nno step has been recorded yet"
        return f"{self._table(self.step)}\n\n{self._summary(self.step)}\n\n{self.timeline.text(width)}"

    def chrome_trace(self) -> str:
        """The timeline as JSON for chrome://tracing and Perfetto."""
        return self.timeline.chrome_trace()

    def picture(self, path: str | Path) -> None:
        """The timeline as a picture, drawn with matplotlib (the extra `plot`)."""
        self.timeline.picture(path, title=f"step {self.step.number}" if self.step else "")

    def _table(self, step: Step) -> str:
        from tabulate import tabulate

        rows = []
        for k, (bucket, times) in enumerate(zip(step.plan, step.times, strict=True)):
            moments = [(at - step.backward) / 1e6 for at in (times.ready, times.launched, times.done)]
            rows.append((k, names_text(bucket.params), size_text(bucket.nbytes), *moments))
        headers = ["bucket", "parameters", "bytes", "ready ms", "launched ms", "done ms"]
        return str(tabulate(rows, headers, floatfmt=".2f"))

    def _summary(self, step: Step) -> str:
        begin, end = step.communication
        parts = {
            "forward": step.forward_end - step.forward,
            "backward": step.backward_end - step.backward,
            "communication": end - begin,
        }
        times = ", ".join(f"{name} {ns / 1e6:.2f} ms" for name, ns in parts.items())
        said = f"step {step.number}: {times}, of which {self.exposed * 1e3:.2f} ms were exposed"
        if self.link is None:
            return said
        link = f"{self.link.latency * 1e3:.2f} ms and {size_text(int(self.link.bandwidth))}/s"
        packed = ", with numbers packed on their way" if self.link.packed else ""
        cap, first = self.policy.cap, self.policy.first
        smaller = f", the first of {size_text(first)}," if first < cap else ""
        return f"{said}\nbuckets of {size_text(cap)}{smaller} were chosen for a link of {link}{packed}"


class Explaining:
    """The part of the wrapper that can say what it does."""

    reducer: ObservedReducer
    logger: Any
    require_backward_grad_sync: bool
    _recorder: Recorder

    def explain(self) -> Explanation:
        """The buckets, and when they were full, left and were done in the last step that was recorded.

        The first ten steps are recorded, then each hundredth, and the one that follows a call of this method.

        Example:
            >>> print(ddp.explain())                                        # doctest: +SKIP
            >>> ddp.explain().picture("step.png")                           # doctest: +SKIP
        """
        self._recorder.want()
        return Explanation(self.reducer.plan, self._recorder.last, self.reducer.policy, self.reducer.link)

    def _build_logger(self) -> None:
        self._recorder = Recorder()
        self.logger = Logger(facts_of(self), self.reducer, self._recorder)
        self.reducer.noting = self.logger.noting

    def _begin_step(self) -> None:
        """A forward begins that builds a graph; raise if the last backward has left gradients out."""
        self._check_finalized(self.require_backward_grad_sync)
        if self.reducer.in_backward:  # a forward is run again: the step goes on
            return
        self.reducer.step = None
        if self.require_backward_grad_sync:
            self.logger.next_forward()
            self.reducer.step = self._recorder.begin()

    def _end_forward(self) -> None:
        if self.reducer.step is not None and not self.reducer.in_backward:
            self.reducer.step.forward_end = time.time_ns()

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError if the last backward has left gradients of some parameters out."""
        self._check_finalized(sync=True)

    def _check_finalized(self, sync: bool) -> None:
        try:  # what `noting` does, which takes longer to enter and to leave
            self.reducer.before_forward(sync)
        except Exception as error:
            self.logger.note(error)
            raise

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """What torch's logger gives under the same keys; its durations are of the last recorded step, in ns."""
        data = self.logger._get_ddp_logging_data()
        return {**data.strs_map, **data.ints_map}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Record every so-many-th step after the first ten; ValueError for less than 1."""
        with self.logger.noting():
            if sample_rate < 1:
                raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
        self._recorder.rate = sample_rate
