"""Comparing what is read with the checksums that the source stores of it, as it is read.

A checksum is of a stretch of file, so what is compared are pieces that are read as a whole, in blocks of any order.
"""

from collections.abc import Collection, Sequence

from torchshard.checkpoint.entries import Piece, TensorEntry, is_all
from torchshard.checkpoint.moving.checksums import combine
from torchshard.checkpoint.moving.plan import Copy, run_within
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError
from torchshard.layout import Box


def whole_pieces(entry: TensorEntry, box: Box) -> frozenset[int]:
    """Numbers of the pieces that are read in their order and as a whole to fill a box, and have a stored checksum."""
    all_of_it = is_all(box, entry)
    within = [i for i, piece in enumerate(entry.pieces) if all_of_it or piece.box.meet(box) == piece.box]
    return frozenset([i for i in within if _is_summed(entry, entry.pieces[i])])


def _is_summed(entry: TensorEntry, piece: Piece) -> bool:
    """Whether the elements of a piece, in their order, are just the bytes of which there is a checksum."""
    place = piece.place()
    if place.extent.crc32 is None or place.start != place.extent.offset:
        return False
    return piece.box.numel * entry.itemsize_stored == place.extent.nbytes and piece.row_major


class Comparison:
    """Takes the checksums of blocks, and compares each piece that they make up.

    Args:
        entry: the tensor.
        pieces: numbers of those that are compared; see `whole_pieces`.
    """

    __slots__ = ("_sums", "entry", "pieces")

    def __init__(self, entry: TensorEntry, pieces: Collection[int]) -> None:
        self.entry, self.pieces = entry, pieces
        self._sums: dict[int, Sum] = {}

    @property
    def pending(self) -> bool:
        """Whether a piece is compared in part."""
        return bool(self._sums)

    def take(self, copies: Sequence[Copy], crcs: Sequence[int]) -> None:
        """The checksums of the copies of a block, which is a run of the box that is filled.

        Raises:
            CheckpointError: a piece is not what its checksum says.
        """
        for copy, crc in zip(copies, crcs, strict=True):
            if copy.source in self.pieces:
                self._add(copy, crc)

    def _add(self, copy: Copy, crc: int) -> None:
        piece, itemsize = self.entry.pieces[copy.source], self.entry.itemsize_stored
        at = run_within(piece.box, copy.box)
        assert at is not None  # blocks are runs of a box that holds the piece, and therefore of the piece
        total = self._sums.setdefault(copy.source, Sum(piece.box.numel * itemsize))
        if not total.add(at * itemsize, copy.box.numel * itemsize, crc):
            return
        del self._sums[copy.source]
        extent = piece.place().extent
        if total.crc != extent.crc32:
            raise CheckpointError(
                "The file is damaged: its data do not match its checksum.",
                expected=f"crc32 {extent.crc32:08x}",
                got=f"{total.crc:08x}",
                where=f"{extent}: {printable(self.entry.key)}",
            )


class Sum:
    """The crc32 of some bytes, put together from those of parts, which come in any order."""

    __slots__ = ("crc", "missing", "parts")

    def __init__(self, nbytes: int) -> None:
        self.crc, self.missing = 0, nbytes
        self.parts: list[tuple[int, int, int]] = []

    def add(self, offset: int, nbytes: int, crc: int) -> bool:
        """Take the checksum of a part; whether this was the last."""
        self.parts.append((offset, crc, nbytes))
        self.missing -= nbytes
        if self.missing:
            return False
        for _, part, length in sorted(self.parts):
            self.crc = combine(self.crc, part, length)
        self.parts = []
        return True
