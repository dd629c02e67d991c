"""A process group as this package sees it: a name that collectives take, a size, and who sits where."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one line (or block) of a mesh.

    Attributes:
        name: of the process group, as collectives take it.
        size: number of ranks.
        position: this rank's place along the line of the mesh.
        seats: place along the line -> rank within the process group; None where they are the same.
        members: global ranks of the process group, in its order; empty where they are not to be looked at.
        made: the process group, as long as somebody has it, where there are members.
    """

    name: str
    size: int
    position: int
    seats: tuple[int, ...] | None = None
    members: tuple[int, ...] = ()
    made: Callable[[], object] | None = field(default=None, compare=False, repr=False)
