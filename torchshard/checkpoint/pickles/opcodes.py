"""One step of the stack machine for each opcode of pickle protocols 0 to 5 that a checkpoint has a use for."""

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from torchshard.checkpoint.entries import TensorEntry
from torchshard.checkpoint.pickles.inert import Global, OrderedDict, Record, Size
from torchshard.checkpoint.text import printable

if TYPE_CHECKING:
    from torchshard.checkpoint.pickles.unpickle import Machine

Step = Callable[["Machine"], None]

_SCALARS = frozenset((str, int, float, bool, type(None), bytes, complex, Record, Global))


def _checked_key(m: "Machine", key: Any) -> Any:
    # Hashing a tuple goes down to its leaves: one that refers to itself a hundred times over would never end.
    items = key if type(key) in (tuple, Size) else (key,)
    for item in items:
        if type(item) not in _SCALARS:
            raise TypeError(f"a key of a dict or set is {printable(key)}")
    m.hashes.take(key)
    return key


def _refuse(name: str) -> Step:
    def step(m: "Machine") -> NoReturn:
        raise ValueError(f"opcode {name} is not read")

    return step


def _unknown(m: "Machine") -> None:
    raise ValueError(f"{m.data[m.at - 1]:#04x} is not an opcode")


# --- constants ---------------------------------------------------------------------------------------------------


def _pushes(value: object) -> Step:
    return lambda m: m.stack.append(value)


def _int_line(m: "Machine") -> None:
    line = m.line()
    m.stack.append({b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line.rstrip(b"L")))


def _float_line(m: "Machine") -> None:
    m.stack.append(float(m.line()))


def _byte(m: "Machine") -> None:
    m.stack.append(m.data[m.at])
    m.at += 1


def _fixed(code: str, size: int) -> Step:
    unpack = struct.Struct(code).unpack_from

    def step(m: "Machine") -> None:
        m.stack.append(unpack(m.data, m.at)[0])
        m.at += size

    return step


def _sized(width: int, make: Callable[[bytes], object]) -> Step:
    def step(m: "Machine") -> None:
        m.stack.append(make(m.take(int.from_bytes(m.take(width), "little"))))

    return step


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


# --- containers --------------------------------------------------------------------------------------------------


def _mark(m: "Machine") -> None:
    m.marks.append(m.stack)
    m.stack = []


def _tuple(m: "Machine") -> None:
    items = m.to_mark()
    m.stack.append(tuple(items))


def _tuple_of_one(m: "Machine") -> None:
    m.stack[-1] = (m.stack[-1],)


def _tuple_of(count: int) -> Step:
    def step(m: "Machine") -> None:
        stack = m.stack
        if len(stack) < count:
            raise IndexError("the stack is empty")
        stack[-count:] = [tuple(stack[-count:])]

    return step


def _list(m: "Machine") -> None:
    items = m.to_mark()
    m.stack.append(items)


def _dict(m: "Machine") -> None:
    items = m.to_mark()
    m.stack.append({})
    _set_pairs(m, items)


def _set_pairs(m: "Machine", items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) not in (dict, OrderedDict) or len(items) % 2:
        raise TypeError(f"pairs go into {printable(target)}")
    pairs = iter(items)
    for key, value in zip(pairs, pairs, strict=True):
        target[key if type(key) is str else _checked_key(m, key)] = value


def _extend(m: "Machine", items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is not list:
        raise TypeError(f"items go into {printable(target)}")
    target.extend(items)


def _append(m: "Machine") -> None:
    item = m.stack.pop()
    _extend(m, [item])


def _setitem(m: "Machine") -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set_pairs(m, [key, value])


def _additems(m: "Machine") -> None:
    items = m.to_mark()
    target = m.stack[-1]
    if type(target) is not set:
        raise TypeError(f"items go into {printable(target)}")
    target.update([_checked_key(m, item) for item in items])


# --- stack and memo ----------------------------------------------------------------------------------------------


def _pop(m: "Machine") -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.to_mark()


def _pop_mark(m: "Machine") -> None:
    m.to_mark()


def _dup(m: "Machine") -> None:
    m.stack.append(m.stack[-1])


# MEMOIZE, BINGET and LONG_BINGET are steps of Machine.run itself.
unsigned = struct.Struct("<I").unpack_from


def _put1(m: "Machine") -> None:
    m.memo[m.data[m.at]] = m.stack[-1]
    m.at += 1


def _put4(m: "Machine") -> None:
    m.memo[unsigned(m.data, m.at)[0]] = m.stack[-1]
    m.at += 4


def _get_line(m: "Machine") -> None:
    m.stack.append(m.memo[int(m.line())])


def _put_line(m: "Machine") -> None:
    m.memo[int(m.line())] = m.stack[-1]


def _skip(width: int) -> Step:
    def step(m: "Machine") -> None:
        m.take(width)

    return step


# --- globals and objects -----------------------------------------------------------------------------------------


def _global(m: "Machine") -> None:
    module, name = m.line().decode(), m.line().decode()
    m.stack.append(m.find(module, name))


def _stack_global(m: "Machine") -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError("a global whose name is not text")
    m.stack.append(m.find(module, name))


def _call(m: "Machine") -> None:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args)


def _build(m: "Machine") -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is Record and target.state is None:
        target.state = state
    elif type(target) is OrderedDict and target.attributes is None and type(state) is dict:
        target.attributes = state
    elif type(target) is TensorEntry and target.parameter and type(state) is tuple:
        _build_parameter(target, state)
    else:
        raise TypeError(f"state is set on {printable(target)}")


def _build_parameter(target: TensorEntry, state: tuple[Any, ...]) -> None:
    """As before torch 0.4: (asks for gradients, volatile, hooks), or (tensor, gradient, hooks, asks, volatile)."""
    if len(state) == 5 and type(state[0]) is TensorEntry:
        target.dtype, target.shape, target.pieces = state[0].dtype, state[0].shape, state[0].pieces
        state = state[3], state[4], state[2]
    if len(state) != 3 or type(state[0]) is not bool:
        raise TypeError("the state of a parameter is not as torch writes it")
    target.requires_grad = state[0]


def _binpersid(m: "Machine") -> None:
    if m.persistent is None:
        raise ValueError("a reference to data outside of the pickle")
    m.stack.append(m.persistent(m.stack.pop()))


def _steps() -> tuple[Step, ...]:
    opcodes: dict[bytes, Step] = {
        b"\x80": _skip(1), b"\x95": _skip(8),
        b"N": _pushes(None), b"\x88": _pushes(True), b"\x89": _pushes(False), b")": _pushes(()),
        b"I": _int_line, b"L": _int_line, b"F": _float_line,
        b"J": _fixed("<i", 4), b"K": _byte, b"M": _fixed("<H", 2), b"G": _fixed(">d", 8),
        b"\x8a": _sized(1, _long), b"\x8b": _sized(4, _long),
        b"\x8c": _sized(1, _text), b"X": _sized(4, _text), b"\x8d": _sized(8, _text),
        b"V": lambda m: m.stack.append(m.line().decode("raw-unicode-escape")),
        b"U": _sized(1, _text), b"T": _sized(4, _text),  # text of Python 2
        b"C": _sized(1, bytes), b"B": _sized(4, bytes), b"\x8e": _sized(8, bytes), b"\x96": _sized(8, bytearray),
        b"(": _mark, b"t": _tuple, b"\x85": _tuple_of_one, b"\x86": _tuple_of(2), b"\x87": _tuple_of(3),
        b"]": lambda m: m.stack.append([]), b"l": _list, b"a": _append, b"e": lambda m: _extend(m, m.to_mark()),
        b"}": lambda m: m.stack.append({}), b"d": _dict, b"s": _setitem, b"u": lambda m: _set_pairs(m, m.to_mark()),
        b"\x8f": lambda m: m.stack.append(set()), b"\x90": _additems,
        b"0": _pop, b"1": _pop_mark, b"2": _dup,
        b"g": _get_line, b"q": _put1, b"r": _put4, b"p": _put_line,
        b"c": _global, b"\x93": _stack_global, b"R": _call, b"\x81": _call, b"b": _build, b"Q": _binpersid,
    }  # fmt: skip
    refused = {
        b"S": "STRING", b"P": "PERSID", b"i": "INST", b"o": "OBJ",
        b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4", b"\x91": "FROZENSET", b"\x92": "NEWOBJ_EX",
        b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER",
    }  # fmt: skip
    table: list[Step] = [_unknown] * 256
    for code, step in opcodes.items():
        table[code[0]] = step
    for code, name in refused.items():
        table[code[0]] = _refuse(name)
    return tuple(table)


STEPS = _steps()
