"""FSDP1's handle of a flat parameter, and its states (torch.distributed.fsdp._flat_param, 2.11-2.15), for DTensors."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._flat_param import FlatParamHandle

from torchshard._torch.fsdp import FSDPUser


class Handle(FlatParamHandle):
    """FSDP1's handle of a flat parameter, for DTensors of any class; made of the class of a user, see `fsdp_names`.

    - With use_orig_params=True torch sets `param.data = view` for all classes but its own DTensor. On a wrapper that is
      accepted, and crashes later.
    - Between forward and backward of SHARD_GRAD_OP torch compares addresses of memory, of which a wrapper has none.
    - Views of optimizer states get the shape of the local part, which for DTensors is right by chance only.
    """

    user: FSDPUser
    flat_param: Any
    _get_unflat_views: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        flat = self.flat_param
        self.has_ours = any(map(self.user.is_ours, flat._param_extensions))
        if self.has_ours and self._use_orig_params and not self.uses_sharded_strategy:
            raise NotImplementedError(
                "FSDP that shards nothing (NO_SHARD, or an axis of size 1) with use_orig_params=True would replace "
                f"DTensor parameters under their optimizer: {flat._fqns[0]}; use DistributedDataParallel with "
                "torchshard.parallel.local_parameters, or use_orig_params=False"
            )
        infos = zip(flat._param_infos, flat._param_extensions, strict=True)
        self.user.made([(info.module, info.param_name, taken) for info, taken in infos])
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
        return [view if taken is None else _AsItIs(self.user.outward(view)) for view, taken in views]

    def _get_unflat_views_unaligned(self, tensor: Tensor | None = None) -> Any:
        views = super()._get_unflat_views_unaligned(tensor)
        return views if tensor is None else map(self.user.outward, views)

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
            if not self.user.is_ours(taken):
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


class _AsItIs:
    """A tensor that stays as it is where FSDP gives it the shape of the local part."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def reshape(self, _: Any) -> Tensor:
        return self._x


_alive: set[int] = set()  # addresses of handles
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
        state = parts(info, fqn, state) if id(info.handle) in _alive else state
        return _optimizer_functions["_shard_orig_param_state"](info, fqn, state)

    def flatten_optim_state(info: Any, states: dict[str, Any], names: list[str]) -> Any:
        if id(info.handle) in _alive:
            states = {name: parts(info, name, states[name]) for name in names if name in states}
        return _optimizer_functions["_flatten_optim_state"](info, states, names)

    if not _optimizer_functions:
        for function in (shard_orig_param_state, flatten_optim_state):
            name = f"_{function.__name__}"
            _optimizer_functions[name] = getattr(_optim_utils, name)
            setattr(_optim_utils, name, function)
    _alive.add(id(handle))
    weakref.finalize(handle, _without_handle, id(handle)).atexit = False


def _without_handle(address: int) -> None:
    from torch.distributed.fsdp import _optim_utils

    _alive.discard(address)
    if not _alive:
        while _optimizer_functions:
            setattr(_optim_utils, *_optimizer_functions.popitem())
