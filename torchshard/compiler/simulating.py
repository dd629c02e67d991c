"""A plan played on paper: any number of ranks, any network."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from torchshard.buckets import PlannedBucket, names_text
from torchshard.keys import wrappers
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
            at once, which shows the communication alone. Names may differ from the plan's by `module.` and
            `_orig_mod.`. Gradients without a time are taken to come evenly; a warning says so if there are times left
            that belong to none.

    Raises:
        ValueError: a plan without buckets, times of none of its gradients, or numbers that make no sense.
        TypeError: what is given is no plan.

    Example:
        >>> plan, times = explain(model, x), measure(model, x)                          # doctest: +SKIP
        >>> print(simulate(plan, world_size=1024, bandwidth=25e9, times=times))         # doctest: +SKIP
    """
    if isinstance(plan, torch.nn.Module):
        raise TypeError(f"simulate: expected a plan, as explain(model, *args) gives one, got {type(plan).__name__}")
    buckets: list[PlannedBucket] = list(plan if isinstance(plan, Iterable) else plan.buckets)
    network = Network(world_size, Link(bandwidth, latency), algorithm, ranks_per_node, inside)
    return simulate_step(buckets, network, times and _matched(times, buckets))


def _matched(times: StepTimes, buckets: Sequence[PlannedBucket]) -> StepTimes:
    """The same times by the names of the plan."""
    planned = dict.fromkeys(name for bucket in buckets for name in bucket.params)
    known = wrappers.renamed(times.ready, planned)
    ready = {known[name]: at for name, at in times.ready.items()}
    without = tuple(name for name in planned if name not in ready)
    others = tuple(name for name in times.ready if known[name] not in planned)
    if others and len(without) == len(planned) > 0:
        raise ValueError(
            f"simulate: times are given of {names_text(others)}, the plan has {names_text(without)}; measure the model "
            "that was planned, or name no gradient to have them come evenly"
        )
    if others and without:
        warnings.warn(
            f"simulate: no time is given of {names_text(without)}, which are taken to come evenly, and the plan has no "
            f"{names_text(others)}; measure the model that was planned",
            UserWarning,
            stacklevel=3,
        )
    return replace(times, ready=ready)
