"""Where the terms of a sum may be worked on instead of the sum: what dtypes and numbers of a call have to do with it.

An operator that is linear is so for finite numbers: inf times the terms 1 and -2 is nan, inf times their sum is -inf.
So a plan for terms asks at each call what the numbers are; where they are not finite, the sum is made first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import is_known, is_traced
from torchshard.layout.placements import Partial
from torchshard.rules.rule import Options
from torchshard.rules.terms import is_whole_number, narrowed
from torchshard.tensor.calls.call import Call, Operand, run_on_meta
from torchshard.tensor.dtensor import DTensor

Numbers = Callable[[Sequence[Any]], bool]
Plan = Callable[..., Any]


def dtypes_of_terms(operands: Sequence[Operand]) -> dict[int, torch.dtype]:
    """Number of each operand that holds terms of a sum or an average -> its dtype."""
    return {
        k: o.layout.dtype
        for k, o in enumerate(operands)
        if any(isinstance(p, Partial) and p.op in ("sum", "avg") for p in o.layout.placements)
    }


def for_call(call: Call, options: Options, operands: Sequence[Operand]) -> Options:
    """The options of a rule, less what is not linear for the dtypes and numbers of a call."""
    terms = dtypes_of_terms(operands)
    if not terms or not any(k in terms for group in options.linear for k in group):
        return options
    if not finite_numbers(call, terms.values(), options.per)(call.values):
        return replace(options, linear=())
    if _stays(call, operands):
        return options
    try:
        made = run_on_meta(call)
    except (RuntimeError, AssertionError, LookupError):  # cannot be asked, or refuses, as it will in what follows
        return replace(options, linear=()) if any(map(is_whole_number, terms.values())) else options
    return narrowed(options, terms, [t.dtype for t in tensors_of(made)])


def _stays(call: Call, operands: Sequence[Operand]) -> bool:
    """Whether operands share a dtype, not of whole numbers, and no other one is asked for."""
    dtypes = {o.layout.dtype for o in operands if not o.fixed}
    return len(dtypes) == 1 and not any(map(is_whole_number, dtypes)) and not any(map(_is_dtype, call.values))


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def tensors_of(made: Any) -> list[Tensor]:
    """The tensors that an operator gives."""
    return [t for t in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(t, Tensor)]


def for_values(call: Call, options: Options, tensors: Sequence[Tensor], results: Iterable[Tensor | None]) -> Options:
    """The same for plain tensors, each of which may be cut into terms, with what the operator gives for them.

    Terms of other than whole numbers stay: that their sum is not converted is for a proof to find.
    """
    if not finite_numbers(call, [t.dtype for t in tensors], options.per)(call.values):
        return replace(options, linear=())
    terms = {k: t.dtype for k, t in enumerate(tensors) if is_whole_number(t.dtype)}
    return narrowed(options, terms, [t.dtype for t in results if t is not None])


def finite_numbers(call: Call, dtypes: Iterable[torch.dtype], per: Sequence[str]) -> Numbers:
    """A function of the values of a call: whether its numbers are finite in these dtypes, and no divisor is zero."""
    limits = [torch.finfo(torch.float64 if is_whole_number(dtype) else dtype) for dtype in dtypes]
    largest, smallest = min([i.max for i in limits]), max([i.tiny for i in limits])
    asked = [(at, smallest if name in per else 0.0) for at, name in enumerate(call.names) if _is_number(call, at)]

    def fits(x: Any, least: float) -> bool:
        if isinstance(x, (list, tuple)):
            return all(fits(item, least) for item in x)
        if isinstance(x, Tensor):
            known = not x.ndim and x.device.type == "cpu" and not is_traced(x)
            return not known or fits(x.item(), least)
        return x is None or _is_between(least, abs(x), largest)

    def finite(values: Sequence[Any]) -> bool:
        for at, least in asked:
            x = values[at]
            if not (least <= abs(x) <= largest if x.__class__ is float else fits(x, least)):
                return False
        return True

    return finite


def _is_between(least: float, size: Any, largest: float) -> bool:
    """Whether that is known: of what `item()` gives in a region, a graph knows nothing."""
    return is_known(least <= size) and is_known(size <= largest)


def by_numbers(
    call: Call,
    options: Options,
    operands: Sequence[Operand],
    make: Callable[[Call, Sequence[Operand]], tuple[Any, Plan | None]],
) -> tuple[Any, Plan | None]:
    """A call run for the first time by `make`, with a plan that makes another one for numbers of the other kind."""
    terms = dtypes_of_terms(operands)
    if not terms or not options.linear or not any(_is_number(call, at) for at in range(len(call.names))):
        return make(call, operands)
    finite = finite_numbers(call, terms.values(), options.per)
    plans: dict[bool, Plan] = {}
    kind_of_call = call.without_values()

    def run(*values: Any) -> Any:
        kind = finite(values)
        plan = plans.get(kind)
        if plan is not None:
            return plan(*values)
        result, plan = make(kind_of_call.given(values), operands)
        if plan is not None:
            plans[kind] = plan
        return result

    result = run(*call.values)
    return result, run if plans else None


def _is_number(call: Call, at: int) -> bool:
    """Whether an argument is a number, some numbers, or a scalar that came as a plain tensor."""
    part, value = call.parts[at], call.values[at]
    return part in ("number", "numbers") or (part == "tensor" and value is not None and type(value) is not DTensor)


_LINEAR_IN_LISTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("mul", "div", "neg", "zero"), (0,)),
    **dict.fromkeys(("add.List", "sub.List", "lerp.Scalar"), (0, 1)),
}


def of_lists(name: str) -> Options:
    """What is true of an operator on lists of tensors: some are linear in the first list, while all else is whole, and
    some in two lists together.
    """
    kind, _, overload = name.removeprefix("_foreach_").partition(".")
    kind = kind.removesuffix("_")
    lists = _LINEAR_IN_LISTS.get(kind) or _LINEAR_IN_LISTS.get(f"{kind}.{overload}")
    per = ("scalar", "scalars", "other", "tensor") if kind == "div" else ()
    return Options(linear=(lists,) if lists and name.startswith("_foreach_") else (), per=per)
