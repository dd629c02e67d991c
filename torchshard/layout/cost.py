"""What communication costs: the alpha-beta model, launch + latency x rounds + bytes / bandwidth.

The constants must be the same on every rank, because ranks choose collectives by them.
"""

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
