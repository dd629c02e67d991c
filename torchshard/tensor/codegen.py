"""The two functions that run at every operator, written out for each case: what can be decided before, has been.

An *entry* belongs to an operator called with so many positional arguments and such keywords. It makes the key of a
call and looks up its plan:

    def entry(self, other):
        try: plan = get((self._spec if self.__class__ is D else kind(self), ...))
        except TypeError: return uncached((self, other))
        return plan(self, other) if plan is not None else miss((self, other))

A *plan* moves what has to be moved, calls the operator on local tensors and wraps the result:

    def plan(self, other):
        return new(D, fn(self._local_tensor, move_other(other._local_tensor)), out0, False)
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

How = Literal["local", "move", "locals", "moves", "constant", "given"]

_ARGUMENT: Mapping[How, str] = {
    "local": "{n}._local_tensor",
    "move": "move_{n}({n}._local_tensor)",
    "locals": "[t._local_tensor if t.__class__ is D else t for t in {n}]",
    "moves": "move_{n}({n})",
    "constant": "constant_{n}",
    "given": "{n}",
}
_BOUND: Mapping[How, str] = {"move": "move_{n}", "moves": "move_{n}", "constant": "constant_{n}"}

_KEY = {
    "tensor": "{n}._spec if {n}.__class__ is D else {n}.__class__ if {n}.__class__ in simple else kind({n})",
    "tensors": "tuple([t._spec if t.__class__ is D else kind(t) for t in {n}]) if {n} is not None else None",
    "number": "{n}.__class__",
    "numbers": "(len({n}), frozenset(map(type, {n})))",
    "value": "(*{n},) if {n}.__class__ is list else {n}",
}
KeyPart = Literal["tensor", "tensors", "number", "numbers", "value"]


class Argument(NamedTuple):
    """One argument of a plan: its name, and how the local call gets it."""

    name: str
    how: How


def make_entry(names: Sequence[str], parts: Sequence[KeyPart], scope: Mapping[str, Any]) -> Callable[..., Any]:
    """An entry; `scope` has D, simple, kind, get, miss and uncached."""
    args = ", ".join(names)
    key = ", ".join([_KEY[part].format(n=name) for name, part in zip(names, parts, strict=True)])
    source = f"""\
def entry({args}):
    try: plan = get(({key},))
    except TypeError: return uncached(({args},))
    return plan({args}) if plan is not None else miss(({key},), ({args},))
"""
    space = {"__name__": __name__, **scope}
    exec(source, space)
    made: Callable[..., Any] = space["entry"]
    return made


@functools.lru_cache(None)
def plan_maker(arguments: tuple[Argument, ...], positional: int, result: str) -> Callable[..., Callable[..., Any]]:
    """Compile the shape of a plan.

    Args:
        arguments: of the operator, in order.
        positional: how many of them are passed by position.
        result: "tensor", "list", "raw", "none", "argument:i" (argument i itself), "tuple:101" (0: None or a number,
            as it is), or "view:i": a tensor; if the local operator refuses, `copying` is called, and `severed` told of
            argument i.

    Returns:
        A function of (fn, new, D, outs, **bound) that returns the plan; bound has what `_BOUND` names.
    """
    call = "fn(" + ", ".join([_passed(a, i < positional) for i, a in enumerate(arguments)]) + ")"
    names = [a.name for a in arguments]
    lines = _result_lines(call, names, result)
    bound = [_BOUND[a.how].format(n=a.name) for a in arguments if a.how in _BOUND]
    body = "\n        ".join(lines)
    source = f"""\
def make({", ".join(["fn", "new", "D", "outs", *bound, "copying=None", "severed=None"])}):
    {_outs(result)}
    def plan({", ".join(names)}):
        {body}
    return plan
"""
    space: dict[str, Any] = {"__name__": __name__}
    exec(source, space)
    made: Callable[..., Callable[..., Any]] = space["make"]
    return made


def _passed(argument: Argument, by_position: bool) -> str:
    code = _ARGUMENT[argument.how].format(n=argument.name)
    return code if by_position else f"{argument.name}={code}"


def _outs(result: str) -> str:
    kind, _, detail = result.partition(":")
    if kind in ("tensor", "view"):
        return "out0, = outs"
    if kind == "tuple":
        return f"{', '.join(f'out{i}' for i in range(len(detail)))}, = outs"
    return "pass"


def _result_lines(call: str, names: Sequence[str], result: str) -> list[str]:
    kind, _, detail = result.partition(":")
    if kind == "tensor":
        return [f"return new(D, {call}, out0, False)"]
    if kind == "view":
        copied = call.replace("fn(", "copying(", 1)
        return [
            f"try: return new(D, {call}, out0, False)",
            f"except RuntimeError: return severed(new(D, {copied}, out0, False), {names[int(detail)]})",
        ]
    if kind == "list":
        return [f"return [new(D, o, out, False) for o, out in zip({call}, outs)]"]
    if kind == "tuple":
        wraps = [f"new(D, o[{i}], out{i}, False)" if c == "1" else f"o[{i}]" for i, c in enumerate(detail)]
        return [f"o = {call}", f"return ({', '.join(wraps)},)"]
    if kind == "argument":
        return [call, f"return {names[int(detail)]}"]
    if kind == "none":
        return [call]
    assert kind == "raw", f"no plan ends in {result}"
    return [f"return {call}"]
