"""Element types: torch's names, and what the file formats and numpy call them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class DType(NamedTuple):
    """One element type.

    Args:
        name: torch's name without the prefix, such as "bfloat16".
        itemsize: bytes an element.
        numpy: the numpy type of the same bits. Types that numpy lacks (bfloat16, the float8 family, complex32) are
            seen as unsigned integers of the same size.
        safetensors: the code in a safetensors header; None where that format has none.
        storage: the class that a torch.save pickle names; None for types that are saved as untyped bytes.
    """

    name: str
    itemsize: int
    numpy: str
    safetensors: str | None
    storage: str | None


DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        row[0]: DType(*row)
        for row in (
            ("float64", 8, "float64", "F64", "DoubleStorage"),
            ("float32", 4, "float32", "F32", "FloatStorage"),
            ("float16", 2, "float16", "F16", "HalfStorage"),
            ("bfloat16", 2, "uint16", "BF16", "BFloat16Storage"),
            ("int64", 8, "int64", "I64", "LongStorage"),
            ("int32", 4, "int32", "I32", "IntStorage"),
            ("int16", 2, "int16", "I16", "ShortStorage"),
            ("int8", 1, "int8", "I8", "CharStorage"),
            ("uint8", 1, "uint8", "U8", "ByteStorage"),
            ("bool", 1, "bool", "BOOL", "BoolStorage"),
            ("complex64", 8, "complex64", "C64", "ComplexFloatStorage"),
            ("complex128", 16, "complex128", None, "ComplexDoubleStorage"),
            ("complex32", 4, "uint32", None, None),
            ("uint16", 2, "uint16", "U16", None),
            ("uint32", 4, "uint32", "U32", None),
            ("uint64", 8, "uint64", "U64", None),
            ("float8_e4m3fn", 1, "uint8", "F8_E4M3", None),
            ("float8_e5m2", 1, "uint8", "F8_E5M2", None),
            ("float8_e4m3fnuz", 1, "uint8", "F8_E4M3FNUZ", None),
            ("float8_e5m2fnuz", 1, "uint8", "F8_E5M2FNUZ", None),
            ("float8_e8m0fnu", 1, "uint8", "F8_E8M0", None),
        )
    }
)

FROM_SAFETENSORS: Mapping[str, str] = MappingProxyType(
    {d.safetensors: d.name for d in DTYPES.values() if d.safetensors}
)
FROM_STORAGE: Mapping[str, str] = MappingProxyType({d.storage: d.name for d in DTYPES.values() if d.storage})
