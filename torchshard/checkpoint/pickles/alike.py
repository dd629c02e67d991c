"""Objects of a pickle that are spelled alike, byte for byte: the first is read, and stands for the others too.

The metadata of a checkpoint describe thousands of tensors of a few shapes. What a description is follows from its bytes
alone, as these refer to what came before by numbers, and a number is given once, the next after the last. (A pickle may
give them otherwise; where one does, nothing more is taken for alike.)
"""

from collections.abc import Sequence
from typing import Any

from torchshard.checkpoint.pickles.inert import Global, Record
from torchshard.checkpoint.pickles.opcodes import STEPS, Step
from torchshard.checkpoint.pickles.unpickle import Machine

_OBJECT = b"\x81}"  # after ")": a new object, and an empty dict for its attributes
_REMEMBERED = b"\x81\x94}"  # the same, and the object is given a number
_TRIES = 64  # objects of a class of which none was like another, after which no more are compared
_LENGTHS = 8  # of objects of a class that are compared
_KEPT = 16  # what it costs to keep a byte, where it costs 1 to compare one in vain


class _Class:
    """Objects of one class: by their bytes, from the arguments of the constructor on, with what was remembered."""

    __slots__ = ("found", "lengths", "tries")

    def __init__(self) -> None:
        self.found: dict[bytes, tuple[Record, Sequence[Any]]] = {}
        self.lengths: list[int] = []
        self.tries = _TRIES

    def add(self, spelled: bytes, made: Record, remembered: Sequence[Any]) -> None:
        """One more, that is like none before."""
        self.found[spelled] = made, remembered
        if len(spelled) not in self.lengths:
            self.lengths = [len(spelled), *self.lengths[: _LENGTHS - 1]]


class AlikeMachine(Machine):
    """A machine that gives one Record for all objects that are spelled alike: for values that nobody changes.

    What it compares in vain, and keeps, goes with the length of the pickle: objects may lie in one another.
    """

    __slots__ = ("begun", "classes", "in_order", "room")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps = _STEPS
        self.classes: dict[Global, _Class] = {}
        # By id: the object itself, its class, its first byte, how much was remembered before.
        self.begun: dict[int, tuple[Record, _Class, int, int]] = {}
        self.room = _KEPT * len(self.data)
        self.in_order = True  # whether numbers were given one after another


def _arguments(m: Any) -> None:
    """No arguments: if an object is made next, the one that was spelled like it; else it is begun."""
    stack, memo, start = m.stack, m.memo, m.at
    made = stack[-1] if stack else None
    remember = m.data[start : start + 3] == _REMEMBERED
    if type(made) is not Global or not (remember or m.data[start : start + 2] == _OBJECT):
        stack.append(())
        return
    its = m.classes.get(made)
    if its is None:
        its = m.classes[made] = _Class()
    compare = m.in_order and its.tries > 0 and m.room > 0
    for length in its.lengths if compare else ():
        found = its.found.get(m.data[start : start + length])
        if found is not None:
            stack[-1], remembered = found
            memo.update(enumerate(remembered, len(memo)))
            m.at = start + length
            its.tries = _TRIES
            return
    stack[-1] = made = m.call(made, ())
    if compare:
        its.tries -= 1
        m.room -= sum(its.lengths)
        m.begun[id(made)] = made, its, start, len(memo)
    if remember:
        memo[len(memo)] = made
    stack.append({})
    m.at = start + (3 if remember else 2)


def _build(m: Any) -> None:
    """An object gets its attributes, and is complete."""
    STEPS[_BUILD](m)
    made = m.stack[-1]
    begun = m.begun.pop(id(made), None)
    if begun is not None:
        _, its, start, before = begun
        m.room -= _KEPT * (m.at - start)
    if begun is not None and m.room > 0:
        its.add(m.data[start : m.at], made, [m.memo[i] for i in range(before, len(m.memo))])


def _put(step: Step) -> Step:
    def put(m: Any) -> None:
        number = len(m.memo)
        step(m)
        m.in_order = m.in_order and len(m.memo) == number + 1 and number in m.memo
        m.begun.clear()  # what is given a number by name is spelled so once

    return put


_BUILD = ord("b")
_OTHERS = {ord(")"): _arguments, _BUILD: _build} | {code: _put(STEPS[code]) for code in b"qrp"}
_STEPS: tuple[Step, ...] = tuple([_OTHERS.get(code, step) for code, step in enumerate(STEPS)])
