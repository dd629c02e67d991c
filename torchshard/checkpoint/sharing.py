"""Tensors of a torch.save file may be views of one storage: which of them overlap, and the stretch that holds them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from torchshard.checkpoint.entries import Extent, Piece, Place, TensorEntry
from torchshard.layout import Box, whole

Key = TypeVar("Key")
_MANY = 32  # views over one another are looked at in pairs; more count as overlapping


class _Span(NamedTuple):
    """The bytes of a file from the first to after the last element of a tensor, and its sizes by their steps."""

    extent: Extent
    start: int
    end: int
    itemsize: int
    sizes: dict[int, int] | None  # None: two dims have one step


def _span(entry: TensorEntry) -> _Span:
    """Of a tensor in one piece."""
    place = entry.pieces[0].place()
    dims = [(step, n) for n, step in zip(entry.shape, place.stride, strict=True) if n > 1 and step]
    sizes = dict(dims) if len(dict(dims)) == len(dims) else None
    return _Span(place.extent, place.start, _end(entry, place), entry.itemsize_stored, sizes)


def _end(entry: TensorEntry, place: Place) -> int:
    """The byte after the last element of a tensor in one piece."""
    last = sum([(n - 1) * step for n, step in zip(entry.shape, place.stride, strict=True)])
    return place.start + (last + 1) * entry.itemsize_stored


def _apart(a: _Span, b: _Span) -> bool:
    """Whether two views have no common element, as columns of a matrix: blocks of one grid that do not meet."""
    if a.sizes is None or b.sizes is None:
        return False
    steps = sorted({1, *a.sizes, *b.sizes}, reverse=True)
    if any(larger % smaller for larger, smaller in pairwise(steps)):
        return False
    origin = min(a.start, b.start)
    blocks = [_block((span.start - origin) // span.itemsize, span.sizes or {}, steps) for span in (a, b)]
    return blocks[0] is not None and blocks[1] is not None and blocks[0].meet(blocks[1]) is None


def _block(first: int, sizes: Mapping[int, int], steps: Sequence[int]) -> Box | None:
    """The box of a view in the grid of these steps; None where it goes over an edge of the grid."""
    offset, size, limit = [], [], None
    for step in steps:
        at, first = divmod(first, step)
        n = sizes.get(step, 1)
        if limit is not None and at + n > limit // step:
            return None
        offset.append(at)
        size.append(n)
        limit = step
    return Box(tuple(offset), tuple(size))


@dataclass(slots=True, eq=False)
class _Group(Generic[Key]):
    """Views that overlap, and the end of the one that reaches farthest."""

    end: int = 0
    views: list[tuple[_Span, Key]] = field(default_factory=list)

    def add(self, views: Sequence[tuple[_Span, Key]]) -> None:
        """Take in these too."""
        self.views += views
        self.end = max([self.end, *[span.end for span, _ in views]])

    def meets(self, span: _Span) -> bool:
        """Whether a view has elements in common with one of these."""
        return not all(_apart(span, mine) for mine, _ in self.views)


def overlapping(entries: Mapping[Key, TensorEntry]) -> list[list[Key]]:
    """Keys of tensors of one type that have elements of a file in common, in groups; what overlaps none is in none."""
    files: dict[object, list[tuple[int, int, Key]]] = {}
    for key, entry in entries.items():
        if len(entry.pieces) == 1:
            place = entry.pieces[0].place()
            file = (id(place.extent.files), place.extent.file, entry.dtype, entry.stored_dtype)
            files.setdefault(file, []).append((place.start, _end(entry, place), key))
    runs = [[(_span(entries[key]), key) for key in run] for its in files.values() for run in _runs(its)]
    return [[key for _, key in group.views] for run in runs for group in _groups(run) if len(group.views) > 1]


def _runs(views: Sequence[tuple[int, int, Key]]) -> list[list[Key]]:
    """Those of which some may overlap, told by where they begin and end: each begins before another has ended."""
    runs: list[list[Key]] = []
    reached = 0
    for start, end, key in sorted(views, key=lambda view: view[0]):
        if start >= reached:
            runs.append([])
        runs[-1].append(key)
        reached = max(reached, end)
    return [run for run in runs if len(run) > 1]


def _groups(views: Sequence[tuple[_Span, Key]]) -> Iterator[_Group[Key]]:
    """All views in groups, those that end first first."""
    reaching: list[_Group[Key]] = []
    for span, key in sorted(views, key=lambda view: view[0].start):
        yield from [group for group in reaching if group.end <= span.start]
        reaching = [group for group in reaching if group.end > span.start]
        many = sum([len(group.views) for group in reaching]) > _MANY
        alone: _Group[Key] = _Group()
        first, *others = [group for group in reaching if many or group.meets(span)] or [alone]
        for other in others:
            first.add(other.views)
        first.add([(span, key)])
        reaching = [group for group in reaching if group is not first and group not in others] + [first]
    yield from reaching


def stretch(views: Sequence[TensorEntry]) -> tuple[TensorEntry, list[int]]:
    """All elements from the first to the last of tensors that overlap as one flat tensor, and where each begins."""
    spans = [_span(view) for view in views]
    first, itemsize = min([span.start for span in spans]), views[0].itemsize_stored
    shape = ((max([span.end for span in spans]) - first) // itemsize,)
    place = Place(spans[0].extent, first, (1,))
    key = ", ".join([view.key for view in views])
    flat = TensorEntry(views[0].dtype, shape, (Piece(whole(shape), place),), key, views[0].stored)
    return flat, [(span.start - first) // itemsize for span in spans]
