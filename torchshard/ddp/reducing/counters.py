"""How gradients were reduced, counted: for tests and the curious."""

from collections.abc import Iterable, Sized
from dataclasses import dataclass

from torchshard.ddp.buckets.flat import FlatBucket


@dataclass(slots=True)
class Counters:
    """What has happened so far, in gradients of parameters.

    Attributes:
        backwards: backwards that were reduced.
        by_hook: gradients reduced after a hook reported them.
        in_graph: gradients reduced by a compiled graph while it ran.
        late: gradients that came through a hook after a graph had reduced others of the same parameter.
    """

    backwards: int = 0
    by_hook: int = 0
    in_graph: int = 0
    late: int = 0

    def count(self, buckets: Iterable[FlatBucket], late: Sized) -> None:
        """Add a backward that has just been reduced."""
        self.backwards += 1
        self.late += len(late)
        for bucket in buckets:
            self.in_graph += bucket.graph_filled
            self.by_hook += len(bucket.members) - len(bucket.absent) - bucket.graph_filled
