"""What a conversion has done so far, on disk: a line a block, so that another can go on where it was killed.

The first line is a fingerprint of all that was asked for. A block is written down only after its bytes, and where the
disk is waited for, after these have reached it; who goes on compares them with their checksum. Each line has a checksum
of itself: one that was cut off is ignored.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchshard.checkpoint.moving.checksums import crc32

Block = tuple[int, int, int]  # slot, first byte in its file, bytes
COMMIT = "commit"


class State(NamedTuple):
    """What a journal says: blocks that are written, with their checksums, and whether the destination was complete."""

    blocks: Mapping[Block, Sequence[int]]
    complete: bool


def read(fd: int, fingerprint: str) -> State | None:
    """What the journal says; None where it is about something else.

    Args:
        fd: of the file.
        fingerprint: what the first line must be.
    """
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    lines = data.split(b"\n")
    texts = [text for line in lines[:-1] if (text := _checked(line)) is not None]
    if not texts or texts[0] != fingerprint:
        return None
    blocks: dict[Block, Sequence[int]] = {}
    for text in texts[1:]:
        if text != COMMIT:
            slot, offset, nbytes, *crcs = map(int, text.split())
            blocks[slot, offset, nbytes] = crcs
    return State(blocks, COMMIT in texts[1:])


def write(fd: int, texts: list[str]) -> None:
    """Append lines; what was cut off before them stays apart."""
    data = b"\n" + b"".join([_line(text) for text in texts])
    while data:
        data = data[os.write(fd, data) :]


def _line(text: str) -> bytes:
    body = text.encode()
    return b"%08x %s\n" % (crc32(body), body)


def _checked(line: bytes) -> str | None:
    head, _, body = line.partition(b" ")
    return body.decode() if head == b"%08x" % crc32(body) else None
