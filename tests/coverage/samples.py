"""Calls of torch's operators with plain tensors, taken from torch's own operator database."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

IN_PLACE = "(in-place)"

SEED = 1234  # of each sample, as in torch's own tests

LOOKED_AT = 300  # calls of an operator among which to choose

# Operators that read the memory of an argument to learn sizes: that one stays a plain tensor.
SIZES_IN_A_TENSOR = ("tensor_split",)


@dataclass(frozen=True)
class Sample:
    """One call: `run(tensors)` puts tensors in the place of those that the database has, in order."""

    op: str
    number: int
    tensors: tuple[torch.Tensor, ...]
    run: Callable[[Any], Any]
    differentiable: bool


@functools.lru_cache(1)
def database() -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Name -> entry of torch's database, and the function to call; in-place variants, so marked, write to a copy."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = {op.formatted_name: (op, op.op) for op in op_db}
    for op in op_db:
        if op.inplace_variant is not None:
            found[op.formatted_name + IN_PLACE] = op, functools.partial(_in_place, op.inplace_variant)
    return found


def _in_place(function: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return function(x.clone(), *args, **kwargs)


def dtype_of(op: Any) -> torch.dtype | None:
    """float32, or the first other dtype that the operator knows on the CPU, if any."""
    known = op.supported_dtypes("cpu")
    order = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float64, torch.bfloat16)
    return next((d for d in (*order, *known) if d in known), None)


def samples(name: str, limit: int) -> list[Sample]:
    """Up to `limit` usable calls of an operator: those that eager torch runs, with a tensor that can be split. The first
    ones that the database has, and the one with the most dims, of those the largest.
    """
    op, function = database()[name]
    dtype = dtype_of(op)
    if dtype is None:
        return []
    grad = bool(op.supports_autograd) and (dtype.is_floating_point or dtype.is_complex)
    given = itertools.islice(_given(op, dtype, grad), LOOKED_AT)
    usable = [made for number, sample in enumerate(given) if (made := _sample(name, number, function, sample, grad))]
    if len(usable) <= limit:
        return usable
    first = usable[: limit - 1]
    return [*first, max(usable[limit - 1 :], key=_extent)]


def _given(op: Any, dtype: torch.dtype, grad: bool) -> Iterator[Any]:
    """What `op.sample_inputs` gives, without its search through the stack, 100 ms deep under pytest, for a test case."""
    torch.default_generator.manual_seed(0)  # of those that draw all samples at once
    found = iter(op.sample_inputs_func(op, "cpu", dtype, grad))
    while True:
        torch.default_generator.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        try:
            yield next(found)
        except StopIteration:
            return


def _extent(sample: Sample) -> tuple[int, int]:
    return max(t.ndim for t in sample.tensors), sum(t.numel() for t in sample.tensors)


def _sample(name: str, number: int, function: Callable[..., Any], sample: Any, grad: bool) -> Sample | None:
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if name in SIZES_IN_A_TENSOR:
        at = at[:1]
    tensors = tuple([leaves[k] for k in at])
    if name.endswith(IN_PLACE) and sample.broadcasts_input:
        return None
    if not any(t.ndim for t in tensors) or any(t.layout is not torch.strided for t in tensors):
        return None
    if sum(t.numel() for t in tensors) > 50_000:
        return None

    def run(given: Any) -> Any:
        filled = list(leaves)
        for k, t in zip(at, given, strict=True):
            filled[k] = t
        x, args, kwargs = tree_unflatten(filled, spec)
        return function(x, *args, **kwargs)

    plain = tuple([t.detach().clone().requires_grad_(t.requires_grad) for t in tensors])
    made = Sample(name, number, plain, run, grad)
    try:
        run([t.detach().clone() for t in plain])
    except Exception:
        return None
    return made
