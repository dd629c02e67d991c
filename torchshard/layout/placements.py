"""What one axis of a mesh does to a tensor: `R`, `Shard(dim)`, `Shard(dim, runs, unit)` or `Partial(op)`; and as text.

Each distinct placement is one object, so placements are compared with `is` and hashed by address. The names are
torch's; torch's own placement objects are turned into these at the border, in tensor/.
"""

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, final

from torchshard.errors import ShardingError
from torchshard.layout.reductions import REDUCTIONS, parse_norm


class Placement:
    """Base of the three kinds; compared by identity."""

    __slots__ = ()


@final
class Replicate(Placement):
    """Every coordinate of the axis holds the same values."""

    __slots__ = ()
    _one: ClassVar["Replicate | None"] = None

    def __new__(cls) -> "Replicate":
        """The one Replicate."""
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one

    def __reduce__(self) -> tuple[type["Replicate"], tuple[()]]:
        return Replicate, ()

    def __repr__(self) -> str:
        return "R"


class Cut(NamedTuple):
    """What of a dim is split: the middle one of (runs, n, unit), which it is seen as."""

    runs: int = 1
    unit: int = 1

    @property
    def apart(self) -> int:
        """Items of the dim for one of what is split: a dim has a multiple of so many."""
        return self.runs * self.unit

    def within(self, other: "Cut") -> "Cut":
        """The middle of the middle of another one."""
        return Cut(other.runs * self.runs, self.unit * other.unit)

    def __str__(self) -> str:
        words = [f"in {self.runs} runs"] * (self.runs > 1) + [f"in units of {self.unit}"] * (self.unit > 1)
        return ", ".join(words)


WHOLE = Cut()  # the dim as it is


@final
class Shard(Placement):
    """The axis splits dim `dim` into pieces, one a coordinate. `dim` is not negative.

    With `runs` above 1 the dim is cut into so many runs of equal length first, and a coordinate holds its piece of
    each, joined: what becomes of a split dim when slower ones are flattened into it. With `unit` above 1 so many
    neighbours stay together: what becomes of it when faster ones are, and pieces are of unequal length.
    """

    __slots__ = ("dim", "runs", "unit")
    dim: int
    runs: int
    unit: int
    _all: ClassVar[dict[tuple[int, int, int], "Shard"]] = {}

    def __new__(cls, dim: int, runs: int = 1, unit: int = 1) -> "Shard":
        """The one Shard of this dim in so many runs of units of this length."""
        one = cls._all.get((dim, runs, unit))
        if one is None:
            if dim < 0 or runs < 1 or unit < 1:
                raise ShardingError(
                    "Shard takes the number of a dim, the number of runs and the length of a unit.",
                    expected="a dim of 0 or more, at least one run, and units of at least one item",
                    got=f"dim {dim}, {runs} runs, units of {unit}",
                    fix="count from the front: dim + tensor.ndim",
                )
            one = super().__new__(cls)
            one.dim, one.runs, one.unit = int(dim), int(runs), int(unit)
            one = cls._all.setdefault((one.dim, one.runs, one.unit), one)
        return one

    def at(self, dim: int) -> "Shard":
        """The same split of another dim."""
        return Shard(dim, self.runs, self.unit)

    def __reduce__(self) -> tuple[type["Shard"], tuple[int, int, int]]:
        return Shard, (self.dim, self.runs, self.unit)

    def __repr__(self) -> str:
        runs, unit = f"/{self.runs}" if self.runs > 1 else "", f"*{self.unit}" if self.unit > 1 else ""
        return f"S({self.dim}{runs}{unit})"


@final
class Partial(Placement):
    """Every coordinate holds a term; the value is their reduction by `op` (a name of reductions.py)."""

    __slots__ = ("op",)
    op: str
    _all: ClassVar[dict[str, "Partial"]] = {}

    def __new__(cls, op: str = "sum") -> "Partial":
        """The one Partial of this reduction."""
        one = cls._all.get(op)
        if one is None:
            if op not in REDUCTIONS and parse_norm(op) is None:
                raise ShardingError(
                    "Partial takes the name of a reduction.",
                    expected=f"one of {', '.join(REDUCTIONS)} or norm(p)",
                    got=repr(op),
                    fix="Partial('sum')",
                )
            one = super().__new__(cls)
            one.op = op
            one = cls._all.setdefault(op, one)
        return one

    def __reduce__(self) -> tuple[type["Partial"], tuple[str]]:
        return Partial, (self.op,)

    def __repr__(self) -> str:
        return f"P({self.op})"


R = Replicate()

Placements = tuple[Placement, ...]

_TOKEN = re.compile(r"\s*(?:(R)|S\((\d+)(?:/(\d+))?(?:\*(\d+))?\)|P\(([a-z]+(?:\([^()]*\))?)\)|P)\s*")


def parse_placements(text: str) -> Placements:
    """Placements written as `S(0),R,P(sum)`, one an axis; `P` alone is `P(sum)`, `S(0/4)` is dim 0 in 4 runs,
    `S(0*9)` dim 0 in units of 9.

    Raises:
        ShardingError: names the column of what cannot be read.
    """
    found: list[Placement] = []
    at = 0
    while True:
        match = _TOKEN.match(text, at)
        if match is None:
            raise ShardingError(
                f"The placements {text!r} cannot be read at column {at + 1}.",
                expected="R, S(dim) or P(op), one an axis of the mesh, with commas between",
                got=repr(text[at:]),
                fix="S(0),R",
            )
        replicate, dim, runs, unit, op = match.groups()
        shard = None if dim is None else Shard(int(dim), int(runs or 1), int(unit or 1))
        found.append(R if replicate else shard or Partial(op or "sum"))
        at = match.end()
        if at == len(text):
            return tuple(found)
        if text[at] != ",":
            raise ShardingError(
                f"The placements {text!r} cannot be read at column {at + 1}.", expected="a comma", got=repr(text[at:])
            )
        at += 1


def format_placements(placements: Iterable[Placement]) -> str:
    """The text that parse_placements reads back."""
    return ",".join(map(repr, placements))


def without_partial(placements: Sequence[Placement]) -> Placements:
    """The placements with every Partial replaced by Replicate: what a gradient of such a tensor has."""
    return tuple([R if type(p) is Partial else p for p in placements])
