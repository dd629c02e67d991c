"""Buckets lent to compiled graphs, and gradients that come beside what a graph has reduced already."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, cast

import torch

from torchshard import _torch
from torchshard.buckets import ONE_BUCKET, BucketPolicy, MiB
from torchshard.ddp.buckets.flat import FlatBucket, gradient_dtype
from torchshard.ddp.buckets.graphs import GraphBucket
from torchshard.ddp.telling import messages

if TYPE_CHECKING:
    from torchshard.ddp.reducing.reducer import Reducer

_SEGMENTS = BucketPolicy(cap=MiB // 4, first=MiB // 4)


class Lending:
    """What a reducer knows about the compiled graphs that fill its buckets.

    Attributes:
        shared: parameters with gradients from a graph and from elsewhere.
        late: gradients that came after a graph had filled their place, in the backward that runs.
        shadowed: some ranks may only play along, and have to be told what comes late.
        joins: sizes of buckets are chosen after graphs have been compiled, with small segments.
        segments: sizes of what graphs are compiled to fill at once.
        pieces: sizes by which graphs are cut, where hooks reduce between the pieces; None if they are yet to be chosen.
        sizes: both as text; a graph is compiled anew where they are different.
        adjust: what the compiler was told makes of sizes of buckets that are as the wrapper wants them.
    """

    def __init__(self, reducer: "Reducer") -> None:
        self._reducer: Reducer = weakref.proxy(reducer)  # which owns this
        self.shared: set[int] = set()
        self.late: dict[int, torch.Tensor] = {}
        self.shadowed = self.joins = False
        self.adjust: Callable[[BucketPolicy], BucketPolicy] = lambda policy: policy
        self.use_sizes(reducer.policy, reducer.policy)
        self._bucket_of: dict[tuple[int, ...], GraphBucket] = {}  # by segment
        self._known: set[tuple[int, ...]] = set()  # the layout knew of them, or they have been asked for since
        self._wish = False  # for another layout
        self._checks: list[torch.utils.hooks.RemovableHandle] = []
        self._hooks: dict[tuple[int, ...], tuple[Sequence[object], Sequence[Mapping[int, object]]]] = {}
        """By segment: leaves, and what holds their hooks."""

    @property
    def refused(self) -> bool:
        """Every gradient has to come through its hook: a graph still needs parameters when it gives their gradients."""
        return self._reducer.reduction.may_step

    def use_sizes(self, segments: BucketPolicy, pieces: BucketPolicy | None) -> None:
        """Have graphs compiled for these sizes."""
        self.segments = segments
        self.pieces = pieces if self._reducer.group.size() > 1 else ONE_BUCKET
        self.sizes = str(self.segments), str(self.pieces)

    def await_sizes(self) -> None:
        """The sizes of buckets are going to be chosen by what is seen."""
        self.joins = True
        self.use_sizes(_SEGMENTS, None)

    def prefer(self, adjust: Callable[[BucketPolicy], BucketPolicy]) -> None:
        """Have buckets that hooks fill laid out by what the compiler was told, too; see `adjust`."""
        self.adjust, reducer = adjust, self._reducer
        policy = adjust(reducer.policy)
        if policy != reducer.policy:
            reducer.policy = policy
            self._wish = self._wish or reducer.arrived is None

    def lend(self, slots: tuple[int, ...], dtype: torch.dtype) -> GraphBucket | None:
        """See Reducer.lend."""
        reducer = self._reducer
        bucket = self._bucket_of.get(slots)
        is_ready = bucket is not None and bucket.ready_for_graph(slots, dtype)
        if self.refused or bucket is None or not is_ready or self._are_hooked(slots):
            self._wish = self._wish or (reducer.arrived is None and slots not in self._known and not self.refused)
            self._known.add(slots)
            return None
        return bucket if reducer.leaves.will_all_run(bucket.segments[slots]) else None

    def learns(self, slots: tuple[int, ...]) -> bool:
        """Whether what a graph has made, for these parameters, tells how it could be reduced in the graph."""
        return not self.refused and self._reducer.leaves.will_all_run(slots)

    def _are_hooked(self, slots: tuple[int, ...]) -> bool:
        """Whether somebody has put a hook where one of these gradients ends, to see what autograd brings there."""
        leaves = self._reducer.leaves.of(slots)
        known, holders = self._hooks.get(slots, ((), ()))
        if len(known) < len(leaves) or not all(map(is_, known, leaves)):
            holders = [hooks for leaf in leaves for hooks in _torch.hooks_of(leaf)]
            self._hooks[slots] = leaves, holders
        return any(holders)

    def adopt(self, buckets: Iterable[FlatBucket]) -> None:
        """These are the reducer's buckets from now on."""
        self._bucket_of = {slots: b for b in buckets if isinstance(b, GraphBucket) for slots in b.segments}
        self._hooks.clear()

    def check(self, slots: tuple[int, ...], views: Sequence[torch.Tensor]) -> None:
        """In a backward whose order is learned: whether autograd brings just these tensors, which a graph has made.

        If it brings others, there are more sources of these gradients than the graph.
        """
        for i, view in zip(slots, views, strict=True):
            self._checks.append(self._reducer.leaves[i].register_prehook(self._comparing(i, view)))

    def _comparing(self, index: int, made: torch.Tensor) -> Callable[[tuple[torch.Tensor, ...]], None]:
        address = made.data_ptr()
        # Kept until then, so that nothing else comes to lie there; a tensor kept would be copied.
        kept = [made.untyped_storage()]

        @_torch.skip_alone
        def compare(brought: tuple[torch.Tensor, ...]) -> None:
            if not kept or brought[0].data_ptr() != address:
                self.shared.add(index)
            kept.clear()

        return compare

    def end_checks(self) -> None:
        """The backward is over."""
        for handle in self._checks:
            handle.remove()
        self._checks.clear()

    def know(self, slots: Iterable[tuple[int, ...]]) -> None:
        """A layout that takes these into account is about to be made."""
        self._known = set(slots)

    def again(self, bucket: FlatBucket, index: int) -> bool:
        """Autograd is done with a parameter whose place is taken. Whether that is as it should be."""
        if not isinstance(bucket, GraphBucket) or not bucket.is_filled(index):
            return False
        param = self._reducer.params[index]
        if param.grad is not None:  # something came beside what the graph gave
            came, param.grad = param.grad, None
            self.late[index] = self.late[index] + came if index in self.late else came
            self._wish = self._wish or index not in self.shared
            self.shared.add(index)
        return True

    def reduce_late(self) -> None:
        """Reduce contributions that came after their parameters' buckets had left, and add them to `.grad`."""
        if not (self.late or self.shadowed):
            return
        late = self._late_anywhere()
        if not late:
            return
        reducer, kinds = self._reducer, dict[tuple[torch.dtype, torch.device], list[int]]()
        names = ", ".join(reducer.names[i] for i in late)
        reducer.exchange.confirm("late: " + names)
        if not reducer.reduction.is_linear:
            raise RuntimeError(messages.late_text(names))
        for i, grad in late.items():
            kinds.setdefault((grad.dtype, grad.device), []).append(i)
        for number, members in enumerate(kinds.values(), len(reducer.buckets)):
            stand_ins = {i: late[i].detach() for i in members}
            for i, stand_in in stand_ins.items():
                stand_in.grad = late[i]
            bucket = FlatBucket(stand_ins, reducer.reduction.scale, views_stay=False)
            bucket.pending.clear()
            bucket.take_large()
            bucket.close()
            reducer.reduction.start(bucket, number, False)
            reducer.exchange.wait([bucket.work], "gradients that came late")
            reducer.reduction.accept(bucket)
            bucket.finish(members)
            for i, stand_in in stand_ins.items():
                assert stand_in.grad is not None, "just reduced"
                reducer.params[i].grad.add_(stand_in.grad)  # type: ignore[union-attr]
        reducer.exchange.issued += 1
        self.late.clear()

    def _late_anywhere(self) -> dict[int, torch.Tensor]:
        """What is late; here alone, unless some ranks have nothing of their own and give zeros."""
        numbers: Iterable[int] = self.late
        if self.shadowed and self._bucket_of:
            counts = self._reducer.exchange.totals([int(i in self.late) for i in range(len(self._reducer.params))])()
            numbers = (i for i, count in enumerate(counts) if count)
        late = {i: self.late.get(i) for i in sorted(numbers)}
        for i, grad in late.items():
            if grad is None:
                param = self._reducer.params[i]
                late[i] = torch.zeros_like(param, dtype=gradient_dtype(param))
        return cast(dict[int, torch.Tensor], late)

    def somebody_wishes(self) -> bool:
        """Whether the buckets do not fit the graphs of some rank; all ranks ask at the same point."""
        wishes = self._reducer.exchange.of_each_rank(int(self._wish))
        self._wish = False
        return any(wishes)
