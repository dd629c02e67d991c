"""The archives of torch.distributed.checkpoint, one for each box: of those that are alike one is gone through.

What is found in an archive follows from its length and from the bytes that were read of it. Of two archives of equal
length that have these bytes in common all is the same but for what is not looked at, the values, and what is only
passed on, their checksum. So the pickle and the directory of most archives of a model are compared with those of
another one, in place of being read.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torchshard.checkpoint.entries import Extent, Place, TensorEntry
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.pickles.torch_values import read_values
from torchshard.checkpoint.text import printable
from torchshard.checkpoint.zips import Archive, Stretch
from torchshard.errors import CheckpointError

_KINDS = 256  # archives that are remembered
_MOST = 2**14  # bytes that were read of one that is; of what torch writes it is one KiB
_SUM = 4  # bytes of a checksum


class Archives:
    """Finds the values in archives of one tensor each. Safe for several threads."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._known: dict[tuple[object, ...], _Known] = {}

    def place(self, key: str, size: tuple[int, ...], dtype: str, at: tuple[str, int, int]) -> Place:
        """Where the elements of a box are.

        Args:
            key: of its tensor, for errors.
            size: of the box.
            dtype: of its elements.
            at: file, offset and length of the archive, which must hold just this box.

        Raises:
            CheckpointError: damaged, or it holds something else.
        """
        stretch = Stretch(self.files, *at)
        kind = (stretch.length, size, dtype)
        known = self._known.get(kind)
        if known is not None and known.fits(stretch):
            return known.place(stretch)
        archive = _Watched(stretch, key)
        tensor = read_values(archive)
        if not isinstance(tensor, TensorEntry) or tensor.shape != size or tensor.dtype != dtype:
            held = f"{tensor.dtype} {tensor.shape}" if isinstance(tensor, TensorEntry) else printable(tensor)
            raise CheckpointError(
                "An archive holds something else than the metadata says.",
                expected=f"{dtype} {size}",
                got=held,
                where=archive,
            )
        place = tensor.pieces[0].place()
        if archive.read_bytes <= _MOST and (known is not None or len(self._known) < _KINDS):
            self._known[kind] = archive.known(place)
        return place


class _Known(NamedTuple):
    """What one archive and all that are like it have in common; offsets count from the start of the archive.

    Args:
        read: what must be the same, by offset.
        checksum: where that of the values is.
        extent: offset and bytes of the values.
        first: offset of the first element.
        stride: of the elements.
    """

    read: tuple[tuple[int, int, bytes], ...]
    checksum: int
    extent: tuple[int, int]
    first: int
    stride: tuple[int, ...]

    def fits(self, stretch: Stretch) -> bool:
        """Whether an archive of this length is one of these."""
        return all(stretch.bytes_at(offset, length) == data for offset, length, data in self.read)

    def place(self, stretch: Stretch) -> Place:
        """Where the elements are in an archive that fits."""
        offset, nbytes = self.extent
        crc32 = int.from_bytes(stretch.bytes_at(self.checksum, _SUM), "little")
        extent = Extent(stretch.files, stretch.file, stretch.start + offset, nbytes, crc32 or None)
        return Place(extent, stretch.start + self.first, self.stride)


class _Watched(Archive):
    """An archive that knows what was read of it, and the extents that it gave."""

    def __init__(self, stretch: Stretch, about: str) -> None:
        self._seen: list[tuple[int, bytes]] = []
        self._extents: dict[Extent, str] = {}
        self._read: set[str] = set()
        super().__init__(stretch, about)

    def _bytes(self, offset: int, length: int) -> bytes:
        data = super()._bytes(offset, length)
        self._seen.append((offset, data))
        return data

    def extent(self, name: str) -> Extent:
        extent = super().extent(name)
        self._extents[extent] = name
        return extent

    def read(self, name: str) -> bytes:
        self._read.add(name)
        return super().read(name)

    @property
    def read_bytes(self) -> int:
        """How much was read of it."""
        return sum([len(data) for _, data in self._seen])

    def known(self, place: Place) -> _Known:
        """What was found: the place of its only tensor."""
        extent, start = place.extent, self.stretch.start
        checksum = self.members[self._extents[extent]].checksums[1]
        read = tuple([part for offset, data in self._seen for part in self._without_sums(offset, data)])
        return _Known(read, checksum, (extent.offset - start, extent.nbytes), place.start - start, place.stride)

    def _without_sums(self, offset: int, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """A header or the directory, without the checksums of members that were not read; other bytes as they are."""
        others = [member for name, member in self.members.items() if name not in self._read]
        if offset == min([member.record for member in self.members.values()]):
            sums = [member.checksums[1] for member in others]  # in the order of the directory
        else:
            sums = [member.checksums[0] for member in others if member.header == offset]
        at = 0
        for place in sums:
            yield offset + at, place - offset - at, data[at : place - offset]
            at = place - offset + _SUM
        yield offset + at, len(data) - at, data[at:]
