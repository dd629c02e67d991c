"""The two functions that run at every operator, written out for each case: what can be decided before, has been.

An *entry* belongs to an operator called with so many positional arguments and such keywords. It makes the key of a
call and looks up its plan:

    def entry(self, other):
        try: __plan = __get((self._spec if self.__class__ is __D else __kind(self), ...))
        except TypeError: return __uncached((self, other))
        return __plan(self, other) if __plan is not None else __miss((self, other))

torch calls the first entry of an operator itself, as a function of what `__torch_dispatch__` is given (`direct`).

A *plan* moves what has to be moved, calls the operator on local tensors and wraps the result:

    def plan(self, other):
        return __new(__D, __fn(self._local_tensor, __move_other(other)), __out0, False)

What is no argument begins with two underscores: an operator of a user's may have arguments of any name, D or fn.
"""

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from operator import is_
from typing import Any, Literal, NamedTuple

How = Literal["local", "move", "locals", "moves", "constant", "given"]

_ARGUMENT: Mapping[How, str] = {
    "local": "{n}._local_tensor",
    "move": "__move_{n}({n})",
    "locals": "[__t._local_tensor if __t.__class__ is __D else __t for __t in {n}]",
    "moves": "__move_{n}({n})",
    "constant": "__constant_{n}",
    "given": "{n}",
}
_BOUND: Mapping[How, str] = {"move": "move_{n}", "moves": "move_{n}", "constant": "constant_{n}"}

_TENSOR = "{n}._spec if {n}.__class__ is __D else {n}.__class__ if {n}.__class__ in __simple else __kind({n})"
_KEY = {
    "tensor": _TENSOR,
    "tensors": "(*[" + _TENSOR.replace("{n}", "__t") + " for __t in {n}],) if {n} is not None else None",
    "number": "{n}.__class__",
    "numbers": "(__len({n}), __frozenset(__map(__type, {n})))",
    # 2, 2.0 and True are equal
    "number read": "({n}.__class__, {n}) if {n}.__class__ in __simple else __read({n})",
    "numbers read": "(*__map(__read, {n}),)",
    "value": "(*{n},) if {n}.__class__ is __list else {n}",
}
KeyPart = Literal["tensor", "tensors", "number", "numbers", "number read", "numbers read", "value"]


class Argument(NamedTuple):
    """One argument of a plan: its name, how the local call gets it, and an argument before it that is moved alike.

    Where the same tensors are given for both, as in `x * x`, what was moved is taken for both.
    """

    name: str
    how: How
    alike: str | None = None


def noting_alike(arguments: Sequence[Argument], moves: Mapping[str, Hashable]) -> tuple[Argument, ...]:
    """The arguments, with those found that are moved as one before them; `moves` says how each is, by name."""
    first: dict[Hashable, str] = {}
    found = []
    for a in arguments:
        moved = (a.how, moves[a.name]) if a.how in ("move", "moves") and a.name in moves else None
        found.append(a._replace(alike=first.get(moved)) if moved else a)
        if moved:
            first.setdefault(moved, a.name)
    return tuple(found)


def make_entry(
    names: Sequence[str], parts: Sequence[KeyPart], scope: Mapping[str, Any], direct: bool = False
) -> Callable[..., Any]:
    """An entry.

    Args:
        names: of the arguments.
        parts: what each contributes to the key.
        scope: D, simple, kind, read, get, miss and uncached.
        direct: as a function that torch calls in place of `__torch_dispatch__`.
    """
    args = "".join([f"{name}, " for name in names])
    key = ", ".join([_KEY[part].format(n=name) for name, part in zip(names, parts, strict=True)])
    head = f"def entry({args}):"
    if direct:
        head = f"""\
def entry(__class, __func, __types, __args=(), __kwargs=None):
    if __kwargs or __len(__args) != {len(names)}: return __D.__torch_dispatch__(__func, __types, __args, __kwargs)
    ({args}) = __args"""
    source = f"""\
{head}
    try: __plan = __get(({key},))
    except TypeError: return __uncached(({args}))
    return __plan({args}) if __plan is not None else __miss(({key},), ({args}))
"""
    made: Callable[..., Any] = _compiled(source, scope)["entry"]
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
    again = {a.alike for a in arguments if a.alike}
    call = "__fn(" + ", ".join([_passed(a, i < positional, again) for i, a in enumerate(arguments)]) + ")"
    names = [a.name for a in arguments]
    lines = [f"__moved_{a.name} = {_ARGUMENT[a.how].format(n=a.name)}" for a in arguments if a.name in again]
    lines += _result_lines(call, names, result)
    bound = [_BOUND[a.how].format(n=a.name) for a in arguments if a.how in _BOUND]
    body = "\n        ".join(lines)
    source = f"""\
def make(__fn, __new, __D, __outs, *, __copying=None, __severed=None{"".join(f", __{name}" for name in bound)}):
    {_outs(result)}
    def plan({", ".join(names)}):
        {body}
    return plan
"""
    make: Callable[..., Callable[..., Any]] = _compiled(source, {"same": _same})["make"]
    return lambda *known, **bound: make(*known, **{f"__{name}": value for name, value in bound.items()})


def _compiled(source: str, scope: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the source defines; it calls what is in scope, and functions of Python, by two underscores more."""
    known = {f.__name__: f for f in (frozenset, len, list, map, type, zip)}
    space = {"__name__": __name__, **{f"__{name}": value for name, value in {**known, **scope}.items()}}
    exec(source, space)
    return space


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


def _passed(argument: Argument, by_position: bool, again: Collection[str]) -> str:
    """How an argument is passed; `again` are those that were moved before, for one after them as well."""
    code = _ARGUMENT[argument.how].format(n=argument.name)
    if argument.name in again:
        code = f"__moved_{argument.name}"
    elif argument.alike:
        same = "{n} is {m}" if argument.how == "move" else "__same({n}, {m})"
        code = f"__moved_{{m}} if {same} else {code}".format(n=argument.name, m=argument.alike)
    return code if by_position else f"{argument.name}={code}"


def _outs(result: str) -> str:
    kind, _, detail = result.partition(":")
    if kind in ("tensor", "view"):
        return "__out0, = __outs"
    if kind == "tuple":
        return f"{', '.join(f'__out{i}' for i in range(len(detail)))}, = __outs"
    return "pass"


def _result_lines(call: str, names: Sequence[str], result: str) -> list[str]:
    kind, _, detail = result.partition(":")
    if kind == "tensor":
        return [f"return __new(__D, {call}, __out0, False)"]
    if kind == "view":
        copied = call.replace("__fn(", "__copying(", 1)
        return [
            f"try: return __new(__D, {call}, __out0, False)",
            "except (RuntimeError, ValueError): "
            f"return __severed(__new(__D, {copied}, __out0, False), {names[int(detail)]})",
        ]
    if kind == "list":
        return [f"return [__new(__D, __o, __out, False) for __o, __out in __zip({call}, __outs)]"]
    if kind == "tuple":
        wraps = [f"__new(__D, __o[{i}], __out{i}, False)" if c == "1" else f"__o[{i}]" for i, c in enumerate(detail)]
        return [f"__o = {call}", f"return ({', '.join(wraps)},)"]
    if kind == "argument":
        return [call, f"return {names[int(detail)]}"]
    if kind == "none":
        return [call]
    assert kind == "raw", f"no plan ends in {result}"
    return [f"return {call}"]
