"""Values from one element type to another, as torch casts them: to the nearest, ties to even; numpy on bits.

From any type that holds real numbers to float64, float32, float16 or bfloat16. Other targets are refused.
"""

import functools
from typing import TYPE_CHECKING, Any

from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOATING = tuple([name for name in DTYPES if name.startswith(("float", "bfloat"))])
TARGETS = ("float64", "float32", "float16", "bfloat16")
# exponent bits, mantissa bits, bias, whether the largest exponent holds infinities, whether there is a negative zero
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, False, True),
    "float8_e5m2": (5, 2, 15, True, True),
    "float8_e4m3fnuz": (4, 3, 8, False, False),
    "float8_e5m2fnuz": (5, 2, 16, False, False),
}


def check_target(target: str, where: object = None) -> None:
    """Raise CheckpointError unless this is a type that values are cast to."""
    if target not in TARGETS:
        expected = " or ".join(TARGETS)
        raise CheckpointError(
            "Tensors are not cast to this type.", expected=expected, got=printable(repr(target)), where=where
        )


def check(source: str, target: str, where: object) -> None:
    """Raise CheckpointError unless values of one type can be cast to the other."""
    check_target(target, where)
    if source.startswith("complex"):
        raise CheckpointError("Complex numbers are not cast.", got=f"{source} to {target}", where=where)


def cast(raw: "NDArray[Any]", source: str, target: str) -> "NDArray[Any]":
    """Elements of one type as another.

    Args:
        raw: elements as DTYPES[source].numpy.
        source: torch's name of their type.
        target: one of TARGETS.

    Returns:
        Elements as DTYPES[target].numpy: bfloat16 as the bits of a uint16.
    """
    import numpy as np

    values = decoded(raw, source)
    with np.errstate(over="ignore", invalid="ignore"):
        if DTYPES[target].itemsize == 2:
            values = values.astype(np.float32)  # as torch does, so that float64 is rounded twice
        if target != "bfloat16":
            simple: NDArray[Any] = values.astype(target)
            return simple
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    result: NDArray[Any] = np.where(nan, 0x7FC0, rounded).astype(np.uint16)
    return result


def decoded(raw: "NDArray[Any]", dtype: str) -> "NDArray[Any]":
    """Elements as numbers: types that numpy lacks as float32 or complex64, others as they are."""
    import numpy as np

    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype == "complex32":
        parts: NDArray[Any] = np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
        return parts.view(np.complex64)
    if dtype.startswith("float8"):
        values: NDArray[Any] = _table(dtype)[raw]
        return values
    return raw


@functools.cache
def _table(dtype: str) -> "NDArray[Any]":
    """The value of each of the 256 bit patterns of an 8-bit float."""
    import numpy as np

    if dtype == "float8_e8m0fnu":  # powers of two, nothing else
        return np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan], np.float32)
    exponents, mantissas, bias, infinities, signed_zero = _FLOAT8[dtype]
    table = np.zeros(256, np.float32)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code & 0x7F) >> mantissas, code & ((1 << mantissas) - 1)
        fraction = mantissa / (1 << mantissas)
        table[code] = sign * (
            2.0 ** (1 - bias) * fraction if not exponent else 2.0 ** (exponent - bias) * (1 + fraction)
        )
        if infinities and exponent == (1 << exponents) - 1:
            table[code] = np.nan if mantissa else sign * np.inf
    if not signed_zero:
        table[0x80] = np.nan
    elif not infinities:
        table[0x7F] = table[0xFF] = np.nan
    return table
