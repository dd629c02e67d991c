"""DistributedDataParallel: torch's wrapper with another engine."""

import copy
import os
import weakref
from contextlib import AbstractContextManager
from contextvars import Token
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from torchshard import _torch
from torchshard.comm.probing import links_of
from torchshard.comm.summing import look_for_neighbours
from torchshard.ddp import active, cutting, options
from torchshard.ddp.compat import Compatibility
from torchshard.ddp.composite import require_plain
from torchshard.ddp.engine import Engine
from torchshard.ddp.exchange import Exchange
from torchshard.ddp.joining import Joining
from torchshard.ddp.members import Members, Named, names_of
from torchshard.ddp.reducing.observed import ObservedReducer
from torchshard.ddp.states import States
from torchshard.ddp.sync import broadcast_coalesced, describe, verify_equal
from torchshard.ddp.telling.explaining import Explaining
from torchshard.tensor.replacing import now


class DistributedDataParallel(Engine, Compatibility, Joining, Explaining, States, TorchDistributedDataParallel):
    """Averages the gradients of a module over the ranks of a process group, while backward runs.

    A subclass of torch's class, with its constructor and behaviour, whose C++ reducer is never built; code that looks
    for torch's class finds it. Arguments mean what torch's documentation says. Besides,

    - `bucket_cap_mb="auto"` measures the link between ranks and chooses the size of buckets;
    - with `device_mesh=mesh["dp"]`, of a mesh of two axes, parameters that are DTensors on the other axis become plain
      tensors, this rank's parts, and are lent to forward as DTensors: see torchshard.parallel.local_parameters;
    - `explain()` tells when each bucket was full, sent and reduced in a step; `reducer` shows the buckets.

    With gradient_as_bucket_view=False a `.grad` that exists before backward keeps its identity and receives the
    average, as in torch. A `.grad` that backward creates shares memory with its bucket, which saves a copy and is not
    to be noticed: the bucket moves to other memory as long as anybody else holds that gradient.

    Raises:
        RankMismatchError: parameters, buffers or arguments differ between ranks (found if init_sync is True), or later
            on, ranks come to different buckets.
        RuntimeError, ValueError: as torch's, for a module or arguments that cannot be right.

    Example:
        >>> model = DistributedDataParallel(module)                         # doctest: +SKIP
        >>> model(batch).mean().backward()                                  # doctest: +SKIP
        >>> print(model.reducer)                        # the buckets       # doctest: +SKIP
    """

    reducer: ObservedReducer  # type: ignore[assignment]

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | str | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        options.require_module(module)
        options.check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.process_group = options.choose_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        options.make_local(module, device_mesh, self.parameters_to_ignore)
        named_delayed = [(n, now(p)) for n, p in delay_all_reduce_named_params or ()]
        self._delay_all_reduce_params = [p for _, p in named_delayed]
        delayed = {id(p) for p in self._delay_all_reduce_params}
        self.parameters_to_ignore |= names_of(module, delayed)
        reduced = options.reduced(module, self.parameters_to_ignore)
        require_plain(reduced)
        self._module_parameters = [p for _, p in reduced]
        options.check_parameters(self._module_parameters, self._delay_all_reduce_params)
        options.check_inner(module, (*self._module_parameters, *self._delay_all_reduce_params), self.process_group)
        somewhere = self._module_parameters or self._delay_all_reduce_params
        vars(self).update(vars(options.check_devices(somewhere, device_ids, output_device)))
        options.check_modules(module, on_cpu=self.device_type == "cpu")
        options.warn_check_reduction(check_reduction)
        self._policy = options.choose_buckets(bucket_cap_mb, bucket_cap_mb_list)
        self._chooses_buckets = bucket_cap_mb == "auto"
        self.forward_sync_buffers, sync_buffers = options.choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.module, self.dim, self.static_graph, self.mixed_precision = module, dim, static_graph, mixed_precision
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy, self.lazy_bucket_allocation = batched_grad_copy, lazy_bucket_allocation
        self.find_unused_parameters, self.gradient_as_bucket_view = find_unused_parameters, gradient_as_bucket_view
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._set_what_others_read()
        self._assign_modules_buffers()
        exchange = Exchange(self.process_group, self.device)
        if init_sync:
            self._make_ranks_equal(reduced, sync_buffers, named_delayed, exchange)
            with exchange.agreement.waiting_for("what each rank can read of the others"):
                look_for_neighbours(self.process_group, self.device)
        self._build_reducer(exchange, verified=init_sync)
        self._delay()
        self._warn_static_graph()

    def _set_what_others_read(self) -> None:
        """Attributes of torch's class that frameworks and torch's own tools look at."""
        self._use_python_reducer = False
        self.broadcast_bucket_size = 250 << 20
        self.bucket_bytes_cap = max(self._policy.caps, default=self._policy.cap)
        self.bucket_bytes_cap_list = list(self._policy.caps)
        self.bucket_bytes_cap_default = self._policy.first < self._policy.cap
        self.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        self._comm_hooks: list[Any] = []
        self._looked_for_optimizers = False

    def _make_ranks_equal(self, params: Named, sync_buffers: bool, delayed: Named, exchange: Exchange) -> None:
        """Check that all ranks hold the same model, then give them rank 0's values."""
        ignored = self.parameters_to_ignore
        buffers = [(n, b) for n, b in self.module.named_buffers() if n not in ignored] if sync_buffers else []
        options.require_values([*params, *buffers])
        settings = {
            "bucket sizes": "auto" if self._chooses_buckets else self._policy,
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "mixed_precision": self.mixed_precision,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "forward_sync_buffers": self.forward_sync_buffers,
        }
        lines = [f"argument {name}: {value}" for name, value in settings.items()]
        told = describe("buffer", buffers)
        lines += describe("parameter", params) + describe("delayed parameter", delayed) + told
        lines += [f"requires a gradient: {n}" for n, p in params if p.requires_grad]
        verify_equal(lines, exchange)
        exchange.agreement.adopt("\n".join(told), beside=True)
        tensors = [t for _, t in [*params, *buffers]]
        wait = partial(exchange.wait, what="the parameters and buffers of rank 0")
        broadcast_coalesced(tensors, self.process_group, cap=self.broadcast_bucket_size, wait=wait)

    def _build_reducer(self, exchange: Exchange, verified: bool) -> None:
        delayed, before = self._delay_all_reduce_params, getattr(self, "reducer", None)
        members = Members(self.module, self.parameters_to_ignore, delayed, before and before.members)
        named = members.trained
        self._precision = self._choose_precision()
        self.reducer = ObservedReducer(
            named,
            exchange,
            self._policy,
            views_stay=self.gradient_as_bucket_view,
            usage=self._choose_usage(len(named)),
            sparse=self._sparse_parameters(named),
            reduce_dtype=self._precision.reduce_dtype if self._precision else None,
            verified=verified,
        )
        self.reducer.members = members
        if self._chooses_buckets:
            wait = partial(exchange.wait, what="the link's measurement")
            with exchange.agreement.waiting_for("the link's measurement"):
                self.reducer.choose_sizes(*links_of(self.process_group, self.device, wait))
        self._build_logger()
        self._connect_precision()
        # The hooks on the parameters hold the reducer; they go when the wrapper goes, the module may live on.
        self._on_end = weakref.finalize(self, self.reducer.remove_hooks)
        self._on_end.atexit = False

    # ---------------------------------------------------------------------------------------------- forward

    @_torch.skip_frame
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; what it returns is returned as it is.

        Under torch.compile this frame itself is left alone and the module's call is compiled, a bare nn.Sequential
        too: what is done around it happens at run time, once for each call.
        """
        try:
            inputs, kwargs, span, outer = self._enter(inputs, kwargs)
            try:
                output = self._call_module(*inputs, **kwargs)
                self._after(output)
            finally:
                _leave(span, outer)
        except BaseException:
            self._raise_precision()  # no backward will come
            raise
        return output

    @_torch.untraced
    def _enter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], AbstractContextManager[object], Token[Any]]:
        """All that is done before the module's call; with its inputs, what `_leave` needs."""
        span = _torch.recording("DistributedDataParallel.forward")
        span.__enter__()
        try:
            inputs, kwargs = self._before(inputs, kwargs)
            cutting.stand()
        except BaseException:
            span.__exit__(None, None, None)
            raise
        return inputs, kwargs, span, active.enter(self.reducer)

    @_torch.untraced
    def _before(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.reducer.exchange.agreement.raise_failure()
        if torch.is_grad_enabled():
            self._look_at_members()
            if not self._looked_for_optimizers:
                self._setup_in_backward_optimizers()
                self._looked_for_optimizers = True
            self._begin_step()
        self._begin_round()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers(self._whose_buffers)
        if self._precision:
            inputs, kwargs = self._lower_precision(inputs, kwargs)
        if self.device_ids:
            moved = self.to_kwargs(inputs, kwargs, self.device_ids[0])  # type: ignore[no-untyped-call]
            return moved[0][0], moved[1][0]
        return inputs, kwargs

    @_torch.untraced
    def _after(self, output: Any) -> None:
        if self._precision:
            self._precision.settle()
        self._end_forward()
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers(self._whose_buffers)
        builds = torch.is_grad_enabled()
        if self.require_forward_param_sync is not (builds and self.require_backward_grad_sync):
            self.require_forward_param_sync = not self.require_forward_param_sync  # to set it takes a microsecond
        if builds:
            forward = self.reducer.after_forward(output, self.require_backward_grad_sync)
            if self._precision:
                self._precision.keep_for(forward)
            if self._delayed:
                self._delayed.after_forward(self.require_backward_grad_sync)
        else:
            self._raise_precision()

    def _call_module(self, *inputs: Any, **kwargs: Any) -> Any:
        """A frame of its own, for torch.compile to start at."""
        return self.module(*inputs, **kwargs)

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        """Whether buckets are laid out as a backward was seen; asked by torch's hooks that step optimizers."""
        return self.reducer.has_learned

    # ---------------------------------------------------------------------------------------------- pickle, copy

    def __getstate__(self) -> dict[str, Any]:
        """All but the process group, the reducer and the hooks; only a wrapper on the default group can be pickled."""
        self._check_default_group()
        self._raise_precision_between()
        if self._delayed:
            raise RuntimeError(
                "DDP with delay_all_reduce_named_params cannot be pickled or copied: wrap the module anew"
            )
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "logger", "_on_end", "_alike"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Build a reducer on the default process group; ranks are taken to hold equal models."""
        self.process_group = _torch.default_group()
        torch.nn.Module.__setstate__(self, state)
        self._build_reducer(Exchange(self.process_group, self.device, alone=True), verified=False)


@_torch.untraced
def _leave(span: AbstractContextManager[object], outer: Token[Any]) -> None:
    """The wrapper's forward is over."""
    active.leave(outer)
    span.__exit__(None, None, None)
