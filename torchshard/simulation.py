"""A training step on paper: when the buckets of a plan leave, how long they travel, what of it backward does not hide.

    network = Network(1024, Link(bandwidth=25e9, latency=10e-6))
    print(simulate_step(plan, network, StepTimes(forward=0.02, backward=0.04)))

All ranks do the same, so one of them is drawn. Collectives run one after another in the order of the plan, each once
its gradients are there on every rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real
from typing import Any

from torchshard.buckets import BucketPolicy, Gradient, PlannedBucket, plan_buckets, size_text
from torchshard.timeline import Span, Timeline

ALGORITHMS = ("ring", "tree")
_LANES = 12  # beyond, all buckets share one


@dataclass(frozen=True, slots=True)
class _Amount:
    """A number that makes sense: its words, what Python calls it, and which ones do."""

    words: str
    kind: type
    fits: Callable[[float], bool]

    def check(self, **fields: Any) -> None:
        """Raises ValueError for the first of these fields that is none."""
        for name, number in fields.items():
            is_number = isinstance(number, self.kind) and not isinstance(number, bool)
            if not (is_number and self.fits(number)):
                raise ValueError(f"{name}={number!r}: expected {self.words}")


_SECONDS = _Amount("a finite number of seconds, 0 or more", Real, lambda x: 0 <= x < inf)
_SPEED = _Amount("more than 0 bytes a second", Real, lambda x: x > 0)
_FACTOR = _Amount("a finite factor, 1 or more", Real, lambda x: 1 <= x < inf)
_RANKS = _Amount("a whole number of ranks, 1 or more", Integral, lambda x: x >= 1)


@dataclass(frozen=True, slots=True)
class Link:
    """What connects a rank with the next.

    Attributes:
        bandwidth: bytes a second that one rank sends while it receives as many.
        latency: seconds until a message of no length has arrived.

    Raises ValueError for a bandwidth that is not above zero, and a latency that is below it or not finite.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        _SPEED.check(bandwidth=self.bandwidth)
        _SECONDS.check(latency=self.latency)


@dataclass(frozen=True, slots=True)
class Network:
    """Ranks and the links between them.

    With more than one rank a node, a sum is made in three steps: a ring inside of each node leaves every rank with its
    share of the node's sum, the ranks with the same share sum them up across nodes, and a ring inside hands them round.

    Attributes:
        world_size: number of ranks.
        link: between nodes.
        algorithm: across nodes. "ring": 2 (n - 1) messages one after another, each an n-th of the data. "tree": up a
            binary tree and down again in many small parts, so that the depth costs latency only.
        ranks_per_node: of which each has a `link` of its own.
        inside: between ranks of a node.

    Raises ValueError for numbers of ranks below 1, and what does not fit together.
    """

    world_size: int
    link: Link
    algorithm: str = "ring"
    ranks_per_node: int = 1
    inside: Link | None = None

    def __post_init__(self) -> None:
        _RANKS.check(world_size=self.world_size, ranks_per_node=self.ranks_per_node)
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm={self.algorithm!r} is not known; give one of {', '.join(ALGORITHMS)}")
        if self.world_size % self.ranks_per_node:
            raise ValueError(f"{self.world_size} ranks are no whole number of nodes of {self.ranks_per_node}")
        if self.ranks_per_node > 1 and self.inside is None:
            raise ValueError(f"{self.ranks_per_node} ranks a node need a link inside of the node")

    def all_reduce(self, nbytes: float) -> float:
        """Seconds from the moment when all ranks have begun until the last one holds the sum."""
        local, nodes = self.ranks_per_node, self.world_size // self.ranks_per_node
        across = self._across(nbytes / local, nodes)
        return across if self.inside is None else across + _rounds(2 * (local - 1), nbytes / local, self.inside)

    def _across(self, nbytes: float, nodes: int) -> float:
        if nodes == 1:
            return 0.0
        if self.algorithm == "ring":
            return _rounds(2 * (nodes - 1), nbytes / nodes, self.link)
        depth = (nodes - 1).bit_length()
        return 2 * depth * self.link.latency + 2 * nbytes / self.link.bandwidth

    def __str__(self) -> str:
        text = f"{self.world_size:,} ranks"
        if self.ranks_per_node > 1:
            text += f" in nodes of {self.ranks_per_node}"
        return f"{text}, {self.algorithm} over {self.link.bandwidth / 1e9:g} GB/s"


def _rounds(count: int, nbytes: float, link: Link) -> float:
    return count * (link.latency + nbytes / link.bandwidth)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What summing over the ranks of a live group costs.

    Attributes:
        latency: seconds for each collective.
        bandwidth: bytes a second beyond.
        work: seconds for each byte that the processor is at work, and backward lasts longer, if it needs all cores.
        packed: whether numbers are packed on their way (comm/packing.py).

    Raises ValueError as Link does.
    """

    latency: float
    bandwidth: float
    work: float = 0.0
    packed: bool = False

    def __post_init__(self) -> None:
        _SECONDS.check(latency=self.latency, work=self.work)
        _SPEED.check(bandwidth=self.bandwidth)

    def all_reduce(self, nbytes: float) -> float:
        """As of Network."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step costs without communication, in seconds.

    Attributes:
        forward, backward: each from its beginning to its end.
        ready: name of a parameter -> when its gradient is there, from the beginning of backward. Parameters that are
            not named are taken to come evenly, by their bytes.
        slowest: how many times longer the slowest rank takes for everything; the others wait for it.

    Raises ValueError for times that are below zero or not finite, and a slowest rank that is faster than others.
    """

    forward: float = 0.0
    backward: float = 0.0
    ready: Mapping[str, float] = field(default_factory=dict)
    slowest: float = 1.0

    def __post_init__(self) -> None:
        came = {f"ready[{name!r}]": moment for name, moment in self.ready.items()}
        _SECONDS.check(forward=self.forward, backward=self.backward, **came)
        _FACTOR.check(slowest=self.slowest)

    def bucket_times(self, plan: Sequence[PlannedBucket]) -> list[float]:
        """When each bucket is complete on every rank, from the beginning of the step."""
        total, seen, times = sum(bucket.nbytes for bucket in plan) or 1, 0, []
        for bucket in plan:
            last = 0.0
            for gradient in bucket.gradients:
                seen += gradient.nbytes
                last = max(last, self.ready.get(gradient.name, self.backward * seen / total))
            times.append((self.forward + last) * self.slowest)
        return times


class Simulation(Timeline):
    """A simulated step; prints, plots and exports as any timeline.

    Attributes:
        network: over which it runs.
        compute: seconds of forward and backward on the slowest rank.
        communication: seconds of all collectives together.
        nbytes: of all gradients.
    """

    def __init__(self, spans: Iterable[Span], network: Network, compute: float, nbytes: int) -> None:
        super().__init__(spans)
        self.network, self.compute, self.nbytes = network, compute, nbytes
        self.communication = sum(s.end - s.start for s in self.spans if s.kind == "communication")

    def __str__(self) -> str:
        step, exposed, all_of_it = (f"{t * 1e3:.2f} ms" for t in (self.seconds, self.exposed(), self.communication))
        return (
            f"{self.text()}\n{self.network}: a step of {step}, of which {exposed} are communication that nothing hides "
            f"({all_of_it} for {size_text(self.nbytes)} of gradients)"
        )


def simulate_step(plan: Iterable[PlannedBucket], network: Network, times: StepTimes | None = None) -> Simulation:
    """Play one step: forward, backward, and the buckets of a plan, each as soon as it can leave.

    Args:
        plan: the buckets, in the order in which they are launched.
        network: ranks and links.
        times: what is computed, and when gradients come. None: nothing; all gradients are there at once.

    Raises:
        ValueError: no buckets, or a step that never ends.
    """
    buckets, times = list(plan), times or StepTimes()
    if not buckets:
        raise ValueError("there is no bucket to send: the plan is empty")
    spans = _computing(times)
    for number, (bucket, (begin, end)) in enumerate(zip(buckets, _under_way(buckets, times, network), strict=True)):
        lane = f"bucket {number}" if len(buckets) <= _LANES else "buckets"
        spans.append(Span(lane, f"bucket {number}: {size_text(bucket.nbytes)}", begin, end, "communication"))
    compute = (times.forward + times.backward) * times.slowest
    return Simulation(spans, network, compute, sum(bucket.nbytes for bucket in buckets))


def finish_time(plan: Iterable[PlannedBucket], times: StepTimes, link: LinkSpeed) -> float:
    """When all gradients are reduced, counted from the beginning of a backward with these times and no forward.

    A bucket leaves when it is full and the one before it has arrived.
    """
    plan = list(plan)
    backward = times.backward + link.work * sum(bucket.nbytes for bucket in plan)
    return max([backward, *[end for _, end in _under_way(plan, times, link)]])


def best_policy(ready: Iterable[Gradient], times: StepTimes, link: LinkSpeed, each: float = 0.0) -> BucketPolicy:
    """The sizes of buckets with which a backward is over soonest; of equally good ones the largest.

    All are alike, but for a smaller first one where that has the link busy earlier.

    Args:
        ready: gradients in the order in which they become ready.
        times: of the backward without communication, and of what is ready when.
        link: between the ranks.
        each: seconds that the step takes longer for each bucket, besides its communication.

    Raises:
        ValueError: `each` is below zero or not finite.
    """
    _SECONDS.check(each=each)
    gradients = list(ready)
    total = max(1, sum(g.nbytes for g in gradients))
    best, soonest = BucketPolicy(total, total), float("inf")
    for cap in _fractions(total, 2):
        for first in _fractions(cap, 4):
            policy = BucketPolicy(cap, first)
            plan = plan_buckets(gradients, policy)
            end = finish_time(plan, times, link) + each * len(plan)
            if end < 0.99 * soonest:
                best, soonest = policy, end
    return best


def best_link(ready: Iterable[Gradient], times: StepTimes, links: Sequence[LinkSpeed], each: float = 0.0) -> int:
    """The number of the way to use a link by which a backward is over soonest; the first one if it hardly matters.

    Args:
        ready, times, each: as of best_policy, whose sizes each of them is used with.
        links: one or more.
    """
    gradients = list(ready)
    plans = [plan_buckets(gradients, best_policy(gradients, times, link, each)) for link in links]
    ends = [finish_time(plan, times, link) + each * len(plan) for plan, link in zip(plans, links, strict=True)]
    best = min(range(len(links)), key=ends.__getitem__)
    return best if ends[best] < 0.97 * ends[0] else 0


def _fractions(size: int, step: int) -> Iterator[int]:
    """A size and its parts, each a `step`-th of the one before, down to 16 KiB."""
    while size >= 1 << 14:
        yield size
        size //= step


def _under_way(
    plan: Sequence[PlannedBucket], times: StepTimes, network: Network | LinkSpeed
) -> list[tuple[float, float]]:
    """When each bucket leaves, full and after the one before it has arrived, and when it arrives."""
    found, free = [], 0.0
    for bucket, ready in zip(plan, times.bucket_times(plan), strict=True):
        begin = max(ready, free)
        free = begin + network.all_reduce(bucket.nbytes)
        found.append((begin, free))
    return found


def _computing(times: StepTimes) -> list[Span]:
    middle, end = times.forward * times.slowest, (times.forward + times.backward) * times.slowest
    spans = [Span("forward", "forward", 0.0, middle), Span("backward", "backward", middle, end)]
    return [s for s in spans if s.end > s.start]
