"""Which bucket each gradient goes to, from what was seen in one backward: arithmetic, and its form on the wire."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torchshard.buckets import BucketPolicy, Gradient, PlannedBucket, plan_buckets

Event = int | tuple[int, ...]
"""A parameter's gradient arrived through its hook; or a graph had the gradients of these parameters in one bucket."""

_HOOKS, _GRAPH, _HOLE = -1, -2, -3


@dataclass(frozen=True, slots=True)
class LaidBucket:
    """One bucket of a layout.

    Attributes:
        members: the parameters whose gradients it reduces.
        slots: if a graph fills it, the parameters in the graph's order; some may belong to other buckets, and their
            places are holes. Else empty.
    """

    members: tuple[int, ...]
    slots: tuple[int, ...] = ()


def lay_out(
    events: Sequence[Event], gradients: Sequence[Gradient], shared: Collection[int], policy: BucketPolicy
) -> tuple[LaidBucket, ...]:
    """Buckets in the order in which they were complete.

    Args:
        events: what happened, in order.
        gradients: of all parameters, by number.
        shared: parameters that have other sources of gradient than one graph: left to hooks.
        policy: for the gradients that come through hooks.
    """
    graphs = {event: at for at, event in enumerate(events) if isinstance(event, tuple)}
    owned = {i for i in range(len(gradients)) if i not in shared and sum(i in slots for slots in graphs) == 1}
    found = [
        (at, LaidBucket(tuple(i for i in slots if i in owned), slots))
        for slots, at in graphs.items()
        if not owned.isdisjoint(slots)
    ]
    when = {event: at for at, event in enumerate(events) if isinstance(event, int)}
    by_graph = {i for _, bucket in found for i in bucket.members}
    missing = [i for i in reversed(range(len(gradients))) if i not in when and i not in by_graph]
    ready = [i for i in when if i not in by_graph] + missing
    for planned in plan_buckets((gradients[i] for i in ready), policy):
        members = tuple(g.index for g in planned.gradients)
        found.append((max(when.get(i, len(events)) for i in members), LaidBucket(members)))
    found.sort(key=lambda entry: entry[0])
    return tuple(bucket for _, bucket in found)


def planned(layout: Iterable[LaidBucket], gradients: Sequence[Gradient]) -> tuple[PlannedBucket, ...]:
    """The layout in the planner's words."""
    return tuple(PlannedBucket(tuple(gradients[i] for i in bucket.members)) for bucket in layout)


def encode(layout: Iterable[LaidBucket]) -> list[int]:
    """The layout as integers, to be broadcast."""
    numbers: list[int] = []
    for bucket in layout:
        numbers.append(_GRAPH if bucket.slots else _HOOKS)
        numbers += [i if i in bucket.members else _HOLE - i for i in bucket.slots or bucket.members]
    return numbers


def decode(numbers: Iterable[int]) -> tuple[LaidBucket, ...]:
    """The layout that `encode` was given."""
    kinds: list[int] = []
    entries: list[list[int]] = []
    for number in numbers:
        if number in (_HOOKS, _GRAPH):
            kinds.append(number)
            entries.append([])
        else:
            entries[-1].append(number)
    layout = []
    for kind, found in zip(kinds, entries, strict=True):
        members = tuple(i for i in found if i >= 0)
        slots = tuple(i if i >= 0 else _HOLE - i for i in found) if kind == _GRAPH else ()
        layout.append(LaidBucket(members, slots))
    return tuple(layout)


def is_milestone(backwards: int) -> bool:
    """Whether ranks ask each other, after this many backwards, if one of them wants to lay out anew.

    Rare enough to cost nothing, and the same on all ranks without asking.
    """
    return backwards & (backwards - 1) == 0 or backwards % 64 == 0
