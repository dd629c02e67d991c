"""Which gradients travel together: arithmetic on sizes, shared by hooks (ddp/) and graphs (compiler/).

Gradients are taken in the order in which they become ready. Those of one kind (data type, device, ...) fill a bucket
until it holds at least its cap; then the next one is begun. The buckets are numbered by the moment they are complete.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class BucketPolicy:
    """When a bucket is full. Sizes in bytes.

    Args:
        cap: a bucket is closed once it holds at least this much.
        first: the same for the first bucket of each kind; a small one starts the communication early.
        caps: sizes one by one; bucket k of a kind is closed at caps[k], later ones at the last. Overrides the others.

    A cap of zero gives every gradient its own bucket. Raises ValueError for a negative size.
    """

    cap: int = 25 * MiB
    first: int = 1 * MiB
    caps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for size in (self.cap, self.first, *self.caps):
            if size < 0:
                raise ValueError(f"a bucket cannot hold less than nothing: cap of {size / MiB:g} MiB; give 0 or more")

    @classmethod
    def from_mb(
        cls,
        cap: float | None = None,
        first: float | None = None,
        caps: Iterable[float] | None = None,
    ) -> "BucketPolicy":
        """The policy for sizes in MiB, with the defaults of DistributedDataParallel.

        Without any: 25 MiB, the first 1 MiB. With only `cap`: that, for the first one too.
        """
        default = cls()
        whole = default.cap if cap is None else int(cap * MiB)
        if first is not None:
            small = int(first * MiB)
        else:
            small = default.first if cap is None else whole
        return cls(whole, small, tuple(int(size * MiB) for size in caps or ()))

    def with_first(self, first: int) -> "BucketPolicy":
        """The same, but for the first bucket of each kind."""
        return BucketPolicy(self.cap, first, (first, *self.caps[1:]) if self.caps else ())

    def limit(self, number: int) -> int:
        """Bytes at which bucket `number` of a kind is closed."""
        if self.caps:
            return self.caps[min(number, len(self.caps) - 1)]
        return self.cap if number else self.first


ONE_BUCKET = BucketPolicy(cap=1 << 62, first=1 << 62)
"""For each kind; or a graph that is not cut."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient to be placed: its parameter's index and name, its size, and the kind it can share a bucket with."""

    index: int
    name: str
    nbytes: int
    kind: Hashable = ()


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Gradients that one collective reduces, in ready order."""

    gradients: tuple[Gradient, ...]

    @property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters, in ready order."""
        return tuple(g.name for g in self.gradients)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(g.nbytes for g in self.gradients)

    @property
    def kind(self) -> Hashable:
        """What all gradients of this bucket have in common."""
        return self.gradients[0].kind


def plan_buckets(ready: Iterable[Gradient], policy: BucketPolicy) -> tuple[PlannedBucket, ...]:
    """Group gradients, given in ready order, into buckets; a gradient that is named again counts once.

    Returns the buckets in the order in which they are complete.
    """
    when: dict[int, int] = {}
    filling: dict[Hashable, list[Gradient]] = {}
    held: dict[Hashable, int] = {}
    closed: dict[Hashable, int] = {}
    buckets: list[list[Gradient]] = []
    for gradient in ready:
        if gradient.index in when:
            continue
        when[gradient.index] = len(when)
        kind, number = gradient.kind, closed.get(gradient.kind, 0)
        filling.setdefault(kind, []).append(gradient)
        held[kind] = held.get(kind, 0) + gradient.nbytes
        if held[kind] >= policy.limit(number):
            buckets.append(filling.pop(kind))
            held[kind], closed[kind] = 0, number + 1
    buckets += filling.values()
    buckets.sort(key=lambda bucket: when[bucket[-1].index])
    return tuple(PlannedBucket(tuple(bucket)) for bucket in buckets)


def slices(numels: Iterable[int], align: int = 16) -> tuple[list[int], int]:
    """Where each of some tensors begins in a flat one, and the length of that; counted in elements.

    Each begins at a multiple of `align` (16: 64 bytes for float32), so that matrix products can write into it.
    """
    starts, end = [], 0
    for numel in numels:
        starts.append(end)
        end += -(-numel // align) * align
    return starts, end


def size_text(nbytes: int) -> str:
    """A size as people read it: 512 B, 1.5 KiB, 25.0 MiB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    return f"{nbytes / 1024:.1f} KiB" if nbytes < MiB else f"{nbytes / MiB:.1f} MiB"


def names_text(names: tuple[str, ...], most: int = 3) -> str:
    """Names in one cell: all of a few, else the first, the last and how many lie between."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def plan_table(plan: Iterable[PlannedBucket]) -> str:
    """The plan as text, a row a bucket."""
    from tabulate import tabulate

    rows = [(k, names_text(b.params), size_text(b.nbytes), _kind_text(b.kind)) for k, b in enumerate(plan)]
    return str(tabulate(rows, ["bucket", "parameters", "bytes", "kind"], disable_numparse=True))


def _kind_text(kind: Hashable) -> str:
    return " ".join(map(str, kind)) if isinstance(kind, tuple) else str(kind)
