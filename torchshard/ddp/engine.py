"""The wrapper's settings of its reducer: which gradients come, who reduces them, who steps, who finishes."""

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from torchshard import _torch
from torchshard.ddp.buckets.gradbucket import GradBucket
from torchshard.ddp.buckets.mixed import MixedPrecision
from torchshard.ddp.reducing.delayed import Delayed
from torchshard.ddp.reducing.observed import ObservedReducer
from torchshard.ddp.reducing.optimizers import SteppingHook, has_own_optimizer
from torchshard.ddp.reducing.usage import ChangingUsage, StaticUsage, Usage
from torchshard.ddp.sync import broadcast_coalesced
from torchshard.ddp.telling import messages


class Engine:
    """Methods of torch's DistributedDataParallel that decide how its reducer works."""

    reducer: ObservedReducer
    logger: Any
    module: torch.nn.Module
    process_group: dist.ProcessGroup
    static_graph: bool
    find_unused_parameters: bool
    skip_all_reduce_unused_params: bool
    mixed_precision: Any
    parameters_to_ignore: set[str]
    _precision: MixedPrecision | None
    _delayed: Delayed | None
    _delay_all_reduce_params: list[torch.nn.Parameter]
    _module_parameters: list[torch.nn.Parameter]
    _comm_hooks: list[tuple[Callable[..., Any], object]]

    # ------------------------------------------------------------------------------------------ gradients that come

    def _choose_usage(self, count: int) -> Usage:
        """Which of `count` parameters get a gradient, by the constructor's arguments."""
        if self.static_graph:
            return StaticUsage(count)
        if self.find_unused_parameters:
            return ChangingUsage(count, self.skip_all_reduce_unused_params)
        return Usage(count)

    def _sparse_parameters(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> list[str]:
        """Names of those whose gradients are sparse: weights of embeddings that say so."""
        kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
        weights = {id(m.weight) for m in self.module.modules() if isinstance(m, kinds) and m.sparse}
        return [name for name, p in named if id(p) in weights]

    def _set_static_graph(self) -> None:
        """Take all backwards for alike, as the constructor's static_graph does; before the first one."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        with self.logger.noting():
            self.reducer.use_static_graph()
        self.static_graph = True
        self.logger._set_static_graph()
        self._warn_static_graph()

    def _warn_static_graph(self) -> None:
        if self.static_graph and self.find_unused_parameters:
            warnings.warn(
                "DistributedDataParallel: find_unused_parameters=True is not needed with static_graph=True, which "
                "finds unused parameters in the first backward and takes them for unused ever after",
                stacklevel=3,
            )

    # ------------------------------------------------------------------------------------------ who reduces

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have a hook reduce each bucket of gradients; torch's documentation says how one is written.

        The hook gets the state and a bucket with the methods of dist.GradBucket, undivided gradients in it, and
        returns a future of the tensor that replaces them. Dividing by the number of ranks is up to the hook.
        """
        with self.logger.noting():
            self._check_comm_hook(hook)
            self.reducer.use_hook(hook, state)
        self.logger._set_comm_hook_name(hook.__qualname__ if hasattr(hook, "__qualname__") else str(hook))
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register one of torch's two hooks that are written in C++; here their equals in Python."""
        kinds: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]
        builtin: dict[Any, Callable[..., Any]] = {
            kinds.ALLREDUCE: default_hooks.allreduce_hook,
            kinds.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self.reducer.use_hook(builtin[comm_hook_type], self.process_group)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        """Raise torch's exceptions for what cannot be a hook. Which dtypes it uses is between it and its backend."""
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        signature, empty = inspect.signature(hook), inspect.Parameter.empty
        bucket = GradBucket.__base__  # torch's
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise ValueError(
                f"Communication hook: it is called with a state and a bucket, and its signature is {signature}."
            ) from error
        if any(p.annotation not in (empty, bucket) for p in [*signature.parameters.values()][1:2]):
            raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
        if signature.return_annotation not in (empty, torch.futures.Future[torch.Tensor]):
            raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")

    # ------------------------------------------------------------------------------------------ precision

    def _choose_precision(self) -> MixedPrecision | None:
        if self.mixed_precision is None:
            return None
        return MixedPrecision(self.mixed_precision, self.module, self.parameters_to_ignore)

    def _connect_precision(self) -> None:
        """Full precision comes back when a backward is over; another backward of the same forward lowers it again."""
        if self._precision:
            self.reducer.at_begin.append(self._precision.lower_again)
            self.reducer.at_end.append(self._precision.restore)
            self.reducer.at_failure.append(self._precision.restore)

    def _lower_precision(self, *inputs: Any) -> Any:
        """Cast parameters and inputs for a forward."""
        assert self._precision, "asked before"
        builds = torch.is_grad_enabled()
        self._precision.lower(gradients=builds)
        if builds:
            self.reducer.leaves.renew()
        self._precision.fill(beside_forward=True)
        return self._precision.cast(inputs)

    @_torch.untraced
    def _raise_precision(self) -> None:
        """The forward is over, and no backward will come."""
        if self._precision:
            self._precision.settle()
            if not self.reducer.in_backward:
                self._precision.restore()

    def _raise_precision_between(self) -> None:
        """Parameters are read or written as a whole: in full precision, unless a forward or a backward runs."""
        if self._precision:
            self._precision.restore_between()

    # ------------------------------------------------------------------------------------------ delay

    def _delay(self) -> None:
        """See delay_all_reduce_named_params."""
        delayed = self._delay_all_reduce_params
        self._delayed = None
        self._delay_all_reduce_all_params = bool(delayed) and not self.reducer.params
        if delayed:
            wait = partial(self.reducer.exchange.wait, what="the delayed parameters of rank 0")
            broadcast_coalesced([p.detach() for p in delayed], self.process_group, wait=wait)
            self._delayed = Delayed(delayed, self.reducer)
            weakref.finalize(self, self._delayed.remove).atexit = False

    # ------------------------------------------------------------------------------------------ who steps

    def _setup_in_backward_optimizers(self) -> None:
        """If parameters have optimizers of their own, step these as soon as their bucket is reduced."""
        if any(map(has_own_optimizer, self._delay_all_reduce_params)):
            raise NotImplementedError(messages.stepping_text("delay_all_reduce_named_params"))
        if any(map(has_own_optimizer, self._module_parameters)):
            if self._precision:
                raise NotImplementedError(messages.stepping_text("mixed_precision"))
            stepping = SteppingHook(self.process_group, self._module_parameters)
            self.reducer.use_hook(stepping, None)
            self.reducer.at_end.append(stepping.after_backward)
            self.reducer.reduction.may_step = True

    # ------------------------------------------------------------------------------------------ who finishes

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the caller finishes each backward, by `finalize_backward`, and backward itself does not wait."""
        return self.reducer.waits_for_user

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self.reducer.waits_for_user = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether a backward is over whose reduction the caller has to finish."""
        return self.reducer.is_unfinished

    def finalize_backward(self) -> None:
        """Wait for the reduction of the last backward and set the gradients.

        RuntimeError if require_manual_backward_finalization is False, or no backward waits for it.
        """
        if not self.require_manual_backward_finalization:
            raise RuntimeError("finalize_backward() needs require_manual_backward_finalization, which is False")
        self.reducer.finish()
