"""Averages gradients over a process group while backward runs: the one owner of a wrapper's buckets.

Each parameter has a hook that autograd calls when its gradient is complete. Gradients collect in flat buckets; a full
bucket is reduced at once, in the buckets' order, so that all ranks issue the same collectives whatever the order
in which their gradients come. When the backward is over, what is under way is waited for.

The first backward uses one bucket for each dtype and device, launched at its end: no collective that the user calls in
backward can fall between ours. After it, buckets are laid out in the order in which gradients came on rank 0. A
compiled graph may fill whole buckets; a rank whose graph is another, or that has none, fills them through its hooks.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from torchshard import _torch
from torchshard.buckets import ONE_BUCKET, BucketPolicy, names_text, plan_table
from torchshard.ddp import active
from torchshard.ddp.buckets.flat import FlatBucket
from torchshard.ddp.buckets.graphs import GraphBucket
from torchshard.ddp.buckets.layouts import Events, LaidBucket, decode, encode, is_milestone, lay_out, planned
from torchshard.ddp.buckets.making import Recipe
from torchshard.ddp.buckets.reduction import Hooked, Sum
from torchshard.ddp.exchange import Exchange
from torchshard.ddp.reducing.arrivals import Hooks, in_turn
from torchshard.ddp.reducing.backwards import Ending, Leaves
from torchshard.ddp.reducing.counters import Counters
from torchshard.ddp.reducing.launching import Launching
from torchshard.ddp.reducing.lending import Lending
from torchshard.ddp.reducing.passes import ForwardPass, Mode, watch
from torchshard.ddp.reducing.reducer_compat import ReducerCompatibility
from torchshard.ddp.reducing.traced import Traced
from torchshard.ddp.reducing.usage import Usage
from torchshard.ddp.telling import messages

_dtype = attrgetter("grad_dtype")


class Reducer(Launching, ReducerCompatibility):
    """Reduces the gradients of some parameters, for one wrapper.

    Args:
        named: the parameters with their names; those that require a gradient.
        exchange: with the ranks to average over, on the device of the parameters.
        policy: sizes of buckets, once the ready order is known.
        views_stay: make each `.grad` a view of its bucket for good.
        usage: which parameters get a gradient; by default each one in each backward.
        sparse: names of the parameters whose gradients are sparse.
        reduce_dtype: of the reduction, if parameters are of lower precision in forward; see `MixedPrecision`.
        verified: the caller knows that parameters and settings are the same on all ranks.

    Attributes:
        plan: the buckets as they are laid out now; `str(reducer)` shows them as a table.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        exchange: Exchange,
        policy: BucketPolicy,
        *,
        views_stay: bool = False,
        usage: Usage | None = None,
        sparse: Iterable[str] = (),
        reduce_dtype: torch.dtype | None = None,
        verified: bool = False,
    ) -> None:
        self.names, self.params = [n for n, _ in named], [p for _, p in named]
        self.exchange, self.group, self.device, self.policy = exchange, exchange.group, exchange.device, policy
        self.usage = Usage(len(self.params)) if usage is None else usage
        self.reduction: Sum | Hooked = Sum(exchange)
        self.counters = Counters()
        self.lending = Lending(self)
        self.mode = Mode.IDLE
        self.arrived: Events | None = Events()  # in a backward whose order is to be learned
        self.numbers = {id(p): i for i, p in enumerate(self.params)}
        self.names_by_id = {id(p): n for n, p in named}
        self.at_begin: list[Callable[[], None]] = []  # to be called when one begins
        self.at_end: list[Callable[[], None]] = []  # to be called when a backward is over, reduced or not
        self.post_backward: list[Any] = []  # futures to wait for at the end of the next backward
        self.traced: Traced | None = None  # what hooks do under compiled autograd, once that is in use
        self.waits_for_user = False  # a backward is finished by a call of `finish`, not by its end
        self.is_unfinished = False  # a backward is over whose results are not yet handed out
        self._verified = verified
        self.leaves = Leaves(self.params)
        self.at_failure: list[Callable[[], None]] = [active.show_running]  # to be called when one has failed
        self.ending = Ending(self._end, self.at_failure)
        self._forwards: set[weakref.ref[ForwardPass]] = set()  # to be reduced, not yet run backward
        self._reached: set[weakref.ref[ForwardPass]] = set()  # by backward, since the last reduction
        self._begins = weakref.WeakMethod(self._begin)
        self._armed = self._listening = False  # armed by a forward to be reduced, until the next reduction
        self._again = False  # the last forward ran inside of a backward
        self._heard_before: list[list[torch.Tensor]] = []  # before a backward of no_sync
        self._touched: set[int] = set()  # had a gradient that was not reduced, since the last that was
        self.hooks = Hooks()
        chosen = set(sparse)
        numbers = frozenset(i for i, n in enumerate(self.names) if n in chosen)
        self._recipe = Recipe(self.params, views_stay, numbers, reduce_dtype)
        self._look_at_dtypes()
        self._adopt(lay_out((), self._gradients, (), ONE_BUCKET), agreed=verified)

    # ---------------------------------------------------------------------------------------------- forward

    def before_forward(self, sync: bool) -> None:
        """To be called before a forward that builds a graph; raises if the last backward left gradients out."""
        left_out = self._missing() if self.usage.broken and not self.in_backward else []
        self._forget_failed()
        if self.in_backward:  # a checkpoint around the wrapper runs it again
            return
        if self.is_unfinished:
            raise RuntimeError(messages.UNFINALIZED)
        self.hooks.move_last(self)
        has_begun = False
        for bucket in self.buckets:
            if sync and self._armed:
                self._settle(bucket)  # by one that reached quiet parameters only
            has_begun = has_begun or bucket.has_begun()
        if sync and has_begun and not left_out:
            left_out = self._missing()
        if left_out:
            raise RuntimeError(messages.unfinished_text(self.group.rank(), left_out, self.names, self.usage.is_static))
        if sync and not self._recipe.reduce_dtype and [*map(_dtype, self.params)] != self._dtypes:
            self._follow_conversion()

    def after_forward(self, output: object, sync: bool) -> ForwardPass:
        """To be called after it, with what it returned; sync: whether its gradients are to be reduced."""
        forward = ForwardPass(sync)
        certain = watch(output, forward, self._begins, self.traced)
        if self.mode is Mode.IDLE and not (self._armed or self._forwards):
            for bucket in self.buckets:
                if bucket.heard:  # before this forward, or inside of it
                    self._leave_here(bucket)
        if sync:
            self._forwards.add(weakref.ref(forward, self._forwards.discard))
            self._armed = True
            if not certain:
                self._listen()
        return forward

    # ---------------------------------------------------------------------------------------------- backward

    @_torch.untraced
    @in_turn
    def _begin(self, forward: ForwardPass) -> None:
        """A backward has reached an output of this forward."""
        self._forget_failed()
        if not forward.sync:
            if self.mode.is_open:
                self._enter(Mode.LOCAL)
            return
        if self.mode is not Mode.SYNC and self.leaves.some_will_run():
            self._enter(Mode.SYNC)
        elif self.mode is Mode.IDLE and _torch.may_nest():  # as re-entrant checkpoints have it
            self.mode = Mode.AROUND
            active.show(self)
            self.ending.ask()
        elif self.mode is not Mode.SYNC:
            return
        self._reached.add(weakref.ref(forward))

    @property
    def in_backward(self) -> bool:
        """Whether a backward of ours runs."""
        return self.ending.is_awaited

    @property
    def is_attentive(self) -> bool:
        """Whether no hook may be quiet."""
        return self._listening or self.usage.attentive or self.arrived is not None

    def _listen(self) -> None:
        """From now on every hook has to look whether a backward of ours has begun: outputs do not tell."""
        if not self._listening:
            was, self._listening = self.is_attentive, True
            if not was:
                self.hooks.put(self)

    def _enter(self, mode: Mode) -> None:
        if _torch.in_compiled_autograd():
            raise NotImplementedError(messages.UNFORESEEN)
        if self.is_unfinished:
            raise RuntimeError(messages.UNFINALIZED)
        self.mode = mode
        active.show(self)
        for act in self.at_begin:
            act()
        if self.arrived is not None and not self.arrived:  # one backward, or the first of several
            self.arrived.begin = time.perf_counter()
        self.ending.ask()
        if mode is Mode.LOCAL:
            self._heard_before = [list(b.heard) for b in self.buckets]
            for bucket in self.buckets:
                bucket.heard.clear()
        else:
            self.exchange.agreement.restart()
            for bucket in self.buckets:
                bucket.begin()

    @_torch.untraced
    def outside(self, index: int) -> bool:
        """A gradient has arrived while none is reduced. Whether that has to begin now."""
        begins = self.mode is not Mode.LOCAL and self._begins_now()  # that is LOCAL until its end
        if not begins:
            self._touched.add(index)
        return begins

    @in_turn
    def _begins_now(self) -> bool:
        if self.mode is Mode.SYNC:  # another thread was here first
            return True
        if self._armed or self._forwards:
            if self.usage.tolerant and not (self._again or self.in_backward) and _torch.is_nested():
                raise NotImplementedError(messages.NESTED)  # at whose end all that is missing would count as unused
            self._enter(Mode.SYNC)
            return True
        return False

    @_torch.untraced
    def again(self, bucket: FlatBucket, index: int) -> None:
        """Autograd is done with a parameter whose place is taken: by a graph, or else by mistake."""
        if not self.lending.again(bucket, index):
            self._complain(index)

    @_torch.untraced
    def _end(self) -> None:
        """The engine calls this when a backward is over."""
        if self.mode is Mode.AROUND and any(b.heard for b in self.buckets):
            self._enter(Mode.SYNC)  # none but quiet hooks have noticed the backwards inside
        if self.mode is Mode.SYNC:
            self._end_of_sync()
        elif self.mode is Mode.LOCAL:
            for bucket, before in zip(self.buckets, self._heard_before, strict=True):
                self._touched.update(bucket.forget_since(before))
        self.mode = Mode.IDLE
        active.show_running()
        self.ending.come()
        while self.post_backward:
            self.post_backward.pop().wait()
        for act in self.at_end:
            act()

    def _end_of_sync(self) -> None:
        if self.arrived is not None:
            self.arrived.end = time.perf_counter()
        for bucket in self.buckets:
            self._settle(bucket)
            if self.usage.learning and not self.holds:
                bucket.take_large()
        if not self.usage.tolerant and any(b.pending for b in self.buckets):
            self._listen()
            self._wait()  # the rest may come in another backward; if it does not, the next forward says so
            for bucket in self.buckets:
                bucket.install()
            return
        self._confirm()
        if self.holds:
            self._lay_out_before()
        if self._touched:
            self._touched = {i for i in self._touched if self.params[i].grad is not None}  # not dropped since
        self._launch_rest(self.usage.skipped(self.buckets, self._touched, self.exchange))
        self.is_unfinished = True
        if not self.waits_for_user:
            self.finish()

    def _lay_out_before(self) -> None:
        """The buckets of the backwards to come are those of this one, too."""
        before = self.buckets
        self._learn()
        for bucket in self.buckets:
            bucket.succeed(before)
        self._confirm()

    def finish(self) -> None:
        """Wait for the reduction of the last backward, and hand its results out."""
        if not self.is_unfinished:
            raise RuntimeError(messages.NOTHING_TO_FINALIZE)
        self.mode = Mode.SYNC  # until all is done: what fails before is forgotten by the next forward
        used = self.usage.decide({i for b in self.buckets for i in b.absent}, self._touched, self.exchange)
        self._wait()
        self.counters.count(self.buckets, self.lending.late)
        for bucket in self.buckets:
            self.reduction.accept(bucket)
            bucket.finish(used)
        self.lending.reduce_late()
        self.is_unfinished = False
        self._reset()
        self._touched.clear()
        self._armed = False
        self._forwards -= self._reached
        self._reached.clear()
        self._rearrange()
        self.mode = Mode.IDLE

    def _rearrange(self) -> None:
        """A backward has been reduced on all ranks; maybe the next one is to use other buckets."""
        if self.holds:  # laid out already
            self.arrived = None
            self._adopt(self._layout, agreed=self._verified)
        elif self.arrived is not None:
            self._learn()
        elif is_milestone(self.counters.backwards) and self.lending.somebody_wishes():
            self._learn_again()

    def _learn_again(self) -> None:
        """Lay the buckets out anew after the next backward."""
        self.arrived = Events()
        self.hooks.put(self)

    def _reset(self) -> None:
        self.usage.reset()
        self.lending.end_checks()
        for bucket in self.buckets:
            bucket.reset()

    def _forget_failed(self) -> None:
        """If the last backward ended in an exception, start afresh, together with the ranks that have heard of it."""
        if self.mode is Mode.IDLE or self.in_backward:
            return
        self.mode, self.is_unfinished = Mode.IDLE, False
        if launched := self._wait():
            self.exchange.compare(messages.failed_text(launched, len(self.buckets)))
        self._reset()
        self.lending.late.clear()
        self._reached.clear()
        if self.arrived:
            self.arrived.clear()
        if self.usage.learning:
            self.usage.uses.clear()

    # ---------------------------------------------------------------------------------------------- graphs

    @in_turn
    def lend(self, slots: tuple[int, ...], dtype: torch.dtype) -> GraphBucket | None:
        """The bucket a segment of which a graph may fill, by its `lend` and `fill`; None if hooks bring the gradients.

        Args:
            slots: numbers of the parameters, in the graph's order.
            dtype: that the graph writes.
        """
        if not self.hooks or torch.is_grad_enabled() or len(self._forwards) > 1:
            return None
        if self.mode.is_open and (self._armed or self._forwards) and self.leaves.some_will_run():
            self._enter(Mode.SYNC)
        return self.lending.lend(slots, dtype) if self.mode is Mode.SYNC else None

    def graph_filled(
        self, slots: tuple[int, ...], bucket: GraphBucket | None, results: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """The gradients are there; in the bucket that was lent, or else, as `results` tells, on their way to hooks."""
        if self.arrived is not None and self.mode is Mode.SYNC and self.lending.learns(slots):
            self.arrived.append(slots)
            if bucket is None and len(self._forwards) <= 1:
                self.lending.check(slots, results())
        if bucket is not None and not bucket.pending:
            self.complete(bucket)

    # ---------------------------------------------------------------------------------------------- layout

    def _look_at_dtypes(self) -> None:
        self._dtypes = [*map(_dtype, self.params)]
        self._gradients = [self._recipe.gradient(i, n) for i, n in enumerate(self.names)]

    def _follow_conversion(self) -> None:
        """Gradients are of another dtype than before: new buckets, which the ranks compare before the first leaves."""
        self._look_at_dtypes()
        if all(len({self._dtypes[i] for i in laid.members}) == 1 for laid in self._layout):
            self._adopt(self._layout, agreed=False)
        else:  # some of a bucket's, and others not
            self.arrived = Events()
            self._adopt(lay_out((), self._gradients, (), ONE_BUCKET), agreed=False)

    def __str__(self) -> str:
        return plan_table(self.plan)

    def _learn(self) -> None:
        """Lay the buckets out by what rank 0 has seen in this backward."""
        assert self.arrived is not None, "there is something to learn from"
        events = self.arrived.that_tell(self.group.size())
        laid = lay_out(events, self._gradients, self.lending.shared, self.policy, self.lending.joins)
        numbers = self.exchange.of_first_rank(encode(laid))
        self.lending.know(self.arrived.of_graphs())
        if not self.holds:
            self.arrived = None
        self._adopt(decode(numbers), agreed=self._verified)

    def _adopt(self, layout: tuple[LaidBucket, ...], agreed: bool) -> None:
        self._layout, self.plan = layout, planned(layout, self._gradients)
        how = f"{self.usage.text}, {self.reduction.text}"
        self._plan_text = messages.plan_text(self.plan, self.params, how)
        self._names = [f"bucket {number} ({names_text(bucket.params)})" for number, bucket in enumerate(self.plan)]
        if agreed:
            self.exchange.agreement.adopt(self._plan_text)
        self.buckets = self._recipe.make(layout, self.reduction, self.usage.never)
        self.lending.adopt(self.buckets)
        self.hooks.put(self)
