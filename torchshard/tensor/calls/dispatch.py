"""From an operator call to its plan: one entry for each way an operator is called, one cached plan for each layout.

The hot path is generated, see codegen.py; here is what runs when something is met for the first time.
"""

import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import called_directly, schema
from torchshard.tensor.calls.call import Call, operator_name, rule_of
from torchshard.tensor.calls.codegen import KeyPart, make_entry
from torchshard.tensor.calls.plan import make_plan
from torchshard.tensor.dtensor import ENTRIES, DTensor
from torchshard.tensor.gradients.other_kind import expect_plain
from torchshard.tensor.regions.counting import count_parts, counting, on_first_trace
from torchshard.unsupported import unsupported

MAX_PLANS = 4096  # kept an entry; when full, all are dropped (plans are cheap to make again)

_SIMPLE = frozenset({float, int, bool, complex, type(None)})
_plan_tables: list[dict[Any, Callable[..., Any]]] = []
_direct: list[Callable[[], None]] = []  # what takes each function that torch calls directly from it again


def forget_plans() -> None:
    """Drop every cached plan."""
    for plans in _plan_tables:
        plans.clear()


def add_entry(func: Any, count: int, keywords: tuple[str, ...]) -> Callable[..., Any]:
    """Make and keep the entry of an operator called with `count` positional arguments and these keywords."""
    name = operator_name(func)
    names, parts = _arguments(func, count, keywords)

    def call(values: tuple[Any, ...]) -> Call:
        return Call(func, name, names, count, parts, values)

    scope = _scope(parts, call)
    entry = make_entry(names, parts, scope)
    if not keywords:  # the first of them stays
        _direct.append(called_directly(func, DTensor, make_entry(names, parts, scope, direct=True)))
    if any(keyword.iskeyword(k) for k in keywords):
        plain, entry = entry, lambda *a, **k: plain(*a, *[k[word] for word in keywords])
    ENTRIES.setdefault(id(func), {})[count if not keywords else (count, *keywords)] = entry
    return entry


def call_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """One call of an operator, for those who make its plan themselves."""
    name = operator_name(func)
    names, parts = _arguments(func, len(args), tuple(kwargs))
    return Call(func, name, names, len(args), parts, (*args, *kwargs.values()))


def _arguments(func: Any, count: int, keywords: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[KeyPart, ...]]:
    """Name of each argument that is passed, and what it contributes to the key of a plan."""
    arguments = schema(func).arguments
    by_name = {a.name: a for a in arguments}
    chosen = [*arguments[:count], *[by_name[k] for k in keywords]]
    rule = rule_of(func)
    reads = rule.options.reads if rule else ()
    names = tuple([a.name + "_" if keyword.iskeyword(a.name) else a.name for a in chosen])
    return names, tuple([_key_part(str(a.type), a.name in reads) for a in chosen])


def _key_part(kind: str, by_value: bool) -> KeyPart:
    if "Tensor" in kind:
        return "tensors" if "List[" in kind else "tensor"
    if "number" in kind or "float" in kind:
        if by_value:
            return "numbers read" if "List[" in kind else "number read"
        return "numbers" if "List[" in kind else "number"
    return "value"


def _scope(parts: Sequence[KeyPart], call: Callable[[tuple[Any, ...]], Call]) -> Mapping[str, Any]:
    """What an entry finds, and keeps: its plans."""
    plans: dict[Any, Callable[..., Any]] = {}
    _plan_tables.append(plans)

    def make(values: tuple[Any, ...]) -> tuple[Any, Callable[..., Any] | None]:
        made = call(values)
        result, plan = make_plan(made)
        count_parts(values, made.written())
        return result, counting(plan, made.written())

    def miss(key: Any, values: tuple[Any, ...]) -> Any:
        result, plan = make(values)
        if plan is not None:
            if len(plans) >= MAX_PLANS:
                plans.clear()
            plans[key] = plan
        return result

    read = [at for at, part in enumerate(parts) if part in ("number read", "numbers read")]

    def uncached(values: tuple[Any, ...]) -> Any:
        known = list(values)
        for at in read:
            known[at] = _known(known[at])
        return make(tuple(known))[0]

    return {
        "D": DTensor, "simple": _SIMPLE, "kind": _kind, "read": _read,
        "get": plans.get, "miss": miss, "uncached": uncached,
    }  # fmt: skip


def _read(x: Any) -> Any:
    """What the key of a call holds for a number that a rule reads.

    Raises:
        TypeError: the number is a symbol, which a graph would have to know to compare it.
    """
    if isinstance(x, torch.SymFloat):
        raise TypeError("a symbolic number is no part of a key")
    return x.__class__, x


def _known(x: Any) -> Any:
    """A number that a rule reads, or some; a symbol as what it is in this run, for which alone the graph then is."""
    if isinstance(x, (list, tuple)):
        return [_known(item) for item in x]
    return float(x) if isinstance(x, torch.SymFloat) else x


def _kind(x: Any) -> Any:
    """What the key of a call holds for something that is no DTensor where a tensor could be."""
    if isinstance(x, DTensor):
        raise unsupported(
            "A subclass of DTensor cannot be used in operators.", expected="a DTensor itself", got=type(x).__name__
        )
    if not isinstance(x, Tensor):
        return type(x)
    expect_plain(x)
    return "plain", x.dtype, x.ndim == 0


on_first_trace(forget_plans)


def clear_entries() -> None:
    """Forget entries too: a rule may have changed."""
    forget_plans()
    _plan_tables.clear()
    ENTRIES.clear()
    while _direct:
        _direct.pop()()
