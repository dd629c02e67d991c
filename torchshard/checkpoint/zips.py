"""The zip archives that torch.save makes: read as an index of stored records, written as a frame around them.

torch stores records without compression, the payload of each at a multiple of 64 bytes (padding goes into the extra
field of the local header), sizes over 4 GiB in zip64 fields. An archive may lie anywhere inside of a larger file: a
file of torch.distributed.checkpoint is one after another.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchshard.checkpoint.entries import Extent
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.moving.checksums import crc32
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError

ALIGNMENT = 64
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_LOCAL_SIGN, _CENTRAL_SIGN, _END_SIGN, _END64_SIGN, _LOCATOR64_SIGN = (
    int.from_bytes(b"PK" + tail, "little") for tail in (b"\3\4", b"\1\2", b"\5\6", b"\6\6", b"\6\7")
)
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
# Enough for all but the values of an archive of one tensor.
_HEAD, _TAIL = 1024, 2048


class Member(NamedTuple):
    """One record of an archive, as its central directory has it; `header` and `record` count from the archive's start.

    Args:
        header: where the header before its payload is.
        record: where the directory has it.
    """

    name: bytes
    method: int
    flags: int
    crc32: int
    nbytes: int
    header: int
    record: int

    @property
    def checksums(self) -> tuple[int, int]:
        """Where its checksum stands, in the header and in the directory."""
        return self.header + 14, self.record + 16


class Stretch:
    """The bytes of an archive at [start, start + length) of a file. What lies near its ends takes one read for each.

    Args:
        files: where it is.
        file: its name there.
        start: its first byte.
        length: its bytes; None is all to the end of the file.
    """

    __slots__ = ("_head", "_tail", "_tail_at", "file", "files", "length", "start")

    def __init__(self, files: Files, file: str, start: int = 0, length: int | None = None) -> None:
        self.files, self.file, self.start = files, file, start
        self.length = files.size(file) - start if length is None else length
        self._tail_at = max(0, self.length - _TAIL)
        self._tail = files.read(file, start + self._tail_at, self.length - self._tail_at)
        self._head = b""

    def bytes_at(self, offset: int, length: int) -> bytes:
        """Some of them, which must lie within."""
        if offset >= self._tail_at:
            return self._tail[offset - self._tail_at : offset - self._tail_at + length]
        if offset + length <= _HEAD:
            self._head = self._head or self.files.read(self.file, self.start, min(_HEAD, self.length))
            return self._head[offset : offset + length]
        return self.files.read(self.file, self.start + offset, length)


class Archive:
    """An archive; members by name without the common first folder.

    Args:
        stretch: where it is.
        about: the key of a checkpoint that it belongs to, for errors.

    Raises:
        CheckpointError: no archive, cut off, damaged, or a directory that contradicts itself.
    """

    def __init__(self, stretch: Stretch, about: str | None = None) -> None:
        self.stretch, self.about = stretch, about
        self.length = stretch.length
        offset, size, count = self._find_directory()
        self.members = self._members(self._bytes(offset, size), count, offset)

    def __str__(self) -> str:
        path = f"{self.stretch.files.root / self.stretch.file}"
        about = f"{path}: {printable(self.about)} (archive at byte {self.stretch.start})"
        return path if self.about is None else about

    def damaged(self, why: str) -> CheckpointError:
        """An error that names the archive."""
        return CheckpointError(f"The zip archive is damaged or cut off: {why}.", where=self)

    def _bytes(self, offset: int, length: int) -> bytes:
        """All that is read goes through here."""
        if offset < 0 or length < 0 or offset + length > self.length:
            raise self.damaged(f"bytes {offset} to {offset + length} of {self.length} are wanted")
        return self.stretch.bytes_at(offset, length)

    def _find_directory(self) -> tuple[int, int, int]:
        """Offset, size and number of members of the central directory."""
        end = self.length - _END.size
        record = b"" if end < 0 else self._bytes(end, _END.size)
        if record[:4] != b"PK\5\6":
            raise self.damaged("it does not end in a directory")
        sign, disk, first, here, count, size, offset, comment = _END.unpack(record)
        if disk or first or here != count or comment:
            raise self.damaged("its end record is not one that torch writes")
        if end >= _LOCATOR64.size + _END64.size:
            sign, _, end64, _ = _LOCATOR64.unpack(self._bytes(end - _LOCATOR64.size, _LOCATOR64.size))
            if sign == _LOCATOR64_SIGN:
                end = end64
                if end + _END64.size > self.length:
                    raise self.damaged("its end record lies outside of it")
                fields = _END64.unpack(self._bytes(end, _END64.size))
                if fields[0] != _END64_SIGN:
                    raise self.damaged("its 64-bit end record is missing")
                count, size, offset = fields[7:]
        if offset + size > end:
            raise self.damaged("its directory lies outside of it")
        return offset, size, count

    def _members(self, directory: bytes, count: int, limit: int) -> dict[str, Member]:
        members: dict[str, Member] = {}
        at = 0
        folder = None
        for _ in range(count):
            if at + _CENTRAL.size > len(directory):
                raise self.damaged(f"its directory holds fewer than {count} members")
            member, at = self._member(directory, at, limit)
            top, slash, name = _decoded(member.name).partition("/")
            folder = top if folder is None else folder
            if not slash or top != folder or name in members:
                raise self.damaged(f"its member {printable(member.name)} is out of place")
            members[name] = member
        if at != len(directory):
            raise self.damaged("its directory is longer than its members")
        self._check_disjoint(members, limit)
        return members

    def _member(self, directory: bytes, at: int, start: int) -> tuple[Member, int]:
        f = _CENTRAL.unpack_from(directory, at)
        name_at = at + _CENTRAL.size
        extra_at, end = name_at + f[10], name_at + f[10] + f[11] + f[12]
        if f[0] != _CENTRAL_SIGN or end > len(directory):
            raise self.damaged("its directory is garbled")
        stored, nbytes, header = f[8], f[9], f[16]
        if _FULL32 in (stored, nbytes, header):
            wide = self._wide(directory[extra_at : extra_at + f[11]], [nbytes, stored, header])
            nbytes, stored, header = wide
        if f[4] == 0 and stored != nbytes:
            raise self.damaged("a member has two sizes")
        return Member(directory[name_at:extra_at], f[4], f[3], f[7], nbytes, header, start + at), end

    def _wide(self, extra: bytes, fields: list[int]) -> list[int]:
        """The fields, those of 32 full bits replaced by their 64-bit values from the extra field."""
        at = 0
        while at + 4 <= len(extra):
            kind, size = struct.unpack_from("<HH", extra, at)
            if kind == 1:
                body = extra[at + 4 : at + 4 + size]
                wanted = fields.count(_FULL32)
                if len(body) < 8 * wanted:
                    break
                values = iter(struct.unpack_from(f"<{wanted}Q", body))
                return [next(values) if field == _FULL32 else field for field in fields]
            at += 4 + size
        raise self.damaged("a 64-bit size is missing")

    def _check_disjoint(self, members: dict[str, Member], limit: int) -> None:
        end = 0
        for member in sorted(members.values(), key=lambda m: m.header):
            if member.header < end:
                raise self.damaged(f"its member {printable(member.name)} overlaps another")
            end = member.header + _LOCAL.size + len(member.name) + (member.nbytes if member.method == 0 else 0)
        if end > limit:
            raise self.damaged("a member reaches into its directory")

    def extent(self, name: str) -> Extent:
        """Where the payload of a member lies in the file.

        Raises:
            CheckpointError: no such member, compressed or encrypted, or its two headers disagree.
        """
        member = self.members.get(name)
        if member is None:
            raise self.damaged(f"it has no member {printable(name)}")
        if member.method or member.flags & 1:
            raise CheckpointError(
                "A member of the archive is compressed or encrypted, which torch never does.",
                where=f"{self}, member {printable(name)}",
            )
        header = self._bytes(member.header, _LOCAL.size + len(member.name))
        f = _LOCAL.unpack_from(header)
        if f[0] != _LOCAL_SIGN or f[3] != member.method or f[9] != len(member.name) or header[30:] != member.name:
            raise self.damaged(f"the two headers of member {printable(name)} disagree")
        offset = member.header + _LOCAL.size + f[9] + f[10]
        if offset + member.nbytes > self.length:
            raise self.damaged(f"member {printable(name)} reaches beyond its end")
        # torch can be told not to compute checksums, and then stores zero.
        stretch = self.stretch
        return Extent(stretch.files, stretch.file, stretch.start + offset, member.nbytes, member.crc32 or None)

    def read(self, name: str) -> bytes:
        """The payload of a small member."""
        extent = self.extent(name)
        body = self._bytes(extent.offset - self.stretch.start, extent.nbytes)
        if extent.crc32 not in (None, crc32(body)):
            raise self.damaged(f"member {printable(name)} does not match its checksum")
        return body


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


# --- writing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """A record to be written: name, payload size, and where its header and its payload begin in the file."""

    name: bytes
    nbytes: int
    header: int
    payload: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.payload + self.nbytes


def lay_out(sizes: Sequence[tuple[str, int]]) -> Sequence[Record]:
    """Records of these names and sizes one after another, each payload at a multiple of ALIGNMENT."""
    records = []
    at = 0
    for name, nbytes in sizes:
        full = f"archive/{name}".encode()
        least = at + _LOCAL.size + len(full) + len(_wide_field(nbytes)) + 4
        payload = -(-least // ALIGNMENT) * ALIGNMENT
        records.append(Record(full, nbytes, at, payload))
        at = payload + nbytes
    return records


def around(
    records: Sequence[Record], bodies: Iterable[bytes | None], crcs: Iterable[int]
) -> Iterator[tuple[int, bytes]]:
    """All but the payloads that are None, as (offset, bytes), one for what lies between two of these."""
    start, run, directory = 0, bytearray(), bytearray()
    for record, body, crc in zip(records, bodies, crcs, strict=True):
        wide = _wide_field(record.nbytes)
        size = _FULL32 if wide else record.nbytes
        padding = record.payload - record.header - _LOCAL.size - len(record.name) - len(wide) - 4
        extra = wide + b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        fields = (0x0800, 0, 0, 0, crc, size, size, len(record.name))
        run += _LOCAL.pack(_LOCAL_SIGN, 45 if wide else 0, *fields, len(extra)) + record.name + extra
        directory += _central(record, crc)
        if body is None:
            yield start, bytes(run)
            start, run = record.end, bytearray()
        else:
            run += body
    run += directory + _end_records(records[-1].end, len(directory), len(records))
    yield start, bytes(run)


def crc_places(records: Sequence[Record], i: int) -> tuple[int, int]:
    """Where the checksum of a record stands: in its header and in the directory."""
    before = sum([_CENTRAL.size + len(record.name) + len(_central_extra(record)) for record in records[:i]])
    return records[i].header + 14, records[-1].end + before + 16


def frame_size(records: Sequence[Record]) -> int:
    """Bytes of directory and end records."""
    directory = sum([_CENTRAL.size + len(record.name) + len(_central_extra(record)) for record in records])
    return directory + _END64.size + _LOCATOR64.size + _END.size


def _wide_field(nbytes: int) -> bytes:
    return struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= _FULL32 else b""


def _central(record: Record, crc: int) -> bytes:
    extra = _central_extra(record)
    version = 45 if extra else 0
    size, header = min(record.nbytes, _FULL32), min(record.header, _FULL32)
    fields = (version, version, 0x0800, 0, 0, 0, crc, size, size, len(record.name), len(extra), 0, 0, 0, 0, header)
    return _CENTRAL.pack(_CENTRAL_SIGN, *fields) + record.name + extra


def _central_extra(record: Record) -> bytes:
    """The sizes and the place that take more than 32 bits, for the directory."""
    if record.end < _FULL32:
        return b""
    wide = [record.nbytes] * 2 if record.nbytes >= _FULL32 else []
    wide += [record.header] if record.header >= _FULL32 else []
    return struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""


def _end_records(offset: int, size: int, count: int) -> bytes:
    # The 64-bit records are always written, as torch does; the old one then holds full fields where it must.
    wide = _END64.pack(_END64_SIGN, _END64.size - 12, 45, 45, 0, 0, count, count, size, offset)
    locator = _LOCATOR64.pack(_LOCATOR64_SIGN, 0, offset + size, 1)
    few = min(count, _FULL16)
    end = _END.pack(_END_SIGN, 0, 0, few, few, min(size, _FULL32), min(offset, _FULL32), 0)
    return wide + locator + end
