"""Reading pickles without running them.

A pickle is a program for a small stack machine. Python's own machine imports what the program names and calls it.
This one imports nothing: the caller hands it a table of the global names it may meet, each with a plain function that
turns the arguments into inert data. Any other name ends the reading with an error that says the name. Strange
programs (recursive keys, memo slots in the billions, opcodes that no checkpoint uses) end it too.

Time and memory go with the length of the pickle: there is one step for every opcode, and nothing is allocated from a
number that the pickle merely claims.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any

from torchshard.checkpoint.pickles.inert import Global, Hashes, RefusedGlobal
from torchshard.checkpoint.pickles.opcodes import STEPS, unsigned
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError


def load(
    data: bytes,
    allowed: Mapping[str, Global],
    where: object,
    *,
    persistent: Callable[[object], object] | None = None,
    advice: Callable[[str], str | None] = lambda name: None,
    machine: "type[Machine] | None" = None,
) -> object:
    """The value of a pickle, made of plain data, Records and what `allowed` makes.

    Args:
        data: the pickle, protocols 0 to 5.
        allowed: dotted name to Global.
        where: file and field, for errors.
        persistent: what a persistent id stands for; None refuses them.
        advice: what to do about a refused name.
        machine: what reads it, by default a Machine.

    Raises:
        RefusedGlobal: a name that is not allowed.
        CheckpointError: damaged, cut off, or with an opcode that is not read.
    """
    return load_next(data, 0, allowed, where, persistent=persistent, advice=advice, machine=machine)[0]


def load_next(
    data: bytes,
    start: int,
    allowed: Mapping[str, Global],
    where: object,
    *,
    persistent: Callable[[object], object] | None = None,
    advice: Callable[[str], str | None] = lambda name: None,
    machine: "type[Machine] | None" = None,
) -> tuple[object, int]:
    """The value of the pickle that begins at `start`, and where it ends; for files of several pickles.

    Raises:
        CutOff: the data end before the pickle.
        CheckpointError: as `load` does.
    """
    reader = (machine or Machine)(data, allowed, where, persistent, advice)
    reader.at = start
    try:
        return reader.run(), reader.at
    except CheckpointError as error:
        if error.where is not None:
            raise
        parts = {"expected": error.expected, "got": error.got, "fix": error.fix}
        raise CheckpointError(error.what, **parts, where=where) from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        # The machine leaves it to Python to notice a stack that is empty or a value of the wrong type.
        cut_off = isinstance(error, _TooShort) or reader.at >= len(reader.data)
        raise _damaged(reader, f"{type(error).__name__}: {printable(str(error))}", cut_off) from error
    except struct.error as error:
        raise _damaged(reader, "it ends too early", True) from error


class CutOff(CheckpointError):
    """The data end before the pickle does."""


class _TooShort(ValueError):
    """More bytes are wanted than there are."""


def _damaged(machine: "Machine", why: str, cut_off: bool) -> CheckpointError:
    where = f"{machine.where}, byte {machine.at} of {len(machine.data)}"
    return (CutOff if cut_off else CheckpointError)("The pickle is damaged.", got=why.lstrip("_"), where=where)


class Machine:
    """The stack machine: data and position, stack, marks, memo."""

    __slots__ = (
        "advice", "allowed", "at", "budget", "data", "hashes", "marks", "memo", "persistent", "stack", "steps", "where",
    )  # fmt: skip

    def __init__(
        self,
        data: bytes,
        allowed: Mapping[str, Global],
        where: object,
        persistent: Callable[[object], object] | None,
        advice: Callable[[str], str | None],
    ) -> None:
        self.data, self.allowed, self.where, self.persistent, self.advice = data, allowed, where, persistent, advice
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        # What calls may make out of values that the pickle holds once and refers to often.
        self.budget = 8 * len(data) + 65536
        self.hashes = Hashes()
        self.steps = STEPS

    def run(self) -> object:
        """Do step after step until STOP."""
        data, memo, steps = self.data, self.memo, self.steps
        while True:
            opcode = data[self.at]
            self.at += 1
            # The first three are half of what there is to do in a large pickle: no calls.
            if opcode == 0x94:  # MEMOIZE
                memo[len(memo)] = self.stack[-1]
            elif opcode == 0x68:  # BINGET
                self.stack.append(memo[data[self.at]])
                self.at += 1
            elif opcode == 0x6A:  # LONG_BINGET
                self.stack.append(memo[unsigned(data, self.at)[0]])
                self.at += 4
            elif opcode == 0x2E:  # STOP
                return self.stack.pop()
            else:
                steps[opcode](self)

    def take(self, length: int) -> bytes:
        """The next bytes of the pickle."""
        start, self.at = self.at, self.at + length
        if length < 0 or self.at > len(self.data):
            self.at = start
            raise _TooShort(f"{length} bytes are wanted where {len(self.data) - start} are left")
        return self.data[start : self.at]

    def line(self) -> bytes:
        """The bytes up to the next newline."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise _TooShort("a line does not end")
        start, self.at = self.at, end + 1
        return self.data[start:end]

    def to_mark(self) -> list[Any]:
        """What was pushed since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def find(self, module: str, name: str) -> Global:
        """What a global name stands for, or RefusedGlobal."""
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        dotted = f"{module}.{name}"
        found = self.allowed.get(dotted)
        if found is None:
            raise RefusedGlobal(dotted, self.where, self.advice(dotted))
        return found

    def call(self, function: object, args: object) -> object:
        """The inert value of a call."""
        if type(function) is not Global or function.make is None:
            raise TypeError(f"{printable(function)} is called")
        if type(args) is not tuple:
            raise TypeError("a call without a tuple of arguments")
        for arg in args:
            if isinstance(arg, (str, bytes, list, dict)):
                self.budget -= len(arg)
        if self.budget < 0:
            raise ValueError("it makes far more data than it holds")
        return function.make(*args)
