"""What the reducer says: the plan for comparison between ranks, and its errors."""

from collections.abc import Iterable, Sequence
from typing import cast

import torch

from torchshard import _torch
from torchshard.buckets import PlannedBucket, names_text

UNFINALIZED = (
    "Expected finalize_backward() of DistributedDataParallel after the last backward: "
    "require_manual_backward_finalization is True"
)
UNFORESEEN = (
    "DistributedDataParallel: compiled autograd was not to be foreseen when this backward's forward ran; "
    "set torch._dynamo.config.compiled_autograd = True before it, or switch it on for both"
)
NESTED = (
    "DistributedDataParallel: a gradient comes in a backward inside of another one, as re-entrant checkpoints run "
    "them, and no output of forward has told of the outer one, which may bring more; with find_unused_parameters or "
    "static_graph, return the tensors that lead to the loss in tuples, lists, mappings or dataclasses, or use "
    "torch.utils.checkpoint with use_reentrant=False"
)
ROUNDED = (
    "DistributedDataParallel: parameters were written to between a forward and its backward, while mixed_precision had "
    "them in low precision: what was written is kept, rounded; write to them before the forward or after the backward"
)
WEIGHTS_APART = (
    "DistributedDataParallel: no backward can follow from outputs of which none requires a gradient, so nothing would "
    "be averaged over the ranks. A schedule of torch's pipelining that computes gradients of weights apart (zero "
    "bubble) adds them without a backward: take ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B, or give "
    "the stages to fully_shard instead"
)
_UNUSED = (
    "your module has parameters that were not used in producing loss. If they are unused on purpose, say so "
    "by passing the keyword argument `find_unused_parameters=True` to DistributedDataParallel; if all should be "
    "used, see that all `forward` function outputs participate in calculating loss."
)
_CHANGED = (
    "your training graph has changed in this iteration, e.g., one parameter is used in first iteration, but then got "
    "unused in the second iteration. this is not compatible with static_graph set to True."
)
NOTHING_TO_FINALIZE = "finalize_backward() has nothing to do: no backward of DistributedDataParallel waits for it"


def failed_text(launched: int, buckets: int) -> str:
    """What ranks have to have in common to go on after an exception in backward, for comparison between them."""
    return f"goes on after an exception in backward, with {launched} of {buckets} buckets sent"


def thawed_text(names: Sequence[str]) -> str:
    """Parameters that were frozen when a forward began require a gradient at its end."""
    return (
        f"DistributedDataParallel: {names_text(tuple(names))} did not require a gradient when this forward began, and "
        "requires one at its end: nothing would average it over the ranks. Call requires_grad_(True) before the "
        "forward; the next one takes it up"
    )


def remembered_text(names: Sequence[str]) -> str:
    """Parameters are no longer frozen, and a communication hook may not be shown other buckets."""
    return (
        f"DistributedDataParallel: {names_text(tuple(names))} did not require a gradient until now; to average it, "
        "buckets have to change, and the communication hook may remember something of each, as PowerSGD does: "
        "wrap the module anew, and register the hook with a new state"
    )


def replaced_text(gone: Sequence[str], new: Sequence[str]) -> str:
    """Parameters were replaced after the module was wrapped, or others have come."""
    before, after = names_text(tuple(gone)), names_text(tuple(new))
    if not gone:
        return (
            f"DistributedDataParallel: {after} came to the module after it was wrapped, and would not be averaged over "
            "the ranks: wrap the module anew; or add these names to the set `parameters_to_ignore` of the wrapper, if "
            "each rank is to train its own"
        )
    return (
        f"DistributedDataParallel: {before} of the wrapped module are no longer in it, and {after} "
        "that are trained in their place are not averaged over the ranks (load_state_dict(assign=True), "
        "parametrizations and assignments replace parameters): wrap the module anew"
    )


def plan_text(plan: Iterable[PlannedBucket], params: Sequence[torch.nn.Parameter], how: str) -> str:
    """The plan, a line for each bucket and each gradient, and how they are reduced: for comparison between ranks.

    Devices are numbered from 0 for each type, as each rank has others.
    """
    lines, devices = [], dict[str, list[str]]()
    for number, bucket in enumerate(plan):
        dtype, device, *more = cast(tuple[str, ...], bucket.kind)
        kind = device.partition(":")[0]
        known = devices.setdefault(kind, [])
        if device not in known:
            known.append(device)
        place = kind if device == known[0] else f"{kind} {known.index(device)}"
        lines.append(f"bucket {number}: {(dtype, place, *more)}")
        lines += [f"{g.name} {list(params[g.index].shape)}" for g in bucket.gradients]
    return "\n".join([*lines, how])


def unfinished_text(rank: int, missing: Sequence[int], names: Sequence[str], static: bool = False) -> str:
    """A backward has left gradients out, and the next forward begins; in the sentences known from torch.

    Args:
        rank: of this process.
        missing: numbers of the parameters.
        names: of all.
        static: a static graph has changed.
    """
    text = (
        "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
        f"that {_CHANGED if static else _UNUSED}\n"
        f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}\n"
        f"Parameters which did not receive grad for rank {rank}: {', '.join(names[i] for i in missing)}"
    )
    if _torch.debug_level() == "OFF":
        text += (
            "\nFor torch's own checks of collectives, set the environment variable TORCH_DISTRIBUTED_DEBUG to either "
            "INFO or DETAIL."
        )
    return text


def twice_text(index: int, name: str) -> str:
    """A gradient came twice; starts as torch's message does."""
    return (
        "Expected to mark a variable ready only once. A parameter got a gradient twice in one reduction: it is used "
        "outside of the wrapper's forward, or in several reentrant checkpoints (use_reentrant=False mends that), or "
        "backward ran twice for one forward. "
        f"Parameter at index {index} with name {name} has been marked as ready twice."
    )


def other_dtype_text(index: int, came: torch.dtype, bucket: torch.dtype) -> str:
    """A gradient is of another dtype than the bucket that it goes to, whose reduction would round it."""
    return (
        f"DistributedDataParallel: the gradient of the parameter at index {index} is of {came}, and goes to a bucket "
        f"of {bucket}, as its grad_dtype is None; set parameter.grad_dtype = {came} on every rank"
    )


def excluded_text(setting: str) -> str:
    """A setting with which gradients cannot be averaged in a backward that compiled autograd traces."""
    return f"DistributedDataParallel: {setting} does not work under compiled autograd; run backward without it"


def stepping_text(setting: str) -> str:
    """Optimizers of parameters step in backward, where they would step without, or before, the reduction."""
    return (
        f"DistributedDataParallel: {setting} does not go with optimizers that step in backward "
        "(torch.distributed.optim._apply_optimizer_in_backward): step an optimizer of all parameters after it"
    )


def late_text(names: str) -> str:
    """Gradients came beside what a compiled graph had given to a communication hook already."""
    return (
        f"DistributedDataParallel: after a compiled graph had given the gradients of {names} to the communication "
        "hook, more came for them from outside of the graph; the hook is not known to be linear, so they cannot be "
        "reduced in two parts. Have all losses use these parameters from the first step on, when it is found out where "
        "gradients come from, or compile with options={'reduction': 'split'}"
    )
