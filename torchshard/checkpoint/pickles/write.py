"""Writing pickles that torch.load(weights_only=True) reads, without torch: protocol 2, plain data and tensors."""

import struct
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from torchshard.checkpoint.dtypes import DTYPES, DType
from torchshard.checkpoint.entries import ObjectEntry, TensorEntry
from torchshard.checkpoint.pickles.inert import LAYOUT, Counter, Global, OrderedDict, Record, Size
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError
from torchshard.keys.containers import NESTING

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
    weights_only: bool = False,
    shared: bool = True,
    key: object = None,
) -> bytes:
    """The pickle of a state dict.

    Args:
        tree: plain data, with TensorEntries and ObjectEntries anywhere inside.
        view: says in which record a tensor will lie, and how.
        records: names of classes whose Records are written too.
        weights_only: whether torch.load(weights_only=True) is to read it.
        shared: whether what stands in several places is to be one object there; to know what does, all that is written
            is remembered.
        key: of the tree, for errors.

    Raises:
        CheckpointError: something that is not plain data, or that torch would not read, or containers nested too deep.
    """
    writer = _Writer(view, records, weights_only, shared, key)
    writer.put(tree)
    return b"\x80\x02" + bytes(writer.out) + b"."


class Call(NamedTuple):
    """A call of a global name, to be written."""

    name: str
    args: tuple[object, ...]


class Pairs(NamedTuple):
    """A dict, to be written, whose items are made one after another."""

    items: Callable[[], Iterable[tuple[object, object]]]


@dataclass(slots=True, eq=False, frozen=True)
class Alike:
    """A value that stands in many places, to be written: a reader makes one for each."""

    value: object


class _Writer:
    def __init__(self, view: Viewing, records: Collection[str], weights_only: bool, shared: bool, key: object) -> None:
        self.out = bytearray()
        self.view, self.records, self.weights_only = view, records, weights_only
        self.shared = shared
        self.names: dict[str, bytes] = {}  # opcodes that fetch each global name,
        self.texts: dict[str, bytes] = {}  # and each text
        self.objects: dict[int, tuple[int, object]] = {}  # by id; holds the object, so that the id stays its own
        self.alike: dict[Hashable, bytes] = {}  # opcodes that are written again and again
        self.slots = 0
        self.depth = 0
        self.key = key  # of a dict, last written; for errors

    def put(self, value: object) -> None:
        """Append the opcodes that make `value`, or that fetch it where it was made before."""
        kind = type(value)
        if kind is str and (again := self.texts.get(value)) is not None:  # type: ignore[call-overload]
            self.out += again
            return
        if (atom := _ATOMS.get(kind)) is not None:
            atom(self, value)
            return
        if isinstance(value, ObjectEntry):
            self.put(value.value())
            return
        step = _STEPS.get(kind)
        if step is None:
            raise CheckpointError("This is not plain data, and cannot be written.", got=printable(value), where=self.at)
        if (found := self.objects.get(id(value))) is not None:
            self.out += _fetch(found[0])
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

    def _stored(self) -> bytes:
        """Store what was made last; the opcodes that fetch it."""
        self._store()
        return _fetch(self.slots - 1)

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += _PUT1(b"K", value)
        elif -(2**31) <= value < 2**31:
            self.out += _INT4(b"J", value)
        elif (found := self.objects.get(id(value))) is not None:
            self.out += _fetch(found[0])
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
        data = value.encode("utf-8", "surrogatepass")
        self.out += _PUT4(b"X", len(data)) + data
        self.texts[value] = self._stored()

    def _bytes(self, value: bytes) -> None:
        self._call("_codecs.encode", (value.decode("latin1"), "latin1"))

    def _global(self, dotted: str) -> None:
        if (again := self.names.get(dotted)) is not None:
            self.out += again
            return
        module, _, name = dotted.rpartition(".")
        self.out += f"c{module}\n{name}\n".encode()
        self.names[dotted] = self._stored()

    def _call(self, name: str, args: tuple[object, ...]) -> None:
        self._global(name)
        self._items(args)
        self.out += b"R"

    def _items(self, items: tuple[object, ...]) -> None:
        if not items:
            self.out += b")"
            return
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

    def _dict(self, value: dict[object, object] | Pairs) -> None:
        self.out += b"}"
        self._remember(value)
        self._pairs(value)

    def _alike(self, key: Hashable, step: Callable[..., None], *args: object) -> None:
        """What the step appends, which is the same whenever it is called with this key."""
        if (again := self.alike.get(key)) is not None:
            self.out += again
            return
        start, slots = len(self.out), self.slots
        step(*args)
        if self.slots == slots:  # all that it stores is fetched from now on
            self.alike[key] = bytes(self.out[start:])

    def _pairs(self, value: dict[object, object] | Pairs) -> None:
        self.out += b"("
        for key, item in value.items():
            self.key = key
            self.put(key)
            self.put(item)
        self.out += b"u"

    def _ordered(self, value: OrderedDict) -> None:
        self._call("collections.OrderedDict", ())
        self._remember(value)
        self._pairs(value)
        if value.attributes is not None:
            self.put(value.attributes)
            self.out += b"b"

    def _record(self, value: Record) -> None:
        if value.name in ("torch.device", LAYOUT) and value.state is None:
            self._call(value.name, value.args)
        elif value.name in self.records:
            self._global(value.name)
            self._items(value.args)
            self.out += b"\x81"  # NEWOBJ
            if value.state is not None:
                self.put(value.state)
                self.out += b"b"  # BUILD
        else:
            raise CheckpointError("This is not plain data, and cannot be written.", got=value.name, where=self.at)

    def _tensor(self, entry: TensorEntry) -> None:
        grad = entry.requires_grad
        if not entry.parameter:
            self._data(entry, grad)
            return
        self._global("torch._utils._rebuild_parameter")
        self.out += b"("
        self._data(entry, False)
        self.put(grad)
        self._call("collections.OrderedDict", ())
        self.out += b"tR"

    def _data(self, entry: TensorEntry, grad: bool) -> None:
        number, *how = self.view(entry)
        self._alike(entry.dtype, self._before_number, DTYPES[entry.dtype])
        self.put(str(number))
        self._alike((entry.dtype, grad, *how), self._after_number, DTYPES[entry.dtype], grad, *how)

    def _before_number(self, dtype: DType) -> None:
        self._global("torch._utils._rebuild_tensor_v2" if dtype.storage else "torch._utils._rebuild_tensor_v3")
        self.out += b"(("
        self.put("storage")
        self._global(f"torch.{dtype.storage}" if dtype.storage else "torch.storage.UntypedStorage")

    def _after_number(
        self, dtype: DType, grad: bool, length: int, first: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        self.put("cpu")
        self._int(length if dtype.storage else length * dtype.itemsize)
        self.out += b"tQ"
        self._int(first)
        self._items(shape)
        self._items(stride)
        self.put(grad and dtype.storage is not None)  # torch loads no others that ask
        self._call("collections.OrderedDict", ())
        if not dtype.storage:
            self._global(f"torch.{dtype.name}")
        self.out += b"tR"


def _fetch(slot: int) -> bytes:
    return _PUT1(b"h", slot) if slot < 256 else _PUT4(b"j", slot)


# Tables for all writers: of bound methods they would keep each writer, and all that it has written, as garbage.
_ATOMS: Mapping[type, Callable[[_Writer, Any], None]] = MappingProxyType(
    {
        type(None): lambda writer, value: writer._raw(b"N"),
        bool: lambda writer, value: writer._raw(b"\x88" if value else b"\x89"),
        int: _Writer._int,
        float: lambda writer, value: writer._raw(b"G" + struct.pack(">d", value)),
        str: _Writer._text,
        Alike: lambda writer, value: writer._alike(value, writer.put, value.value),
    }
)
_STEPS: Mapping[type, Callable[[_Writer, Any], None]] = MappingProxyType(
    {
        bytes: _Writer._bytes,
        bytearray: lambda writer, value: writer._call("__builtin__.bytearray", (value.decode("latin1"), "latin1")),
        complex: lambda writer, value: writer._call("__builtin__.complex", (value.real, value.imag)),
        tuple: _Writer._items,
        Size: lambda writer, value: writer._call("torch.Size", (tuple(value),)),
        set: lambda writer, value: writer._call("__builtin__.set", (list(value),)),
        list: _Writer._list,
        dict: _Writer._dict,
        Counter: lambda writer, value: writer._call("collections.Counter", (dict(value),)),
        OrderedDict: _Writer._ordered,
        Global: lambda writer, value: writer._global(value.name),
        Record: _Writer._record,
        Call: lambda writer, value: writer._call(value.name, value.args),
        Pairs: _Writer._dict,
        TensorEntry: _Writer._tensor,
    }
)
