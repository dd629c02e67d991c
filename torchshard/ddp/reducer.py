"""Averages gradients over a process group while backward runs: the one owner of a wrapper's buckets.

Each parameter has a hook that autograd calls when its gradient is complete. Gradients collect in flat buckets; a full
bucket is all-reduced at once, in the buckets' order, so that all ranks issue the same collectives whatever the order
in which their gradients come. When the backward is over, what is under way is waited for.

The first backward uses one bucket for each dtype and device, launched at its end: a collective that the user calls
inside of backward can then not fall between ours in an order of its own. After it, the buckets are laid out in the
order in which gradients arrived on rank 0. A compiled graph may fill whole buckets, laid out as it was compiled; a rank
whose graph is another, or that has none, fills the same buckets through its hooks.
"""

import enum
import functools
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
import torch.distributed as dist

from torchshard import _torch
from torchshard.buckets import BucketPolicy, Gradient, PlannedBucket, names_text, plan_table
from torchshard.ddp import messages
from torchshard.ddp.counters import Counters
from torchshard.ddp.exchange import Exchange
from torchshard.ddp.flat import FlatBucket
from torchshard.ddp.graphs import GraphBucket, make_buckets, reduce_late
from torchshard.ddp.layouts import Event, LaidBucket, decode, encode, is_milestone, lay_out, planned
from torchshard.ddp.passes import ForwardPass, on_gradient, watch

_get_grad = attrgetter("grad")
_ONE_BUCKET = BucketPolicy(cap=1 << 62, first=1 << 62)


class _Mode(enum.Enum):
    """What the hooks do now."""

    IDLE = enum.auto()  # no backward of ours runs
    LOCAL = enum.auto()  # a backward that belongs to no_sync runs
    SYNC = enum.auto()  # a backward runs whose gradients are reduced


class Reducer:
    """Reduces the gradients of some parameters, for one wrapper.

    Args:
        named: the parameters with their names; those that require a gradient.
        group: the ranks to average over.
        policy: sizes of buckets, once the ready order is known.
        views_stay: make each `.grad` a view of its bucket for good.
        find_unused: parameters may have no gradient in a backward; on other ranks they may have one.
        verified: the caller knows that parameters and settings are the same on all ranks.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        group: dist.ProcessGroup,
        policy: BucketPolicy,
        *,
        views_stay: bool = False,
        find_unused: bool = False,
        verified: bool = False,
    ) -> None:
        self.names, self.params = [n for n, _ in named], [p for _, p in named]
        self.group, self.policy, self.find_unused = group, policy, find_unused
        self.device = self.params[0].device
        self.scale = 1.0 / group.size()
        self.counters = Counters()
        self._views_stay, self._verified = views_stay, verified
        self._leaves = [torch.autograd.graph.get_gradient_edge(p).node for p in self.params]
        self.exchange = Exchange(group, self.device)
        self._mode = _Mode.IDLE
        self._end_of_backward: Callable[[], object] = lambda: None
        self._forwards: weakref.WeakSet[ForwardPass] = weakref.WeakSet()  # to be reduced, not yet run backward
        self._reached: list[ForwardPass] = []  # by the backward that runs
        self._armed = False  # by a forward whose outputs may hide tensors
        self._attentive = find_unused  # no hook may be quiet
        self._heard_before: list[list[torch.Tensor]] = []  # before a backward of no_sync
        self._existing: set[int] = set()
        self._touched: set[int] = set()  # had a gradient under no_sync
        self.numbers = {id(p): i for i, p in enumerate(self.params)}
        self.names_by_id = {id(p): n for n, p in named}
        self._gradients = [self._gradient(i) for i in range(len(self.params))]
        self._arrived: list[Event] | None = []  # in a backward whose order is to be learned
        self._by_slots: dict[tuple[int, ...], GraphBucket] = {}
        self._known_slots: set[tuple[int, ...]] = set()  # the layout knew of them, or they have been asked for since
        self._shared: set[int] = set()  # parameters with gradients from a graph and from elsewhere
        self._late: dict[int, torch.Tensor] = {}
        self._wish = False  # for another layout
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._adopt(lay_out((), self._gradients, (), _ONE_BUCKET))

    # ---------------------------------------------------------------------------------------------- forward

    def before_forward(self, sync: bool) -> None:
        """To be called before a forward that builds a graph; raises if the last backward left gradients out."""
        self._forget_failed()
        if not self._forwards:
            for bucket in self._buckets:
                bucket.heard.clear()  # by a backward that was none of ours
        if sync and (missing := self._missing()) and any(len(b.pending) < len(b.members) for b in self._buckets):
            raise RuntimeError(messages.unfinished_text(self.group.rank(), missing, self.names))

    def after_forward(self, output: object, sync: bool) -> None:
        """To be called after it, with what it returned; sync: whether its gradients are to be reduced."""
        forward = ForwardPass(sync)
        certain = watch(output, forward, self._begin)
        if sync:
            self._forwards.add(forward)
            if not certain:
                self._armed = True
                self._listen()

    # ---------------------------------------------------------------------------------------------- backward

    @_torch.untraced
    def _begin(self, forward: ForwardPass) -> None:
        """A backward has reached an output of this forward."""
        self._forget_failed()
        if forward.sync and self._mode is not _Mode.SYNC and any(map(_torch.will_run, self._leaves)):
            self._enter(_Mode.SYNC)
        elif not forward.sync and self._mode is _Mode.IDLE:
            self._enter(_Mode.LOCAL)
        if forward.sync and self._mode is _Mode.SYNC:
            self._reached.append(forward)

    def _listen(self) -> None:
        """From now on every hook has to look whether a backward of ours has begun: outputs do not tell."""
        if not self._attentive:
            self._attentive = True
            self._hook_up()

    def _enter(self, mode: _Mode) -> None:
        if _torch.in_compiled_autograd():
            raise NotImplementedError(
                "DistributedDataParallel: compiled autograd is not supported by torchshard yet, gradients would not be "
                "reduced; run backward without it"
            )
        self._mode = mode
        end = functools.partial(self._end)  # the engine drops it if the backward fails
        self._end_of_backward = weakref.ref(end)
        _torch.queue_callback(end)
        if mode is _Mode.LOCAL:
            self._heard_before = [list(b.heard) for b in self._buckets]
        else:
            self.exchange.agreement.restart()
            if not self._views_stay:
                grads = map(_get_grad, self.params)
                self._existing.clear()
                self._existing.update(i for i, grad in enumerate(grads) if grad is not None)

    @_torch.untraced
    def _outside(self, index: int) -> bool:
        """A gradient has arrived while none is reduced. Whether that has to begin now."""
        if self._mode is _Mode.LOCAL:
            self._touched.add(index)
            return False
        if self._armed or self._forwards:
            self._enter(_Mode.SYNC)
            return True
        return False

    def _hook(self, bucket: FlatBucket, index: int, quiet: int) -> Callable[[torch.Tensor], None]:
        """What autograd calls when the gradient of one parameter is complete.

        Args:
            bucket: of the parameter.
            index: its number.
            quiet: how many others of the bucket only append themselves to `heard`, which is three times cheaper.
        """
        reducer, pending, take = self, bucket.pending, bucket.take
        large, arrived = index in bucket.large, self._arrived

        @_torch.skip_frame
        def gradient_arrived(param: torch.Tensor) -> None:
            if reducer._mode is not _Mode.SYNC and not reducer._outside(index):
                return
            try:
                pending.remove(index)
            except KeyError:
                reducer._again(bucket, index)
                return
            if arrived is not None:
                arrived.append(index)
            if large:
                take(param, index)  # type: ignore[arg-type]
            if len(pending) <= quiet:
                reducer._complete(bucket)

        return gradient_arrived

    @_torch.untraced
    def _again(self, bucket: FlatBucket, index: int) -> None:
        """Autograd is done with a parameter whose place is taken: by a graph, or else by mistake."""
        grad = self.params[index].grad
        if not isinstance(bucket, GraphBucket) or not bucket.is_filled(index):
            raise RuntimeError(messages.twice_text(index, self.names[index]))
        if grad is None:  # nothing came but from the graph
            return
        self._late[index], self.params[index].grad = grad, None
        self._wish = self._wish or index not in self._shared
        self._shared.add(index)

    @_torch.untraced
    def _complete(self, full: FlatBucket) -> None:
        """This bucket seems full. Launch those that are, in order, up to the first that is not."""
        self._settle(full)
        if not full.pending:
            full.close()
        for bucket in self._buckets:
            if bucket.work is None:
                self._settle(bucket)
                if bucket.pending:
                    return
                self._launch(bucket)

    def _settle(self, bucket: FlatBucket) -> None:
        try:
            bucket.settle()
        except KeyError as error:
            raise RuntimeError(messages.twice_text(error.args[0], self.names[error.args[0]])) from None

    def _launch(self, bucket: FlatBucket) -> None:
        if bucket is self._buckets[0]:
            self.exchange.confirm(self._plan_text)
        bucket.close()
        bucket.launch(self.group)
        self.exchange.issued += 1

    @_torch.untraced
    def _end(self) -> None:
        """The engine calls this when a backward is over."""
        if self._mode is _Mode.SYNC:
            self._end_of_sync()
        elif self._mode is _Mode.LOCAL:
            for bucket, before in zip(self._buckets, self._heard_before, strict=True):
                bucket.heard.clear()
                bucket.heard.extend(before)
        self._mode = _Mode.IDLE

    def _end_of_sync(self) -> None:
        for bucket in self._buckets:
            self._settle(bucket)
        if self._missing() and not self.find_unused:
            self._listen()
            self._wait()  # the rest may come in another backward; if it does not, the next forward says so
            for bucket in self._buckets:
                bucket.install()
            return
        for bucket in self._buckets:
            if bucket.work is None:
                self._launch(bucket)
        used = self._used_somewhere() if self.find_unused else range(len(self.params))
        self._wait()
        self.counters.count(self._buckets, self._late)
        for bucket in self._buckets:
            bucket.finish(used)
        self._reduce_late()
        self._reset()
        self._touched.clear()
        self._armed = False
        for forward in self._reached:
            self._forwards.discard(forward)
        self._reached.clear()
        if self._arrived is not None:
            self._learn()
        elif is_milestone(self.counters.backwards) and self._somebody_wishes():
            self._arrived = []
            self._hook_up()

    def _reduce_late(self) -> None:
        if self._late:
            self.exchange.confirm("late: " + ", ".join(self.names[i] for i in sorted(self._late)))
            reduce_late(self._late, self.params, self.scale, self.group, self.exchange.wait)
            self.exchange.issued += 1
            self._late.clear()

    def _somebody_wishes(self) -> bool:
        """Whether the buckets do not fit the graphs of some rank."""
        (wishes,) = self.exchange.largest([int(self._wish)])
        self._wish = False
        return bool(wishes)

    def _used_somewhere(self) -> set[int]:
        """Parameters that got a gradient on some rank since the last reduction."""
        absent = {i for b in self._buckets for i in b.absent} - self._touched
        flags = self.exchange.largest([int(i not in absent) for i in range(len(self.params))])
        return {i for i, flag in enumerate(flags) if flag}

    def _wait(self) -> None:
        for number, bucket in enumerate(self._buckets):
            if bucket.work is not None:
                what = f"bucket {number} ({names_text(self._plan[number].params)})"
                self.exchange.wait([bucket.work], what)

    def _missing(self) -> list[int]:
        """Parameters whose gradients have not arrived since the last reduction."""
        return sorted(i for b in self._buckets for i in b.pending)

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.reset()

    def _forget_failed(self) -> None:
        """If the last backward ended in an exception, start afresh."""
        if self._mode is _Mode.IDLE or self._end_of_backward() is not None:
            return
        self._mode = _Mode.IDLE
        self._wait()
        self._reset()
        self._late.clear()
        self._reached.clear()
        if self._arrived:
            self._arrived.clear()

    # ---------------------------------------------------------------------------------------------- graphs

    def lend(self, slots: tuple[int, ...]) -> GraphBucket | None:
        """The bucket that a compiled graph may fill now, in a backward; None if these gradients go through hooks.

        The graph writes into `bucket.lend()`, calls `bucket.fill` and then `graph_filled`.

        Args:
            slots: numbers of the parameters, in the order of the graph's bucket.
        """
        if not self._handles or torch.is_grad_enabled() or len(self._forwards) > 1 or not self._is_reducing():
            return None
        bucket = self._by_slots.get(slots)
        if bucket is None or not bucket.ready_for_graph():
            self._wish = self._wish or (self._arrived is None and slots not in self._known_slots)
            self._known_slots.add(slots)
            return None
        return bucket if all(_torch.will_run(self._leaves[i]) for i in bucket.members) else None

    def graph_filled(self, slots: tuple[int, ...], bucket: GraphBucket | None) -> None:
        """The gradients of these parameters are there; in the bucket that was lent, or else on their way to hooks."""
        if self._arrived is not None:
            self._arrived.append(slots)
        if bucket is not None:
            self._complete(bucket)

    def _is_reducing(self) -> bool:
        if self._mode is _Mode.IDLE and (self._armed or self._forwards):
            self._enter(_Mode.SYNC)
        return self._mode is _Mode.SYNC

    # ---------------------------------------------------------------------------------------------- layout

    @property
    def plan(self) -> tuple[PlannedBucket, ...]:
        """The buckets as they are laid out now; `str(reducer)` shows them as a table."""
        return self._plan

    def __str__(self) -> str:
        return plan_table(self._plan)

    def remove_hooks(self) -> None:
        """Leave the parameters as they were found."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _learn(self) -> None:
        """Lay the buckets out by what rank 0 has seen in this backward."""
        assert self._arrived is not None, "there is something to learn from"
        numbers = encode(lay_out(self._arrived, self._gradients, self._shared, self.policy))
        numbers = self.exchange.of_first_rank(numbers)
        self._known_slots = {event for event in self._arrived if isinstance(event, tuple)}
        self._arrived = None
        self._adopt(decode(numbers))

    def _adopt(self, layout: tuple[LaidBucket, ...]) -> None:
        self._plan = planned(layout, self._gradients)
        self._plan_text = messages.plan_text(self._plan, self.params)
        if self._verified:
            self.exchange.agreement.adopt(self._plan_text)
        self._buckets = make_buckets(layout, self.params, self.scale, self._views_stay, self._existing)
        self._by_slots = {b.slots: b for b in self._buckets if isinstance(b, GraphBucket)}
        self._hook_up()

    def _hook_up(self) -> None:
        self.remove_hooks()
        for bucket in self._buckets:
            quiet = set() if self._attentive or self._arrived is not None else bucket.quiet
            for i, p in bucket.members.items():
                hook = bucket.heard.append if i in quiet else self._hook(bucket, i, len(quiet))
                self._handles.append(on_gradient(p, hook))

    def _gradient(self, index: int) -> Gradient:
        p = self.params[index]
        kind = (str(p.dtype).removeprefix("torch."), str(p.device))
        return Gradient(index, self.names[index], p.numel() * p.element_size(), kind)
