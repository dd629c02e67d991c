"""Fully sharded data parallel: what an extension has to know of it."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor


def fsdp_extension_base() -> Any:
    """The abstract class of FSDP1's extensions (torch.distributed.fsdp._fsdp_extensions, 2.11-2.15)."""
    from torch.distributed.fsdp._fsdp_extensions import FSDPExtensions

    return FSDPExtensions


def mark_flattened(x: Tensor) -> None:
    """Mark a tensor as one that FSDP1 manages, so that wrappers of inner modules leave it alone (2.11-2.15)."""
    from torch.distributed.fsdp._common_utils import _set_fsdp_flattened

    _set_fsdp_flattened(x)


class FSDPUser(Protocol):
    """Who takes part in what FSDP1 does with parameters of other classes; see `fsdp_names`."""

    def extension(self, device_handle: Any) -> Any:
        """The extension of a module that is about to be wrapped."""

    def wrapped(self, module: torch.nn.Module) -> None:
        """Told of a new FSDP module, which does not know yet what it is around."""

    def is_ours(self, taken: Any) -> bool:
        """Whether views of a parameter are of a class that torch does not know, by what pre_flatten took off it."""

    def made(self, parameters: Sequence[tuple[torch.nn.Module, str, Any]]) -> None:
        """Told of a new flat parameter: owner, name there, and what was taken off, of each parameter in it."""

    def clip(self, gradients: "FSDPGradients", max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients, some of which are parts of DTensors, to a norm; the norm before."""

    def outward(self, x: Tensor) -> Tensor:
        """A view of an optimizer state as state dicts hold it: of a class that torch knows."""

    def part(self, value: Any, taken: Any, where: str) -> Any:
        """What of a state of the optimizer FSDP flattens: this rank's part, a plain tensor."""


def fsdp_names(user: FSDPUser) -> list[tuple[Any, str, Any]]:
    """What to put in place of which names of torch, so that FSDP1 asks `user`: (module, name, value).

    FSDP1 (torch.distributed.fsdp, 2.11-2.15) makes an extension and a handle of the flat parameter for each module that
    it wraps, by names of its modules. (There is a setter of extensions, too, which nothing reads.) It makes an
    extension where `device_mesh` is a slice of a larger mesh; here also where it is given a process group.

    Raises:
        RuntimeError: this torch has other names.
    """
    from torch.distributed.fsdp import _init_utils, _optim_utils, fully_sharded_data_parallel
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    from torchshard._torch.fsdp_handle import Handle

    needed = [
        (fully_sharded_data_parallel, "_init_extension"),
        (_init_utils, "FlatParamHandle"),
        (_optim_utils, "_shard_orig_param_state _flatten_optim_state"),
        (FlatParamHandle, "_use_unsharded_views _writeback_orig_params _init_get_unflat_views_fn"),
    ]
    missing = [name for home, names in needed for name in names.split() if not hasattr(home, name)]
    if missing:
        raise RuntimeError(f"torch {torch.__version__} has no {', '.join(missing)} in FSDP; known are 2.11 to 2.15")
    init_extension = fully_sharded_data_parallel._init_extension  # type: ignore[attr-defined]

    def init_our_extension(state: Any, device_mesh: Any = None) -> Any:
        init_extension(state, device_mesh)
        replicas = vars(state).get("_inter_node_pg")
        if state.world_size == 1 and replicas is not None and replicas.size() > 1:
            raise NotImplementedError(
                "FSDP with hybrid sharding over one rank each: torch takes it for NO_SHARD, and reduces no gradient "
                f"between the {replicas.size()} replicas; use NO_SHARD over them, or DistributedDataParallel"
            )
        if device_mesh is None or state._fsdp_extension is not None:
            state._fsdp_extension = user.extension(state._device_handle)
            vars(state)["clip_grad_norm_"] = partial(_clip_grad_norm_, weakref.ref(state), user)
            user.wrapped(state)
        return state

    return [
        (fully_sharded_data_parallel, "_init_extension", init_our_extension),
        (_init_utils, "FlatParamHandle", type("Handle", (Handle,), {"user": user})),
    ]


@dataclass(frozen=True)
class FSDPGradients:
    """Gradients of an FSDP1 module after backward, on this rank.

    Attributes:
        pieces: what this rank has of the gradient of each parameter, flat; what was taken off the parameter; on how
            many ranks of the group it is the same.
        taken: what was taken off all parameters, the same on all ranks.
        group: the ranks that FSDP splits over.
        device: of the pieces.
    """

    pieces: list[tuple[Tensor, Any, int]]
    taken: list[Any]
    group: dist.ProcessGroup
    device: torch.device


def _clip_grad_norm_(module: "weakref.ref[Any]", user: FSDPUser, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """FSDP1's clip_grad_norm_ (2.11-2.15): torch's, unless parameters are DTensors."""
    from torch.distributed.fsdp._runtime_utils import _lazy_init

    root: Any = module()
    _lazy_init(root, root)  # as torch's does: there may have been no forward
    handles = root._all_handles
    if not any(taken is not None for handle in handles for taken in handle.flat_param._param_extensions):
        return cast(Tensor, type(root).clip_grad_norm_(root, max_norm, norm_type))
    if not root._is_root:
        raise RuntimeError("clip_grad_norm_ is to be called on the outermost FSDP module")
    pieces: list[tuple[Tensor, Any, int]] = []
    flat_ones: set[int] = set()
    for handle in handles:
        if handle.process_group is not root.process_group:
            raise NotImplementedError("clip_grad_norm_ where FSDP modules have different process groups")
        flat = handle.flat_param
        own = flat._params if handle._use_orig_params else [flat]
        flat_ones.update(map(id, own))
        if handle._use_orig_params:
            grads = [p.grad for p in own]
        elif flat.grad is None:
            grads = []
        else:
            infos = [i if i.in_shard else None for i in flat._shard_param_infos]
            grads = [i and flat.grad[i.offset_in_shard : i.offset_in_shard + i.numel_in_shard] for i in infos]
        copies = 1 if handle.uses_sharded_strategy else handle.process_group.size()
        pieces += [
            (grad, taken, copies)
            for grad, taken in zip(grads, flat._param_extensions, strict=False)
            if grad is not None
        ]
    if any(id(p) not in flat_ones and p.grad is not None for p in root.parameters()):
        raise NotImplementedError("clip_grad_norm_ where FSDP ignores some parameters and others are DTensors")
    with torch.no_grad():
        taken = [one for handle in handles for one in handle.flat_param._param_extensions]
        return user.clip(FSDPGradients(pieces, taken, root.process_group, root.compute_device), max_norm, norm_type)
