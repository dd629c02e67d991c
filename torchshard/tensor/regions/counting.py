"""Versions of parts: a compiled region keeps parts for its backward, of which autograd asks what it asks of tensors.

Operators run on parts below autograd, which counts what is written to a DTensor, not to its part. So once a region has
been traced, parts count too: a step between a forward and its backward is noticed, as eager torch notices it. A view's
part has a version of its own, so what is counted is the part of the tensor that it is a view of, too. (`x.detach()` is
no view to autograd: what is written by way of that stays unnoticed.)
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from torchshard._torch import base_of, mend_graphs

_Plan = Callable[..., Any]

_forgetting: list[Callable[[], None]] = []
_kind: Any = None  # of tensors whose parts count


def traced(kind: type) -> None:
    """A region is traced with tensors of this class: torch is told of them, and their parts count from now on."""
    global _kind
    mend_graphs()
    if _kind is None:
        _kind = kind
        for forget in _forgetting:
            forget()


def on_first_trace(forget: Callable[[], None]) -> None:
    """Have this called when parts begin to count: plans that were kept do not count them."""
    _forgetting.append(forget)


def counting(plan: _Plan | None, written: Sequence[int]) -> _Plan | None:
    """The plan of an operator that counts the parts of these arguments, where it has to; or the plan."""
    if plan is None or not written or _kind is None:
        return plan
    run, kind, only = plan, _kind, written[0]

    def counted(*values: Any) -> Any:
        result = run(*values)
        count_parts(values, written)
        return result

    def counted_one(*values: Any) -> Any:  # the same of a tensor that is no view, without lists
        result = run(*values)
        x = values[only]
        if x.__class__ is kind and base_of(x) is None and x._local_tensor.__class__ is Tensor:
            increment_version(x._local_tensor)
        else:
            count_parts(values, written)
        return result

    return counted_one if len(written) == 1 else counted


def count_parts(values: Sequence[Any], written: Sequence[int]) -> None:
    """Move on the versions of the parts of these arguments, and of what they are views of.

    Traced ones have none to count, and inference tensors, which torch passes over.
    """
    if _kind is None:
        return
    for at in written:
        value = values[at]
        given: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        found: list[Any] = [x for x in given if x.__class__ is _kind]
        found += [base for x in found if (base := base_of(x)).__class__ is _kind]
        increment_version([part for x in found if (part := x._local_tensor).__class__ is Tensor])
