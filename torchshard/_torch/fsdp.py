"""Fully sharded data parallel: what an extension has to know of it."""

import weakref
from collections.abc import Callable, Sequence
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
        if device_mesh is None or state._fsdp_extension is not None:
            state._fsdp_extension = user.extension(state._device_handle)
            vars(state)["clip_grad_norm_"] = partial(_clip_grad_norm_, weakref.ref(state), user)
        return state

    return [
        (fully_sharded_data_parallel, "_init_extension", init_our_extension),
        (_init_utils, "FlatParamHandle", _fsdp_handle(user)),
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


class _AsItIs:
    """A tensor that stays as it is where FSDP gives it the shape of the local part."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def reshape(self, _: Any) -> Tensor:
        return self._x


def _fsdp_handle(user: FSDPUser) -> type:
    """FSDP1's handle of a flat parameter (torch.distributed.fsdp._flat_param, 2.11-2.15) for DTensors of any class.

    - With use_orig_params=True torch sets `param.data = view` for all classes but its own DTensor. On a wrapper that is
      accepted, and crashes later.
    - Between forward and backward of SHARD_GRAD_OP torch compares addresses of memory, of which a wrapper has none.
    - Views of optimizer states get the shape of the local part, which for DTensors is right by chance only.
    """
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    class Handle(FlatParamHandle):
        flat_param: Any
        _get_unflat_views: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            flat = self.flat_param
            self.has_ours = any(map(user.is_ours, flat._param_extensions))
            if self.has_ours and self._use_orig_params and not self.uses_sharded_strategy:
                raise NotImplementedError(
                    "FSDP that shards nothing (NO_SHARD, or an axis of size 1) with use_orig_params=True would replace "
                    f"DTensor parameters under their optimizer: {flat._fqns[0]}; use DistributedDataParallel with "
                    "torchshard.parallel.local_parameters, or use_orig_params=False"
                )
            infos = zip(flat._param_infos, flat._param_extensions, strict=True)
            user.made([(info.module, info.param_name, taken) for info, taken in infos])
            self.user = user
            _flatten_parts_of_states(self)

        def _init_get_unflat_views_fn(self, align_addresses: bool) -> None:
            if align_addresses:
                self._get_unflat_views = super()._get_unflat_views_aligned
            else:
                self._get_unflat_views = self._get_unflat_views_unaligned

        # Optimizer states are unflattened by _get_unflat_views_aligned if use_orig_params=True, else by the other with
        # a tensor given. Nothing else asks so.

        def _get_unflat_views_aligned(self, tensor: Tensor | None = None) -> list[Any]:
            views = zip(super()._get_unflat_views_aligned(tensor), self.flat_param._param_extensions, strict=True)
            return [view if taken is None else _AsItIs(user.outward(view)) for view, taken in views]

        def _get_unflat_views_unaligned(self, tensor: Tensor | None = None) -> Any:
            views = super()._get_unflat_views_unaligned(tensor)
            return views if tensor is None else map(user.outward, views)

        def _use_unsharded_views(self, as_params: bool) -> None:
            if not (as_params and self._use_orig_params and getattr(self, "has_ours", False)):
                super()._use_unsharded_views(as_params)
                return
            self._use_orig_params = False  # views become parameters of their own, whatever their class
            try:
                super()._use_unsharded_views(as_params)
            finally:
                self._use_orig_params = True
            flat = self.flat_param
            for info, taken, param in zip(flat._param_infos, flat._param_extensions, flat._params, strict=True):
                if not user.is_ours(taken):
                    self._keep_object(info.module, info.param_name, param)
            for shared, param in zip(flat._shared_param_infos, flat._shared_params, strict=True):
                self._keep_object(shared.module, shared.param_name, param)

        def _keep_object(self, module: torch.nn.Module, name: str, param: Any) -> None:
            view = getattr(module, name)
            self._setattr_param(module, name, param)
            param.data = view

        def _writeback_orig_params(self) -> bool:
            if not (self._skipped_use_sharded_views and self.has_ours):
                return bool(super()._writeback_orig_params())
            flat = self.flat_param
            for at, info in enumerate(flat._param_infos):
                if not flat._shard_param_infos[at].in_shard or not hasattr(info.module, info.param_name):
                    continue
                if getattr(info.module, info.param_name) is not flat._tensors[at]:
                    raise AssertionError(
                        f"{flat._fqns[at]} was replaced between forward and backward, which FSDP does not support for "
                        f"{self._sharding_strategy}"
                    )
            return False

    return Handle


_fsdp_handles: set[int] = set()  # addresses of those alive


_optimizer_functions: dict[str, Callable[..., Any]] = {}  # torch's own, while they are replaced


def _flatten_parts_of_states(handle: Any) -> None:
    """As long as `handle` lives, have FSDP1 flatten this rank's parts of optimizer states.

    torch gathers a state along all axes of its mesh, those of tensor parallelism too, and then takes rows of it as if
    it were this rank's part (torch.distributed.fsdp._optim_utils, 2.11-2.15): wrong values without a word, or an error
    of shapes. There is no hook, so two functions are replaced; states of other handles pass through.
    """
    from torch.distributed.fsdp import _optim_utils

    def parts(info: Any, name: str, state: dict[str, Any]) -> dict[str, Any]:
        taken = info.handle.flat_param._param_extensions[info.param_indices[name]]
        return {key: info.handle.user.part(x, taken, f"state {key!r} of {name}") for key, x in state.items()}

    def shard_orig_param_state(info: Any, fqn: str, state: dict[str, Any]) -> Any:
        state = parts(info, fqn, state) if id(info.handle) in _fsdp_handles else state
        return _optimizer_functions["_shard_orig_param_state"](info, fqn, state)

    def flatten_optim_state(info: Any, states: dict[str, Any], names: list[str]) -> Any:
        if id(info.handle) in _fsdp_handles:
            states = {name: parts(info, name, states[name]) for name in names if name in states}
        return _optimizer_functions["_flatten_optim_state"](info, states, names)

    if not _optimizer_functions:
        for function in (shard_orig_param_state, flatten_optim_state):
            name = f"_{function.__name__}"
            _optimizer_functions[name] = getattr(_optim_utils, name)
            setattr(_optim_utils, name, function)
    _fsdp_handles.add(id(handle))
    weakref.finalize(handle, _without_handle, id(handle)).atexit = False


def _without_handle(address: int) -> None:
    from torch.distributed.fsdp import _optim_utils

    _fsdp_handles.discard(address)
    if not _fsdp_handles:
        while _optimizer_functions:
            setattr(_optim_utils, *_optimizer_functions.popitem())
