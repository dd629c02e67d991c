"""Floating-point numbers in fewer bytes, without loss; pure arithmetic on bits.

The exponents of gradients are much alike, and signs and mantissas are noise. So the sign is turned to the end; the
first byte of each number, its exponent, goes in Huffman's code, and the others follow as they are, plane by plane. For
float32 and bfloat16 that byte is the whole exponent, for float16 and float64 the most of it.

Source: D. A. Huffman, "A Method for the Construction of Minimum-Redundancy Codes", 1952, as Deflate (RFC 1951) has it,
without its search for repetitions.
"""

import sys
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

_AS_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_RAW, _MEMORY = -zlib.MAX_WBITS, 9
"""Deflate without a header and a checksum, as what carries the bytes has one; with the most memory zlib takes."""

Bits = NDArray[Any]


def can_pack(x: Tensor) -> bool:
    """Whether it is of a dtype and a layout that `pack` takes, on a machine whose numbers begin with the low byte."""
    return x.dtype in DTYPES and x.layout is torch.strided and x.is_contiguous() and sys.byteorder == "little"


def pack(x: Tensor) -> bytes:
    """The numbers of a contiguous tensor on the CPU, each bit of them."""
    bits = _bits(x)
    turned = (bits << 1) | (bits >> (8 * bits.itemsize - 1))
    *rest, exponents = _planes(turned)
    code = zlib.compressobj(1, zlib.DEFLATED, _RAW, _MEMORY, zlib.Z_HUFFMAN_ONLY)
    return b"".join([*(plane.tobytes() for plane in rest), code.compress(exponents.tobytes()), code.flush()])


def unpack(packed: bytes | bytearray | memoryview, into: Tensor) -> None:
    """Fill a contiguous tensor on the CPU with the numbers that were packed.

    Raises:
        ValueError: they are another number of them, or of another dtype.
    """
    bits, data = _bits(into), memoryview(packed)
    turned = np.empty_like(bits)
    *rest, exponents = _planes(turned)
    begin = 0
    try:
        for plane in rest:
            plane[:] = np.frombuffer(data, plane.dtype, len(plane), begin)
            begin += plane.size * plane.itemsize
        highest = np.frombuffer(zlib.decompress(data[begin:], _RAW, max(1, into.numel())), np.uint8)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"these are not {into.numel()} packed numbers of {into.dtype}: {error}") from error
    if len(highest) != len(exponents):
        raise ValueError(f"these are {len(highest)} packed numbers, and not {into.numel()} of {into.dtype}")
    exponents[:] = highest
    np.bitwise_or(turned >> 1, turned << (8 * bits.itemsize - 1), out=bits)


def _bits(x: Tensor) -> Bits:
    signed = x.view(-1).view(_AS_BITS[x.element_size()]).numpy()
    return signed.view(f"u{x.element_size()}")


def _planes(turned: Bits) -> Iterator[Bits]:
    """The bytes of all numbers from the lowest up: half of each, half of the rest and so on, the highest by itself."""
    size, width, begin = turned.itemsize, turned.itemsize // 2, 0
    while width:
        yield turned.view(f"u{width}")[begin // width :: size // width]
        begin, width = begin + width, width // 2
    yield turned.view("u1")[begin::size]
