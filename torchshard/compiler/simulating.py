"""A plan played on paper: any number of ranks, any network."""

from collections.abc import Iterable
from typing import Protocol

from torchshard.buckets import PlannedBucket
from torchshard.simulation import Link, Network, Simulation, StepTimes, simulate_step


class Plan(Protocol):
    """What has buckets: the plans of `explain` and of `split_backend`."""

    @property
    def buckets(self) -> tuple[PlannedBucket, ...]:
        """In the order in which they are launched."""
        ...


def simulate(
    plan: Plan | Iterable[PlannedBucket],
    *,
    world_size: int,
    bandwidth: float,
    latency: float = 0.0,
    algorithm: str = "ring",
    ranks_per_node: int = 1,
    inside: Link | None = None,
    times: StepTimes | None = None,
) -> Simulation:
    """A step with these buckets: a timeline that prints, plots, exports a Chrome trace, and says what is exposed.

    Args:
        plan: of `explain` or `split_backend`, or buckets such as `ddp.reducer.plan`.
        world_size: number of ranks.
        bandwidth: of each rank's link, in bytes a second each way.
        latency: of a message, in seconds.
        algorithm: "ring" or "tree", across nodes.
        ranks_per_node, inside: nodes of several ranks, and the link between these.
        times: of forward, backward and gradients, in seconds, given or from `measure`. None: gradients are all there
            at once, which shows the communication alone.

    Raises:
        ValueError: a plan without buckets, or numbers that make no sense.

    Example:
        >>> plan, times = explain(model, x), measure(model, x)                          # doctest: +SKIP
        >>> print(simulate(plan, world_size=1024, bandwidth=25e9, times=times))         # doctest: +SKIP
    """
    buckets: Iterable[PlannedBucket] = plan if isinstance(plan, Iterable) else plan.buckets
    return simulate_step(
        buckets, Network(world_size, Link(bandwidth, latency), algorithm, ranks_per_node, inside), times
    )
