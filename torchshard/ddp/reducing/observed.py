"""The reducer with what a wrapper asks of it besides: hooks, steps recorded, backwards of others shadowed."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from torchshard import _torch
from torchshard.buckets import BucketPolicy
from torchshard.ddp.buckets.flat import FlatBucket
from torchshard.ddp.buckets.graphs import GraphBucket
from torchshard.ddp.buckets.layouts import Events
from torchshard.ddp.buckets.reduction import Averaging, CommHook, Hooked, Sum, hooked
from torchshard.ddp.members import Members
from torchshard.ddp.reducing.optimizers import SteppingHook
from torchshard.ddp.reducing.passes import ForwardPass, Mode
from torchshard.ddp.reducing.reducer import Reducer
from torchshard.ddp.reducing.traced import Traced
from torchshard.ddp.reducing.usage import StaticUsage
from torchshard.ddp.telling import messages
from torchshard.ddp.telling.recording import Step
from torchshard.simulation import LinkSpeed, best_link, best_policy

_EACH_SUM = 2.5e-4
"""Seconds that the processor is at work for each sum of gloo's, beside a backward that needs all cores."""

_EACH_PIECE = 3e-4
"""Seconds that a step takes longer for each compiled piece that a graph is cut into, both ways, on one core."""


class ObservedReducer(Reducer):
    """See Reducer.

    Attributes:
        step: that is being recorded, if one is.
        has_learned: whether the buckets are those of a backward that was seen.
        link: between the ranks, if sizes of buckets are to be chosen by it; as it is used.
        links: the ways in which it may be used.
        unused_bytes: of parameters that had no gradient in the last backward that was recorded.
        members: the parameters as they were wrapped.
        noting: a context that notes what is raised inside, for who asks later.
    """

    noting: Callable[[], AbstractContextManager[None]] = nullcontext
    members: Members | None = None
    step: Step | None = None
    has_learned = False
    link: LinkSpeed | None = None
    links: tuple[LinkSpeed, ...] = ()
    unused_bytes = 0

    # ---------------------------------------------------------------------------------------------- settings

    def use_hook(self, hook: CommHook, state: object) -> None:
        """Have a communication hook reduce the buckets from now on; RuntimeError if there is one."""
        if self.reduction.hooked:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._take_hook(hooked(hook, state, self.exchange))

    def take_over(self, other: "ObservedReducer") -> None:
        """The settings of another reducer of these parameters, or of some, and what it has heard under no_sync.

        A hook keeps the group that it has, but for one that steps optimizers: such a one is made anew.
        """
        if isinstance(other.reduction, Hooked) and not isinstance(other.reduction.hook, SteppingHook):
            self._take_hook(other.reduction)
        self.waits_for_user = other.waits_for_user
        self._recipe.rows.update((self.numbers[id(other.params[i])], rows) for i, rows in other._recipe.rows.items())
        for bucket in other.buckets:
            other._leave_here(bucket)
        self._touched = {self.numbers[id(other.params[i])] for i in other._touched}

    @property
    def may_remember_buckets(self) -> bool:
        """Whether a hook may have kept something for each bucket, by its number, as PowerSGD does."""
        reduction = self.reduction
        if not isinstance(reduction, Hooked) or reduction.is_linear or not self.counters.backwards:
            return False
        return not isinstance(reduction.hook, SteppingHook)

    def _take_hook(self, reduction: Hooked) -> None:
        on_gloo = self.exchange.device.type == "cpu" or _torch.group_backend(self.group) == "gloo"
        wait = partial(self.exchange.wait, what="the bucket before the one that is full")
        reduction.in_turn = wait if on_gloo and not reduction.is_linear else None
        self.reduction = reduction
        self.link = self.links[0] if self.links else None  # which the hook uses in its own way
        self._adopt(self._layout, agreed=False)

    def choose_sizes(self, *links: LinkSpeed) -> None:
        """Find out which sizes of buckets suit the link between the ranks, and which way of using it, if there is one.

        Args:
            links: the ways, the plain one first.
        """
        self.links, self.link = links, links[0] if links else None
        if links:
            self.lending.await_sizes()

    def use_static_graph(self) -> None:
        """Take all backwards for alike; RuntimeError if one has been reduced already."""
        if self.counters.backwards:
            raise RuntimeError(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed."
            )
        self.usage = StaticUsage(len(self.params))
        self._adopt(self._layout, agreed=False)

    def use_rows(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Send only these rows of sparse gradients, by name of the parameter; ValueError for one that has none."""
        numbers = {self.names[i]: i for i in self._recipe.sparse}
        if unknown := rows.keys() - numbers:
            raise ValueError(
                f"_set_sparse_metadata: {', '.join(sorted(unknown))} is no parameter with sparse gradients; these are "
                f"{', '.join(numbers) or 'none'}"
            )
        self._recipe.rows.clear()
        self._recipe.rows.update((numbers[name], ids.to(self.device, torch.int64)) for name, ids in rows.items())

    def _use_scale(self) -> None:
        for bucket in self.buckets:
            bucket.scale = self.reduction.scale

    # ---------------------------------------------------------------------------------------------- errors

    def _complain(self, index: int) -> None:
        with self.noting():
            super()._complain(index)

    def check_group(self) -> None:
        """Raise RuntimeError if the process group is no more."""
        if self.exchange.is_over():
            raise RuntimeError(
                "DistributedDataParallel: the process group of this wrapper has been destroyed; wrap the module anew, "
                "or use ddp.module, the module inside, where nothing is to be reduced"
            )

    def _begins_now(self) -> bool:
        """As for Reducer; of a group that is no more, only outputs tell, if they can: else it is the module's, or that
        of a wrapper made anew."""
        if self.mode is Mode.IDLE and not self._listening and self.exchange.is_over():
            return False
        return super()._begins_now()

    # ---------------------------------------------------------------------------------------------- recording

    def _enter(self, mode: Mode) -> None:
        if mode is Mode.SYNC:
            self.check_group()
        super()._enter(mode)
        if self.step is not None and mode is Mode.SYNC:
            self.step.begin_backward(self.plan)

    def _settle(self, bucket: FlatBucket) -> None:
        super()._settle(bucket)
        if self.step is not None and not bucket.pending:
            self.step.ready(self.buckets.index(bucket))

    def _launch(self, number: int, bucket: FlatBucket) -> None:
        if self.step is None:
            super()._launch(number, bucket)
            return
        self.step.launch(number)
        super()._launch(number, bucket)
        self.step.launched(number, bucket.work)

    def _end_of_sync(self) -> None:
        if self.step is not None:
            self.step.computed()
        super()._end_of_sync()

    def _reset(self) -> None:
        if self.step is not None and self.step.times:
            self.unused_bytes = sum(self._gradients[i].nbytes for b in self.buckets for i in b.absent)
            self.step.finish()
            self.step = None
        super()._reset()

    def _learn(self) -> None:
        events = self.arrived
        assert events is not None, "there is something to learn from"
        first, self.has_learned = not self.has_learned, True
        compiled = first and bool(events.of_graphs())  # while it ran
        if self.link is not None:
            self._choose_policy(events if events and not compiled else None)
        super()._learn()
        if self.link is not None and first and not self.holds and any(isinstance(b, GraphBucket) for b in self.buckets):
            self._learn_again()  # decided by the layout, which all ranks have in common

    def _learn_again(self) -> None:
        if not self.may_remember_buckets:
            super()._learn_again()

    def _lay_out_before(self) -> None:
        super()._lay_out_before()
        if self.step is not None:
            self.step.lay_out(self.plan)

    def _choose_policy(self, seen: Events | None) -> None:
        """Use the sizes, and the link in the way, that suit what rank 0 has seen of a backward, if it has seen one."""
        numbers = [0] * 5
        if seen:
            ready = seen.as_gradients(self._gradients)
            times = seen.times(ready)
            ways = self.links if isinstance(self.reduction, Sum) else self.links[:1]
            each = _EACH_SUM if self.device.type == "cpu" else 0.0
            way = best_link(ready, times, ways, each)
            found = [best_policy(ready, times, ways[way], cost) for cost in (each, each + _EACH_PIECE)]
            numbers = [way, *(size for policy in found for size in (policy.cap, policy.first))]
        way, cap, first, piece, first_piece = self.exchange.of_first_rank(numbers)
        if cap:
            self._use_link(self.links[way])
            self.policy = self.lending.adjust(BucketPolicy(cap, first))
            if self.lending.pieces is None:  # once, as each change costs a compilation
                self.lending.use_sizes(self.lending.segments, BucketPolicy(piece, first_piece))

    def _use_link(self, link: LinkSpeed) -> None:
        self.link = link
        if isinstance(self.reduction, Sum):
            self.reduction.use(self.exchange.packed_all_reduce if link.packed else self.exchange.all_reduce)

    # ---------------------------------------------------------------------------------------------- forward

    def before_forward(self, sync: bool) -> None:
        """As for Reducer."""
        self._again = _torch.in_backward()
        if sync:
            self.check_group()
        if _torch.in_distributed_autograd():  # an error in its backward would lose its text
            raise NotImplementedError(
                "DistributedDataParallel: torch.distributed.autograd collects gradients in a context of its own, where "
                "torchshard does not reduce them yet; run the wrapper's forward outside of that context"
            )
        if self.traced is None and _torch.compiled_autograd_may_come():
            self.traced = Traced(self)
            self.hooks.put(self)
        if self.traced is not None:
            self.traced.before_forward(self, self._excluded())
        super().before_forward(sync)

    def after_forward(self, output: object, sync: bool) -> ForwardPass:
        """As for Reducer; RuntimeError if a parameter has come to be trained in that forward."""
        if not self.in_backward and (thawed := self.look_at_members()):
            raise RuntimeError(messages.thawed_text(thawed))
        return super().after_forward(output, sync)

    def look_at_members(self) -> list[str]:
        """See Members.look."""
        return self.members.look() if self.members else []

    def remove_hooks(self) -> None:
        """As for Reducer."""
        super().remove_hooks()
        if self.members:
            self.members.remove()

    def _excluded(self) -> str | None:
        """The setting by which gradients cannot be averaged one by one under compiled autograd, if there is one."""
        apart = isinstance(self.reduction, Averaging) and self.reduction.group is not self.group
        reasons = {
            "find_unused_parameters=True": self.usage.tolerant and not self.usage.learning,
            "a communication hook of one's own": not self.reduction.is_linear,
            "a communication hook that averages over another process group": apart,
            "a sparse gradient": bool(self._recipe.sparse),
            "mixed_precision": self._recipe.reduce_dtype is not None,
            "require_manual_backward_finalization": self.waits_for_user,
            "join()": self.lending.shadowed,
        }
        return next((setting for setting, applies in reasons.items() if applies), None)

    # ---------------------------------------------------------------------------------------------- uneven inputs

    def rescale(self, ranks: int, uneven: bool) -> None:
        """Divide by this number of ranks from now on, unless a hook does; uneven: others may only shadow backward."""
        self.lending.shadowed, scale = uneven, 1.0 / ranks
        if self.traced is not None:
            self.traced.excluded = self._excluded()
        if not self.reduction.hooked and scale != self.reduction.scale:
            self.reduction.scale = scale
            self._use_scale()

    def lend(self, slots: tuple[int, ...], dtype: torch.dtype) -> GraphBucket | None:
        """As for Reducer; where a shadow could not tell in what precision late gradients come, hooks have them all."""
        return None if self.lending.shadowed and self._recipe.reduce_dtype else super().lend(slots, dtype)

    def shadow_backward(self) -> None:
        """Play the collectives of a backward that other ranks run, with nothing to give; take over their average."""
        self._forget_failed()
        self.exchange.agreement.restart()
        self.exchange.confirm(self._plan_text)
        if self.holds:
            self._lay_out_before()
        given = self._get_zeros_like_grad_buckets()
        works = [self.reduction.send(bucket) for bucket in given]
        self.exchange.issued += len(works)
        used = self.usage.shadow(self.exchange)
        self.exchange.wait(works, "the buckets of ranks that still have inputs")
        for bucket, zeros, work in zip(self.buckets, given, works, strict=True):
            bucket.adopt(self.reduction.received(zeros, work), used)
        self.lending.reduce_late()
        self.counters.backwards += 1
        self._rearrange()
