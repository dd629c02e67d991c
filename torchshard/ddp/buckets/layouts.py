"""Which bucket each gradient goes to, from what was seen in one backward: arithmetic, and its form on the wire."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from torchshard.buckets import BucketPolicy, Gradient, PlannedBucket, plan_buckets
from torchshard.simulation import StepTimes

Event = int | tuple[int, ...]
"""A parameter's gradient arrived through its hook; or a graph had the gradients of these parameters in one segment."""

_EACH = BucketPolicy(cap=0, first=0)

_HOOKS, _GRAPH, _NEXT, _HOLE = -1, -2, -3, -4


class Events(list[Event]):
    """What happens in one backward, in order.

    Attributes:
        begin, end: of the backward, in seconds of time.perf_counter.
        moments: when each event happened last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin = self.end = 0.0
        self.moments: dict[Event, float] = {}

    def append(self, event: Event) -> None:
        """It happens now."""
        super().append(event)
        self.moments[event] = time.perf_counter()

    def as_gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """What has come, in order: gradients of parameters, and of whole segments, which count as one."""
        parts = [(event,) if isinstance(event, int) else event for event in self]
        return segment_gradients(parts, gradients)

    def times(self, came: Iterable[Gradient]) -> StepTimes:
        """When that was, counted from the beginning of the backward."""
        moments = (self.moments[event] - self.begin for event in self)
        ready = {gradient.name: moment for gradient, moment in zip(came, moments, strict=True)}
        return StepTimes(backward=self.end - self.begin, ready=ready)

    def of_graphs(self) -> list[tuple[int, ...]]:
        """What compiled graphs have made."""
        return [event for event in self if isinstance(event, tuple)]

    def that_tell(self, ranks: int) -> Sequence[Event]:
        """Those by which this many ranks lay out their buckets.

        One alone does not go by the order of gradients, but by that of parameters: where its hook speaks to other
        processes, as in fault-tolerant training, these have seen other backwards, and some may have begun later.
        """
        return self if ranks > 1 else self.of_graphs()


@dataclass(frozen=True, slots=True)
class LaidBucket:
    """One bucket of a layout.

    Attributes:
        members: the parameters whose gradients it reduces.
        segments: if graphs fill it, what they fill at once, one after another: the parameters in the graph's order;
            some may belong to other buckets, and their places are holes. Else empty.
    """

    members: tuple[int, ...]
    segments: tuple[tuple[int, ...], ...] = ()


def lay_out(
    events: Sequence[Event],
    gradients: Sequence[Gradient],
    shared: Collection[int],
    policy: BucketPolicy,
    joins: bool = False,
) -> tuple[LaidBucket, ...]:
    """Buckets in the order in which they were complete.

    Args:
        events: what happened, in order.
        gradients: of all parameters, by number.
        shared: parameters that have other sources of gradient than one graph: left to hooks.
        policy: for the gradients that come through hooks.
        joins: whether it also holds for what graphs make, which are then compiled with small segments; else each
            segment is a bucket.
    """
    graphs = {event: at for at, event in enumerate(events) if isinstance(event, tuple)}
    held = Counter(chain.from_iterable({*slots} for slots in graphs))
    owned = {i for i, count in held.items() if count == 1 and i not in shared}
    segments = [slots for slots in graphs if not owned.isdisjoint(slots)]
    found = []
    for joined in plan_buckets(segment_gradients(segments, gradients), policy if joins else _EACH):
        parts = tuple(segments[g.index] for g in joined.gradients)
        members = tuple(i for slots in parts for i in slots if i in owned)
        found.append((graphs[parts[-1]], LaidBucket(members, parts)))
    when = {event: at for at, event in enumerate(events) if isinstance(event, int)}
    by_graph = {i for _, bucket in found for i in bucket.members}
    missing = [i for i in reversed(range(len(gradients))) if i not in when and i not in by_graph]
    ready = [i for i in when if i not in by_graph] + missing
    for planned in plan_buckets((gradients[i] for i in ready), policy):
        members = tuple(g.index for g in planned.gradients)
        found.append((max(when.get(i, len(events)) for i in members), LaidBucket(members)))
    found.sort(key=lambda entry: entry[0])
    return tuple(bucket for _, bucket in found)


def segment_gradients(segments: Sequence[tuple[int, ...]], gradients: Sequence[Gradient]) -> list[Gradient]:
    """Each segment of a graph as one gradient, for the planner."""
    return [
        Gradient(k, str(slots), sum(gradients[i].nbytes for i in slots), gradients[slots[0]].kind)
        for k, slots in enumerate(segments)
    ]


def planned(layout: Iterable[LaidBucket], gradients: Sequence[Gradient]) -> tuple[PlannedBucket, ...]:
    """The layout in the planner's words."""
    return tuple(PlannedBucket(tuple(gradients[i] for i in bucket.members)) for bucket in layout)


def encode(layout: Iterable[LaidBucket]) -> list[int]:
    """The layout as integers, to be broadcast."""
    numbers: list[int] = []
    for bucket in layout:
        numbers.append(_GRAPH if bucket.segments else _HOOKS)
        for number, slots in enumerate(bucket.segments or (bucket.members,)):
            numbers += [_NEXT] if number else []
            numbers += [i if i in bucket.members else _HOLE - i for i in slots]
    return numbers


def decode(numbers: Iterable[int]) -> tuple[LaidBucket, ...]:
    """The layout that `encode` was given."""
    kinds: list[int] = []
    entries: list[list[list[int]]] = []
    for number in numbers:
        if number in (_HOOKS, _GRAPH):
            kinds.append(number)
            entries.append([[]])
        elif number == _NEXT:
            entries[-1].append([])
        else:
            entries[-1][-1].append(number)
    layout = []
    for kind, found in zip(kinds, entries, strict=True):
        members = tuple(i for part in found for i in part if i >= 0)
        parts = (tuple(i if i >= 0 else _HOLE - i for i in part) for part in found)
        layout.append(LaidBucket(members, tuple(parts) if kind == _GRAPH else ()))
    return tuple(layout)


def is_milestone(backwards: int) -> bool:
    """Whether ranks ask each other, after this many backwards, if one of them wants to lay out anew.

    Rare enough to cost nothing, and the same on all ranks without asking.
    """
    return backwards & (backwards - 1) == 0 or backwards % 64 == 0
