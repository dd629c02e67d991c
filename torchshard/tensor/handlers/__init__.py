"""The few operators that a row of notation cannot tell: they communicate inside, or must be refused."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchshard.unsupported import unsupported

if TYPE_CHECKING:
    from torchshard.tensor.calls.call import Call
    from torchshard.tensor.handlers.parts import ForKind

# Read one value or compare: gathering is what they are for, and nobody need be told.
QUIET = frozenset({
    "_local_scalar_dense.default", "equal.default", "_linalg_check_errors.default",
    "_assert_async.default", "_assert_async.msg",
})  # fmt: skip

# Asked of all gradients of a model, whose tensors may live on several meshes.
SEVERAL_MESHES = frozenset({
    "_foreach_norm.Scalar", "_foreach_max.default", "_foreach_powsum.Scalar", "stack.default",
    "_amp_foreach_non_finite_check_and_unscale_.default",
})  # fmt: skip

# Their meaning lies in the memory of one tensor, which a sharded one does not have.
_OF_MEMORY = frozenset({"as_strided_.default", "as_strided_scatter.default", "set_.source_Tensor", "resize_.default"})

# Wrappers of torch's call these on parameters, which they take for plain tensors.
_OF_WRAPPERS = {
    "fsdp": ("fully_shard", "torchshard.parallel.fsdp.fully_shard"),
    "c10d": (
        "DistributedDataParallel and distributed.checkpoint.state_dict",
        "torchshard.DistributedDataParallel(module, device_mesh=...)",
    ),
}


_ROOMS = (
    *("amp", "attention", "batch_norm", "convolution", "ctc", "embedding", "extremes", "forward_ad", "gather"),
    *("gpu_kernels", "indexed", "joining", "layer_norm", "linalg", "norms", "numbers", "packing", "pooling"),
    *("random", "recurrent", "slicing", "softmax", "split_classes", "statistics", "views"),
)


def find(name: str) -> "Callable[..., Any] | ForKind | None":
    """The handler of an operator: a function of the operator and its arguments, which may return NotImplemented; or
    what gives one for all calls of a kind.
    """
    return _handlers().get(name)


@functools.cache
def _handlers() -> "Mapping[str, Callable[..., Any] | ForKind]":
    rooms = [importlib.import_module(f"{__name__}.{room}") for room in _ROOMS]
    return {name: handler for room in rooms for name, handler in room.HANDLERS.items()}


def refuse_wrappers(call: "Call") -> None:
    """Raise UnsupportedOperatorError for operators on the memory of parameters, by which wrappers of torch's work."""
    for namespace, (theirs, ours) in _OF_WRAPPERS.items():
        if namespace in call.func.namespace:
            raise unsupported(
                f"{call.name} works on the memory of a tensor, which a DTensor spreads over ranks.",
                expected=f"plain tensors, in torch's {theirs} and elsewhere",
                got="a torchshard.DTensor, as plans make of parameters",
                fix=f"for a module {ours} in place of torch's, and for torch's functions of state dicts"
                " torchshard.parallel.fsdp.torch_parameters(module) before; for a tensor x.to_local() or"
                " x.full_tensor(), between stages of a pipeline x.to_torch() and DTensor.from_torch(x)",
            )


def refuse_ungatherable(call: "Call") -> None:
    """Raise UnsupportedOperatorError for operators that would go wrong on gathered operands."""
    if call.name in _OF_MEMORY:
        raise unsupported(
            f"{call.name} works on the memory of a tensor, which a DTensor spreads over ranks.",
            expected="an operator on values",
            fix="use it on x.to_local(), or on x.full_tensor()",
        )
    if torch.Tag.inplace_view in call.func.tags:
        raise unsupported(
            f"{call.name} would change the shape of a DTensor in place.",
            expected="an operator that returns its result",
            fix=f"use the variant without the underscore: {call.name.split('.')[0].rstrip('_')}",
        )
