"""What torch.save puts into data.pkl: tensors over records of the archive, and plain data.

The table ALLOWED is the whole of what is read. It is a little less than torch.load(weights_only=True) accepts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from torchshard.checkpoint.dtypes import DTYPES, FROM_STORAGE
from torchshard.checkpoint.entries import Extent, Piece, Place, TensorEntry
from torchshard.checkpoint.pickles.inert import (
    LAYOUT,
    PARAMETER,
    Counter,
    Global,
    Hashes,
    OrderedDict,
    Record,
    Size,
    record,
)
from torchshard.checkpoint.pickles.unpickle import load
from torchshard.checkpoint.text import printable
from torchshard.checkpoint.zips import Archive
from torchshard.errors import CheckpointError
from torchshard.layout import whole


class Storage(NamedTuple):
    """What a persistent id stands for: bytes that tensors are views of.

    Args:
        name: of the record that holds them.
        dtype: type of its elements; None for untyped bytes.
        nbytes: how many; None where there is no such record.
        find: gives the stretch of file; may read a little.
        where: file, for errors.
    """

    name: str
    dtype: str | None
    nbytes: int | None
    find: Callable[[], Extent]
    where: object


def read_values(archive: Archive, allowed: Mapping[str, Global] | None = None) -> object:
    """The object that was saved, with TensorEntries in the places of tensors; reads what is ALLOWED by default."""
    _check_byteorder(archive)
    persistent = partial(_storage, archive)
    data = archive.read("data.pkl")
    return load(data, ALLOWED if allowed is None else allowed, archive, persistent=persistent, advice=advice)


def _check_byteorder(archive: Archive) -> None:
    if "byteorder" in archive.members and (order := archive.read("byteorder")) != b"little":
        raise CheckpointError("The archive is not little-endian.", got=printable(order), where=archive)


def _storage(archive: Archive, pid: object) -> Storage:
    name, dtype = storage_named(pid, archive)
    member = archive.members.get(f"data/{name}")
    nbytes = None if member is None else member.nbytes
    return Storage(f"data/{name}", dtype, nbytes, partial(archive.extent, f"data/{name}"), archive)


def storage_named(pid: object, where: object) -> tuple[str, str | None]:
    """The number of a storage and the type of its elements (None: bytes) from a persistent id.

    Raises:
        CheckpointError: not what torch writes.
    """
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], Global):
        raise CheckpointError("A tensor's storage is not described as torch does.", got=printable(pid), where=where)
    kind = pid[1].name.rpartition(".")[2]
    if not isinstance(pid[2], str) or kind not in (*FROM_STORAGE, "UntypedStorage"):
        raise CheckpointError("A tensor has a storage of an unknown kind.", got=printable(kind), where=where)
    return pid[2], FROM_STORAGE.get(kind)


def sizes(value: object, what: str, where: object) -> tuple[int, ...]:
    """A shape or a stride: a tuple of integers from 0 to 2**63.

    Raises:
        CheckpointError: anything else.
    """
    if type(value) is Size:  # was checked when it was made
        return tuple(value)
    if isinstance(value, (tuple, list)) and len(value) <= 64:
        for n in value:
            if type(n) is not int or not 0 <= n < 2**63:
                break
        else:
            return tuple(value)
    raise CheckpointError(f"The {what} is not a list of sizes.", got=printable(value), where=where)


def _tensor(storage: Any, dtype: str | None, offset: Any, shape: Any, stride: Any, grad: Any) -> TensorEntry:
    if not isinstance(storage, Storage) or dtype is None:
        raise TypeError("a tensor without a storage or a type")
    where = storage.where
    shape, stride = sizes(shape, "shape", where), sizes(stride, "stride", where)
    (offset,) = sizes((offset,), "offset", where)
    if len(shape) != len(stride):
        raise CheckpointError("Shape and stride have different lengths.", got=f"{shape} and {stride}", where=where)
    empty = 0 in shape
    reach = 0 if empty else offset + 1 + sum([(n - 1) * s for n, s in zip(shape, stride, strict=True)])
    itemsize = DTYPES[dtype].itemsize
    if (storage.nbytes is None and not empty) or reach * itemsize > (storage.nbytes or 0):
        raise CheckpointError(
            f"A tensor reaches beyond its storage, the record {printable(storage.name)}.",
            expected=f"{printable(reach * itemsize)} bytes",
            got=f"{storage.nbytes or 0} bytes",
            where=where,
        )

    def find() -> Place:
        extent = storage.find()
        return Place(extent, extent.offset + offset * itemsize, stride)

    pieces = () if empty else (Piece(whole(shape), find),)
    return TensorEntry(dtype, shape, pieces, requires_grad=grad is True)


def _rebuild_v2(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any = False, _hooks: Any = None, *rest: Any
) -> TensorEntry:
    _check_plain(rest)
    return _tensor(storage, getattr(storage, "dtype", None), offset, shape, stride, grad)


def _rebuild_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, _hooks: Any, dtype: Any, *rest: Any
) -> TensorEntry:
    _check_plain(rest)
    name = dtype.name.removeprefix("torch.") if isinstance(dtype, Global) else None
    return _tensor(storage, name if name in DTYPES else None, offset, shape, stride, grad)


def _check_plain(metadata: Sequence[object]) -> None:
    if any(metadata):
        raise CheckpointError(
            "A conjugated or negated view of a tensor is not read.", fix="Save tensor.resolve_conj()."
        )


def _rebuild_parameter(tensor: Any, grad: Any = False, _hooks: Any = None, state: Any = None) -> TensorEntry:
    if not isinstance(tensor, TensorEntry):
        raise TypeError("a parameter without a tensor")
    return replace(
        tensor, requires_grad=grad is True, parameter=True, attributes=tuple(map(printable, attributes(state)))
    )


def _parameter(tensor: Any = None, grad: Any = True) -> TensorEntry:
    """What torch called before 0.4; without a tensor the state that follows has it."""
    return _rebuild_parameter(TensorEntry("float32", (0,), ()) if tensor is None else tensor, grad)


def attributes(state: object) -> dict[Any, Any]:
    """Instance attributes and slots, whichever way the class keeps them."""
    parts = state if isinstance(state, tuple) else (state,)
    found: dict[Any, Any] = {}
    for part in parts:
        found |= part if isinstance(part, dict) else {}
    return found


def _encode(text: Any, encoding: Any = None) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise TypeError("bytes that are not spelled in latin1")
    return text.encode("latin1")


def _bytes(*args: Any) -> bytes:
    if args:
        raise TypeError("bytes with arguments")
    return b""


def _bytearray(*args: Any) -> bytearray:
    if not args:
        return bytearray()
    return bytearray(args[0] if len(args) == 1 and isinstance(args[0], bytes) else _encode(*args))


def _set(items: Any = ()) -> set[Any]:
    hashes = Hashes()
    for item in items:
        if not isinstance(item, (str, int, float, bytes, type(None))):
            raise TypeError(f"a set holds {printable(item)}")
        hashes.take(item)
    return set(items)


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("a complex number that is not two floats")
    return complex(real, imaginary)


def _ordered(items: Any = ()) -> OrderedDict:
    pairs = tuple([tuple(pair) if type(pair) is list else pair for pair in items])  # lists are those of Python 2
    if any(type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not str for pair in pairs):
        raise TypeError("an OrderedDict of what are no pairs of names and values")
    return OrderedDict(pairs)


def _counter(counts: Any = None) -> Counter:
    if type(counts) not in (dict, type(None)):
        raise TypeError("a Counter that is not made of a dict")
    return Counter(counts or {})


def _size(items: Any = ()) -> Size:
    return Size(sizes(items, "torch.Size", None))


def _layout(name: Any) -> Record:
    if name != "torch.strided":
        raise CheckpointError("Tensors that are not dense are not read.", expected="torch.strided", got=printable(name))
    return Record(LAYOUT, (name,))


def _table() -> dict[str, Global]:
    functions: dict[str, Callable[..., object]] = {
        "torch._utils._rebuild_tensor": _rebuild_v2,
        "torch._utils._rebuild_tensor_v2": _rebuild_v2,
        "torch._utils._rebuild_tensor_v3": _rebuild_v3,
        "torch._utils._rebuild_parameter": _rebuild_parameter,
        "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
        PARAMETER: _parameter,
        LAYOUT: _layout,
        "torch.Size": _size,
        "collections.OrderedDict": _ordered,
        "collections.Counter": _counter,
        "_codecs.encode": _encode,
        "builtins.bytes": _bytes,
        "builtins.bytearray": _bytearray,
        "builtins.set": _set,
        "builtins.complex": _complex,
    }
    table = {name: Global(name, make) for name, make in functions.items()}
    table["torch.device"] = record("torch.device")
    values = [f"torch.{name}" for name in (*DTYPES, *FROM_STORAGE)]
    values.append("torch.storage.UntypedStorage")
    return table | {name: Global(name) for name in values}


ALLOWED: Mapping[str, Global] = MappingProxyType(_table())
_ADVICE = {
    # Types of elements that are less than a byte, or not numbers.
    r"torch\.(bits\d+(x\d)?|float4_\w+)": "Save such a tensor as bytes: tensor.view(torch.uint8).",
    r"torch\._utils\._rebuild_sparse\w+": "Save such a tensor dense: tensor.to_dense().",
    r"torch\._utils\._rebuild_qtensor": "Save such a tensor as numbers: tensor.dequantize(), or tensor.int_repr().",
    r"torch\._utils\._rebuild_nested_tensor": "Save the tensors of a nested tensor: nested.unbind().",
    r"torch\._utils\._rebuild_meta_tensor\w*": "Save the tensor when it has values: it is on the meta device.",
    r"torch\.nn\.modules\..*": "Save the state dict of the module: module.state_dict().",
    r"(torch|torchshard)\..*": None,
    r"numpy\..*": "Save arrays as tensors, torch.from_numpy(array), and scalars as numbers, scalar.item().",
    r".*": "Save plain data beside the tensors: numbers, text, bytes, lists, tuples, dicts and sets.",
}  # the first that matches


def attribute(readable: Mapping[str, Sequence[str]]) -> Global:
    """`getattr` as pickles use it for nested classes and, before Python 3.11.4, for members of an enumeration.

    Args:
        readable: dotted name of a class to the names that may be taken from it; no names means all, as bare names.
    """

    def taken(outer: Any, name: Any) -> Global:
        allowed = readable.get(outer.name) if isinstance(outer, Global) else None
        if allowed is None or not isinstance(name, str) or (allowed and name not in allowed):
            raise CheckpointError("The pickle takes an attribute of something.", got=printable(name))
        full = f"{outer.name}.{printable(name)}"
        return record(full) if allowed else Global(full)

    return Global("builtins.getattr", taken)


def advice(name: str) -> str | None:
    """What to do about a name that is not read."""
    return next(what for pattern, what in _ADVICE.items() if re.fullmatch(pattern, name, re.DOTALL))
