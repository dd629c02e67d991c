"""A number beside a list of tensors: made a tensor once for the list, where torch's CPU code makes one for each item.

Fifty small tensors times 0.9 take 86 us that way and 31 this way (torch 2.13), and an optimizer's step has four such
operators. The results are the same bits: the number is rounded to the dtype of the items as torch rounds it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import local_callable, overload_of
from torchshard.tensor.calls.call import Call

_DTYPES = frozenset({torch.float32, torch.float64})  # others are worked on in a wider one, and the number not rounded
_EXACT = {float: torch.float64, int: torch.int64}  # type of a number -> dtype that holds it

# Operators that take a tensor for the number, and what is passed besides so that torch takes it for one.
_WITH_A_TENSOR = {"_foreach_add": {"alpha": 1}, "_foreach_mul": {}, "_foreach_div": {}}
# Operators that take one number for all items as well as one for each.
_WITH_A_NUMBER = frozenset({"_foreach_addcmul", "_foreach_addcdiv"})


def local_function(call: Call, dtypes: frozenset[torch.dtype]) -> Callable[..., Any]:
    """What to call on lists of local tensors of these dtypes."""
    function = local_callable(call.func)
    name, _, overload = call.name.partition(".")
    if overload not in ("Scalar", "ScalarList") or call.positional != len(call.names):
        return function
    numbers = [call.values[-1]] if overload == "Scalar" else call.values[-1]
    if len(dtypes) != 1 or not dtypes <= _DTYPES or not all(type(n) in _EXACT for n in numbers):
        return function
    (dtype,) = dtypes
    kind = name.removesuffix("_")

    def given(other: str) -> Callable[..., Any]:
        return local_callable(overload_of(call.func.namespace, name, other))

    if kind in _WITH_A_TENSOR:
        of_number = _of_tensor(given("Scalar"), partial(given("Tensor"), **_WITH_A_TENSOR[kind]), dtype)
        return of_number if overload == "Scalar" else _of_equal_numbers(function, of_number)
    if kind in _WITH_A_NUMBER and overload == "ScalarList":
        return _of_equal_numbers(function, given("Scalar"))
    return function


def by_numbers_of_tensor(call: Call) -> Any:
    """Call an operator on lists with numbers instead of the plain tensor of them that it was given.

    NotImplemented where it was given none.

    Raises:
        RuntimeError: what the operator says of such a tensor that is no list of numbers for its items.
    """
    if not call.name.startswith("_foreach_") or call.names[-1] != "scalars" or call.parts[-1] != "tensor":
        return NotImplemented
    *lists, scalars = call.values
    if type(scalars) is not Tensor:
        return NotImplemented
    call.func(*[[torch.empty(0)] * len(items) for items in lists], scalars)
    name, _, _ = call.name.partition(".")
    of_list = overload_of(call.func.namespace, name, "ScalarList")
    return of_list(*lists, scalars.tolist())


def _of_tensor(of_number: Callable[..., Any], of_tensor: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def run(items: Sequence[Tensor], number: Any) -> Any:
        if items[0].__class__ is not Tensor or not items[0].is_cpu:  # traced, or on a device with code for lists
            return of_number(items, number)
        scalar = torch.scalar_tensor(number, dtype=_EXACT[type(number)], device="cpu").to(dtype)
        return of_tensor(items, scalar)

    return run


def _of_equal_numbers(each: Callable[..., Any], alike: Callable[..., Any]) -> Callable[..., Any]:
    """A function of lists and a number for each item, which calls `alike` with one where they are all the same."""

    def run(*values: Any) -> Any:
        *lists, numbers = values
        first = numbers[0] if numbers else 0
        if first and numbers.count(first) == len(numbers) == len(lists[0]):  # 0.0 equals -0.0
            return alike(*lists, first)
        return each(*values)

    return run
