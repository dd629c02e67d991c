"""Plain tensors beside DTensors: refused, as nobody knows what they are elsewhere, or taken for the same on every rank.

They are the same where the user says so, where they have one element, also if expanded, or none, and where autograd's
formulas make them, or modules of torch's that are given DTensors alone.
"""

import inspect
from types import FrameType
from typing import Any

import torch
import torch.distributed.tensor as upstream
from torch import SymInt, Tensor

from torchshard._torch import in_backward, in_forward_ad, is_missing_tangent, is_traced, tensors_of_call
from torchshard.errors import UnsupportedOperatorError
from torchshard.layout.layout import Mesh
from torchshard.tensor.calls.call import Call
from torchshard.tensor.dtensor import DTensor, dtensors_in, wrap
from torchshard.tensor.layout import layout_for
from torchshard.tensor.modes import replicates_plain_tensors, say_taken_alike
from torchshard.unsupported import unsupported

WITHOUT_TANGENTS = (
    "put torchshard.implicit_replication() around the calls of the region; other plain tensors beside DTensors must"
    " then be the same on every rank"
)
"""What to do where forward AD makes plain zeros in a region."""


def refuse_plain(where: str, argument: str, x: Tensor, written: bool = False) -> UnsupportedOperatorError:
    """The error for an argument that is no DTensor; `written`: the operator writes to it."""
    kind = Tensor if is_traced(x) and not isinstance(x, upstream.DTensor) else type(x)
    plain = kind in (Tensor, torch.nn.Parameter)
    what = (
        "plain torch.Tensor among DTensors"
        if plain
        else f"{kind.__module__}.{kind.__qualname__}, which is another class"
    )
    if plain and is_traced(x) and in_forward_ad():
        return unsupported(
            f"{where}: the argument {argument!r} is a {what}. Forward AD makes zeros for operands without a tangent,"
            " which a graph cannot tell from other plain tensors.",
            expected="DTensors only, or scalars",
            got=f"{kind.__name__} of shape {tuple(x.shape)}",
            fix=WITHOUT_TANGENTS,
        )
    copied = where.startswith("copy_.")
    if isinstance(x, upstream.DTensor):
        fix = "DTensor.from_torch(it), which shares its memory"
    elif copied and written:
        fix = _COPYING
    else:
        fix = _DISTRIBUTING + (_LOADING if copied else _STATES if written else "")
    return unsupported(
        f"{where}: the argument {argument!r} is a {what}.",
        expected="DTensors only, or scalars",
        got=f"{kind.__name__} of shape {tuple(x.shape)}",
        fix=fix,
    )


_DISTRIBUTING = (
    "distribute_tensor(it, mesh, placements) or DTensor.from_local(it, mesh, placements); or, if it is the same on"
    " every rank, as what torch and modules make of numbers alone is, with torchshard.implicit_replication(): ..."
)

_COPYING = (  # so do wrappers of torch's that gather parameters
    "copy from the DTensor's full_tensor(), or from its to_local(); for a module torchshard.parallel.fsdp.fully_shard"
    " in place of torch's fully_shard and replicate"
)

_LOADING = (  # load_state_dict copies
    "; a whole state dict is loaded after torchshard.state_dict.to_dtensor(sd, mesh, placements), or, by torch's"
    " set_model_state_dict with full_state_dict=True, after torchshard.parallel.fsdp.torch_parameters(model)"
)

_STATES = (  # optimizers write to what they have loaded
    "; states of an optimizer are loaded after torchshard.state_dict.to_dtensor(states, mesh, placements), or, by"
    " torch's set_optimizer_state_dict with full_state_dict=True, where"
    " torchshard.parallel.fsdp.torch_parameters(model) was called before the optimizer was made"
)


def replica(x: Tensor, mesh: Mesh) -> DTensor:
    """A plain tensor that is the same on every rank, as a DTensor."""
    local = x.detach() if x.requires_grad else x  # torch warns of parts that require gradients
    return wrap(local, layout_for(mesh.replicated(), tuple(x.shape), x.stride(), x.dtype))


_OF_NUMBERS = "_fused_"  # what goes with all items, as a learning rate, is read as one: a scalar goes with any mesh
_OF_SHAPES = frozenset({"is_same_size.default"})  # of a plain tensor, too, nothing else is read


def with_plain_wrapped(call: Call) -> list[Any] | None:
    """The arguments with plain tensors as replicated DTensors, where that is allowed; None where there are none.

    Raises:
        UnsupportedOperatorError: a plain tensor of several elements; names the argument.
    """
    plain = [
        (name, x)
        for name, part, value in zip(call.names, call.parts, call.values, strict=True)
        for x in (value if part == "tensors" and value is not None else [value])
        if isinstance(x, Tensor) and type(x) is not DTensor and x.ndim
    ]
    if not plain or call.name in _OF_SHAPES:
        return None
    allowed = replicates_plain_tensors() or _called_by_formula() or _made_by_module([x for _, x in plain])
    for name, x in plain:
        if isinstance(x, upstream.DTensor):
            raise refuse_plain(call.name, name, x)
        if not (allowed or is_missing_tangent(x)):
            written = call.names.index(name) in call.written()
            several = _is_above_one(x.numel())
            if (written and (several or x.numel() != 1)) or (several and not _is_expanded_scalar(x)):
                raise refuse_plain(call.name, name, x, written)
            # No elements have no values, as torch's index for a mask that is one False.
            if x.numel() == 1 and not _views_scalar(x):
                say_taken_alike(call.name, name)
    mesh = next(dtensors_in(call.values))._spec.mesh
    as_number = call.name.startswith(_OF_NUMBERS)

    def wrapped(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [wrapped(item) for item in x]
        if isinstance(x, Tensor) and type(x) is not DTensor and x.ndim:
            return replica(x, mesh)
        return x

    def is_number(part: str, x: Any) -> bool:
        return as_number and part == "tensor" and type(x) is not DTensor and x is not None and x.numel() == 1

    return [
        x.reshape(()) if is_number(part, x) else wrapped(x) for part, x in zip(call.parts, call.values, strict=True)
    ]


def _views_scalar(x: Tensor) -> bool:
    """Whether a scalar was given dims, as a quantile's number is for a tensor that is one row."""
    return x._base is not None and not x._base.ndim


def _is_expanded_scalar(x: Tensor) -> bool:
    """Whether all elements are one number in memory, as that which quantile makes of its number is."""
    return all(step == 0 or not _is_above_one(n) for n, step in zip(x.shape, x.stride(), strict=True))


def _is_above_one(n: int | SymInt) -> bool:
    """Whether a length is; one that a graph does not know, as of an index that follows from values, is taken to be."""
    if isinstance(n, SymInt):
        from torch.fx.experimental.symbolic_shapes import guard_or_true  # brings sympy

        return guard_or_true(n > 1)
    return n > 1


# Rooms whose frames may lie between a formula and an operator: those of references run for the shape of a sum, or of a
# product, with zeros that take no memory, such as the second derivative of abs.
_BETWEEN = "torchshard.", "torch._ops", "torch._refs", "torch._prims", "torch._compile", "torch._dynamo.eval_frame"


def _called_by_formula() -> bool:
    """Whether one of autograd's own formulas calls, which makes plain zeros, masks and indices out of sizes alone, the
    same on every rank. Hooks and functions of the user run in frames of their own.
    """
    if not in_backward():
        return False
    frame = _behind(_BETWEEN)
    return frame is None or _room(frame) == "torch.autograd.graph"


def _behind(rooms: tuple[str, ...]) -> FrameType | None:
    """The nearest frame that is of none of these rooms."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and _room(frame).startswith(rooms):
        frame = frame.f_back
    return frame


def _room(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))  # programs that are run by exec() may have none


# Rooms of torch's modules that make first states, places of bags and masks, of numbers alone; what they call.
_MAKING = "torch.nn.modules.rnn", "torch.nn.modules.sparse", "torch.nn.modules.activation", "torch.nn.functional"


def _made_by_module(plain: list[Tensor]) -> bool:
    """Whether one of torch's own modules calls that has, and is given, DTensors alone: plain ones are of its making.

    Hooks, parametrizations and modules of the user run in frames of their own.
    """
    frame = _behind((*_BETWEEN, *_MAKING))
    held = None if frame is None else tensors_of_call(frame)
    if held is None or any(x.requires_grad or is_traced(x) for x in plain):
        return False
    return all(type(x) is DTensor for x in held)
