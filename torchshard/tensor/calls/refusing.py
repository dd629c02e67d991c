"""Operators that refuse dtypes refuse them on every rank, also where a rank holds nothing of an operand.

A kernel that has nothing to compute often asks for no dtype: softmax of integers raises where there are some, and gives
an empty tensor elsewhere. Nor does it mind that elements which it would write to lie on one another (of an expanded
tensor). Meta tensors do not tell either, as kernels refuse and not schemas. So a rank with an empty
piece asks on zeros in the shapes of the first rank's pieces, which is never the one that lacks something. That happens
in the first run of a plan; nobody is asked, and nothing is sent.

What a kernel refuses on parts it says of their sizes, which are others on each rank; on the whole tensors, meta ones,
the same is said of theirs.

Where an operand overlaps what is written to, kernels ask for the strides of both, which are not the same on all ranks:
none of them refuses, each rank that would reads first and then writes.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import is_traced, refuses_kind, refuses_overlap
from torchshard.rules.rule import Made
from torchshard.tensor.calls.call import Call, Operand, run_on_meta
from torchshard.tensor.dtensor import dtensors_in
from torchshard.tensor.layout import TensorLayout, dense_stride


def refusing(
    call: Call, operands: Sequence[Operand], made: Made, targets: Sequence[TensorLayout], function: Callable[..., Any]
) -> Callable[..., Any]:
    """`function`, which is the operator on local tensors, raising here what it raises where no piece is empty."""
    shapes = [t.sharding.part(t.shape, [0] * t.mesh.ndim) for t in targets]
    empty = any(0 in t.local_shape and 0 not in shape for t, shape in zip(targets, shapes, strict=True))
    drawn = torch.Tag.nondeterministic_seeded in call.func.tags
    if not empty or drawn or call.func.namespace != "aten" or made.local_size is not None:
        return function
    if any(is_traced(_local(call, o)) for o in operands if not o.fixed):
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        values = [list(v) if isinstance(v, (list, tuple)) else v for v in call.values]
        for o, target, shape in zip(operands, targets, shapes, strict=True):
            if not o.fixed:
                stand_in = _stand_in(call, o, target, shape)
                if o.item is None:
                    values[o.at] = stand_in
                else:
                    values[o.at][o.item] = stand_in
        positional, named = call.with_values(values)
        try:
            function(*positional, **named)
        except (RuntimeError, IndexError, ValueError) as error:
            if refuses_kind(error):  # else it is zeros that are refused
                raise
        return function(*args, **kwargs)

    return run


def telling_whole(call: Call, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which is the operator on local tensors, with the lengths of whole tensors in what it raises."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            if (whole := _said_of_whole(call, error)) is not None:
                raise whole from error
            raise

    return run


def _said_of_whole(call: Call, error: Exception) -> Exception | None:
    """What eager torch raises in the place of an error; None where it says something else."""
    if any(is_traced(x._local_tensor) for x in dtensors_in(call.values)):
        return None
    try:
        run_on_meta(call)
    except (RuntimeError, IndexError, ValueError) as whole:
        if type(whole) is type(error) and _words(whole) == _words(error):
            return whole
    return None


def _words(error: Exception) -> str:
    return re.sub(r"torch\.Size|[^A-Za-z]", "", str(error))  # meta kernels write sizes in another way


def reading_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that writes to its `out`, or else to its first argument; on copies of the others, where it refuses
    that they overlap it.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if not refuses_overlap(error):
                raise
        read = 0 if "out" in kwargs else 1
        named = {name: value if name == "out" else _copied(value) for name, value in kwargs.items()}
        return function(*args[:read], *map(_copied, args[read:]), **named)

    return run


def _copied(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


def _local(call: Call, o: Operand) -> Any:
    x = call.values[o.at] if o.item is None else call.values[o.at][o.item]
    return x._local_tensor


def _stand_in(call: Call, o: Operand, target: TensorLayout, shape: Sequence[int]) -> Tensor:
    """Zeros, which every index may be; ones where rows are counted from one."""
    apart = [n if stride or n == 1 else 1 for n, stride in zip(shape, target.stride, strict=True)]
    x = torch.empty_strided(
        apart, dense_stride(apart, target.stride), dtype=target.dtype, device=_local(call, o).device
    )
    filled = x.fill_(1) if "pivots" in call.names[o.at] else x.zero_()  # zeros there are of every dtype
    return filled.expand(tuple(shape))
