"""The only file that touches private names of torch.

One function for each thing wanted; its docstring says why the public API does not do and in which torch versions the
name was seen. A name is looked for when it is first used; where it is missing, a public way takes its place.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _find(path: str) -> Any:
    """The object at a dotted path below torch, or None."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            return None
    return found


# ------------------------------------------------------------------------------------------------ process groups


def default_group() -> dist.ProcessGroup:
    """The default process group, or torch's own ValueError saying that there is none (2.11-2.15)."""
    from torch.distributed.distributed_c10d import _get_default_group

    return _get_default_group()


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The store through which the group's ranks found each other (ProcessGroup.get_group_store, 2.11-2.15).

    There is no public way to it; without it an error says so.
    """
    return cast(dist.Store, group.get_group_store())


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group's collectives may take (Backend.options, 2.11-2.15), else torch's default for all groups."""
    try:
        return cast(timedelta, group._get_backend(device).options._timeout)
    except (AttributeError, RuntimeError):
        return cast(timedelta, dist.default_pg_timeout)


# ------------------------------------------------------------------------------------------------ autograd


def queue_callback(callback: Callable[[], None]) -> None:
    """Have the autograd engine call this when the backward that runs now is over.

    Variable._execution_engine.queue_callback (2.11-2.15); nothing public tells that a backward has ended.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def will_run(node: Any) -> bool:
    """Whether the backward that runs now will execute this node (torch._C._will_engine_execute_node, 2.11-2.15).

    False for the AccumulateGrad nodes of parameters under torch.autograd.grad, and of those that
    backward(inputs=...) leaves out; the engine raises for a leaf whose gradient torch.autograd.grad will return.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def preserve_versions(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Leave version counters as they are while buffers are overwritten with what they hold on rank 0.

    torch.autograd._unsafe_preserve_version_counter (2.11-2.15): a buffer that a backward still needs may be synced
    before the next forward. Without it, autograd reports the change.
    """
    tensors = tuple(tensors)
    found = _find("autograd._unsafe_preserve_version_counter")
    return cast(AbstractContextManager[None], found(tensors)) if found and tensors else nullcontext()


# ------------------------------------------------------------------------------------------------ tensors


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects share this memory (torch._C._storage_Use_Count, 2.11-2.15).

    Without it, a number that no one can reach: memory is then never written again.
    """
    count = _find("_C._storage_Use_Count")
    return int(count(storage._cdata)) if count else 1 << 30


def aliasing() -> AbstractContextManager[object]:
    """Views made in this context are plain tensors that share memory: autograd does not know them as views.

    torch._C._AutoDispatchBelowADInplaceOrView (2.11-2.15). Such a `.grad` can be detached in place as any other, and
    costs half as much to make. Without it they are ordinary views.
    """
    guard = _find("_C._AutoDispatchBelowADInplaceOrView")
    return cast(AbstractContextManager[object], guard()) if guard else nullcontext()


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous tensors of one dtype as one flat tensor (torch._C._nn.flatten_dense_tensors, 2.11-2.15).

    Three times faster than the public torch.cat for many small ones, which is the fallback.
    """
    found = _find("_C._nn.flatten_dense_tensors")
    return cast(torch.Tensor, found(tensors) if found else torch.cat([t.reshape(-1) for t in tensors]))


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of a flat tensor in the shapes of `like` (torch._C._nn.unflatten_dense_tensors, 2.11-2.15)."""
    found = _find("_C._nn.unflatten_dense_tensors")
    if found:
        return cast(Sequence[torch.Tensor], found(flat, like))
    return [piece.view_as(t) for piece, t in zip(flat.split([t.numel() for t in like]), like, strict=True)]


def device_index(device: Any) -> int:
    """Number of a CUDA device given as int, str or torch.device (torch._utils._get_device_index, 2.11-2.15)."""
    from torch._utils import _get_device_index

    return _get_device_index(device, True)


# ------------------------------------------------------------------------------------------------ distributed tensors


def is_submesh(mesh: Any) -> bool:
    """Whether a device mesh was cut out of a larger one (DeviceMesh._get_root_mesh, 2.11-2.15)."""
    root = getattr(mesh, "_get_root_mesh", None)
    return bool(root is not None and root() != mesh)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether this is torch's DTensor, without importing torch.distributed.tensor for plain ones."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


# ------------------------------------------------------------------------------------------------ dynamo


def skip_frame(function: _Function) -> _Function:
    """Have Dynamo leave this frame alone, and go on with those that it calls.

    What torch.compiler.disable(recursive=False) says, but without a wrapper and without importing torch._dynamo,
    which takes more than a second (torch._C._dynamo.eval_frame.set_code_exec_strategy, 2.11-2.15).
    """
    return _never_trace(function, below=False)


def untraced(function: _Function) -> _Function:
    """Have Dynamo leave this function alone, and all that it calls: torch.compiler.disable without its cost."""
    return _never_trace(function, below=True)


def _never_trace(function: _Function, below: bool) -> _Function:
    frames = _find("_C._dynamo.eval_frame")
    if not hasattr(frames, "_FrameExecStrategy"):
        return cast(_Function, torch.compiler.disable(function, recursive=below))
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip if below else default))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
