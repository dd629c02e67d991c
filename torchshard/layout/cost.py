"""What communication costs: the alpha-beta model, launch + latency x rounds + bytes / bandwidth.

The constants must be the same on every rank, because ranks choose collectives by them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """What connects the ranks along one axis.

    Attributes:
        launch: seconds to start one collective.
        latency: seconds for one round of messages (a ring of p ranks has p - 1 of them).
        bandwidth: bytes a second that one rank receives.
    """

    launch: float = 2e-5
    latency: float = 2e-6
    bandwidth: float = 1e10

    def seconds(self, launches: int, rounds: int, nbytes: int) -> float:
        """Time of a collective."""
        return self.launch * launches + self.latency * rounds + nbytes / self.bandwidth


DEFAULT_LINK = Link()


def slowest(links: Sequence[Link]) -> Link:
    """A link that is no better than any of these: what a collective over several axes gets."""
    if len(links) == 1:
        return links[0]
    return Link(max(k.launch for k in links), max(k.latency for k in links), min(k.bandwidth for k in links))


def gathered_up_to(ranks: int, count: int = 2, link: Link = DEFAULT_LINK) -> float:
    """Bytes of a tensor up to which `count` such are sooner gathered together than two all-reduced one after the other.

    The gather has one launch of p - 1 rounds, and a rank receives count (p - 1) tensors; the reductions have two
    launches of 2 (p - 1) rounds each, and a rank receives 4 (p - 1) / p tensors. Infinite where that is no less.
    """
    more = (ranks - 1) * (count - 4 / ranks)
    return link.bandwidth * link.seconds(1, 3 * (ranks - 1), 0) / more if more > 0 else math.inf
