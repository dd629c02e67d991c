"""Writing pickles that torch.load(weights_only=True) reads, without torch: protocol 2, plain data and tensors."""

import struct
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.entries import ObjectEntry, TensorEntry
from torchshard.checkpoint.pickles.inert import LAYOUT, Counter, Global, OrderedDict, Record, Size
from torchshard.checkpoint.text import printable
from torchshard.checkpoint.trees import NESTING
from torchshard.errors import CheckpointError

_PUT1, _PUT4, _INT4 = [struct.Struct(code).pack for code in ("<cB", "<cI", "<ci")]  # an opcode and its argument


class View(NamedTuple):
    """Where a tensor lies among the elements of a record.

    Args:
        record: number of the record.
        length: how many elements the record has.
        first: which of them is the tensor's first.
        shape: of the tensor.
        stride: steps between neighbours, one a dim, in elements.
    """

    record: int
    length: int
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


Viewing = Callable[[TensorEntry], View]


def dump(
    tree: object,
    view: Viewing,
    records: Collection[str] = (),
    *,
    grads: bool = True,
    weights_only: bool = False,
    shared: bool = True,
) -> bytes:
    """The pickle of a state dict.

    Args:
        tree: plain data, with TensorEntries and ObjectEntries anywhere inside.
        view: says in which record a tensor will lie, and how.
        records: names of classes whose Records are written too.
        grads: whether parameters, and tensors that ask for gradients, stay so.
        weights_only: whether torch.load(weights_only=True) is to read it.
        shared: whether what stands in several places is to be one object there; to know what does, all that is written
            is remembered.

    Raises:
        CheckpointError: something that is not plain data, or that torch would not read, or containers nested too deep.
    """
    writer = _Writer(view, records, grads, weights_only, shared)
    writer.put(tree)
    return b"\x80\x02" + bytes(writer.out) + b"."


class Call(NamedTuple):
    """A call of a global name, to be written."""

    name: str
    args: tuple[object, ...]


class _Writer:
    def __init__(self, view: Viewing, records: Collection[str], grads: bool, weights_only: bool, shared: bool) -> None:
        self.out = bytearray()
        self.view, self.records, self.grads, self.weights_only = view, records, grads, weights_only
        self.shared = shared
        self.texts: dict[str, int] = {}
        self.globals: dict[tuple[str, str], int] = {}
        self.objects: dict[int, tuple[int, object]] = {}  # by id; holds the object, so that the id stays its own
        self.slots = 0
        self.depth = 0
        self.key: object = None  # of a dict, last written; for errors

    def put(self, value: object) -> None:
        """Append the opcodes that make `value`, or that fetch it where it was made before."""
        if (atom := _ATOMS.get(type(value))) is not None:
            atom(self, value)
            return
        if isinstance(value, ObjectEntry):
            self.put(value.value())
            return
        step = _STEPS.get(type(value))
        if step is None:
            raise CheckpointError("This is not plain data, and cannot be written.", got=printable(value), where=self.at)
        if (found := self.objects.get(id(value))) is not None:
            self._fetch(found[0])
            return
        self.depth += 1
        if self.depth > NESTING + 10:
            raise CheckpointError(
                "Containers are nested too deep.", expected=f"at most {NESTING} levels", where=self.at
            )
        step(self, value)
        self.depth -= 1
        self._remember(value)

    @property
    def at(self) -> str:
        """About where the writer is, for errors."""
        return f"at or below the key {printable(self.key)}"

    def _raw(self, data: bytes) -> None:
        self.out += data

    def _remember(self, value: object) -> None:
        if self.shared and id(value) not in self.objects:
            self.objects[id(value)] = (self.slots, value)
            self._store()

    def _store(self) -> None:
        self.out += _PUT1(b"q", self.slots) if self.slots < 256 else _PUT4(b"r", self.slots)
        self.slots += 1

    def _fetch(self, slot: int) -> None:
        self.out += _PUT1(b"h", slot) if slot < 256 else _PUT4(b"j", slot)

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += _PUT1(b"K", value)
        elif -(2**31) <= value < 2**31:
            self.out += _INT4(b"J", value)
        elif (found := self.objects.get(id(value))) is not None:
            self._fetch(found[0])
        else:
            bits = (value if value >= 0 else ~value).bit_length()  # besides that of the sign
            data = value.to_bytes(bits // 8 + 1, "little", signed=True)
            short = len(data) < 256
            if not short and self.weights_only:
                raise CheckpointError(
                    "torch.load(weights_only=True) does not read an integer of this size.",
                    expected="2039 bits at most",
                    got=printable(value),
                    where=self.at,
                    fix="Leave it out (exclude), or save it as text.",
                )
            self.out += (b"\x8a" + bytes([len(data)]) if short else b"\x8b" + struct.pack("<I", len(data))) + data
            if len(data) > 8:
                self._remember(value)

    def _text(self, value: str) -> None:
        if value in self.texts:
            self._fetch(self.texts[value])
            return
        data = value.encode("utf-8", "surrogatepass")
        self.out += b"X" + struct.pack("<I", len(data)) + data
        self.texts[value] = self.slots
        self._store()

    def _bytes(self, value: bytes) -> None:
        self._call("_codecs", "encode", (value.decode("latin1"), "latin1"))

    def _global(self, module: str, name: str) -> None:
        slot = self.globals.get((module, name))
        if slot is not None:
            self._fetch(slot)
            return
        self.out += f"c{module}\n{name}\n".encode()
        self.globals[module, name] = self.slots
        self._store()

    def _call(self, module: str, name: str, args: tuple[object, ...]) -> None:
        self._global(module, name)
        self._items(args)
        self.out += b"R"

    def _written_call(self, value: Call) -> None:
        module, _, name = value.name.rpartition(".")
        self._call(module, name, value.args)

    def _items(self, items: tuple[object, ...]) -> None:
        self.out += b"("
        for item in items:
            self.put(item)
        self.out += b"t"

    def _list(self, value: list[object]) -> None:
        self.out += b"]"
        self._remember(value)  # before its items, which may refer back to it
        self.out += b"("
        for item in value:
            self.put(item)
        self.out += b"e"

    def _dict(self, value: dict[object, object]) -> None:
        self.out += b"}"
        self._remember(value)
        self._pairs(value)

    def _pairs(self, value: dict[object, object]) -> None:
        self.out += b"("
        for key, item in value.items():
            self.key = key
            self.put(key)
            self.put(item)
        self.out += b"u"

    def _ordered(self, value: OrderedDict) -> None:
        self._call("collections", "OrderedDict", ())
        self._remember(value)
        self._pairs(value)
        if value.attributes is not None:
            self.put(value.attributes)
            self.out += b"b"

    def _record(self, value: Record) -> None:
        module, _, name = value.name.rpartition(".")
        if value.name in ("torch.device", LAYOUT) and value.state is None:
            self._call(module, name, value.args)
        elif value.name in self.records:
            self._global(module, name)
            self.put(value.args)
            self.out += b"\x81"  # NEWOBJ
            if value.state is not None:
                self.put(value.state)
                self.out += b"b"  # BUILD
        else:
            raise CheckpointError("This is not plain data, and cannot be written.", got=value.name, where=self.at)

    def _tensor(self, entry: TensorEntry) -> None:
        grad = self.grads and entry.requires_grad
        if not (self.grads and entry.parameter):
            self._data(entry, grad)
            return
        self._global("torch._utils", "_rebuild_parameter")
        self.out += b"("
        self._data(entry, False)
        self.put(grad)
        self._call("collections", "OrderedDict", ())
        self.out += b"tR"

    def _data(self, entry: TensorEntry, grad: bool) -> None:
        dtype = DTYPES[entry.dtype]
        number, length, first, shape, stride = self.view(entry)
        self._global("torch._utils", "_rebuild_tensor_v2" if dtype.storage else "_rebuild_tensor_v3")
        self.out += b"(("
        self._text("storage")
        self._global(*(("torch", dtype.storage) if dtype.storage else ("torch.storage", "UntypedStorage")))
        self._text(str(number))
        self._text("cpu")
        self._int(length if dtype.storage else length * dtype.itemsize)
        self.out += b"tQ"
        self._int(first)
        self._items(shape)
        self._items(stride)
        self.put(grad and dtype.storage is not None)  # torch loads no others that ask
        self._call("collections", "OrderedDict", ())
        if not dtype.storage:
            self._global("torch", dtype.name)
        self.out += b"tR"


# Tables for all writers: of bound methods they would keep each writer, and all that it has written, as garbage.
_ATOMS: Mapping[type, Callable[[_Writer, Any], None]] = MappingProxyType(
    {
        type(None): lambda writer, value: writer._raw(b"N"),
        bool: lambda writer, value: writer._raw(b"\x88" if value else b"\x89"),
        int: _Writer._int,
        float: lambda writer, value: writer._raw(b"G" + struct.pack(">d", value)),
        str: _Writer._text,
    }
)
_STEPS: Mapping[type, Callable[[_Writer, Any], None]] = MappingProxyType(
    {
        bytes: _Writer._bytes,
        bytearray: lambda writer, value: writer._call("__builtin__", "bytearray", (value.decode("latin1"), "latin1")),
        complex: lambda writer, value: writer._call("__builtin__", "complex", (value.real, value.imag)),
        tuple: _Writer._items,
        Size: lambda writer, value: writer._call("torch", "Size", (tuple(value),)),
        set: lambda writer, value: writer._call("__builtin__", "set", (list(value),)),
        list: _Writer._list,
        dict: _Writer._dict,
        Counter: lambda writer, value: writer._call("collections", "Counter", (dict(value),)),
        OrderedDict: _Writer._ordered,
        Global: lambda writer, value: writer._global(*value.name.rsplit(".", 1)),
        Record: _Writer._record,
        Call: _Writer._written_call,
        TensorEntry: _Writer._tensor,
    }
)
