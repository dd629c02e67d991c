"""The autograd engine: its callbacks, and what it is about to do."""

import ctypes
import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from torchshard._torch.finding import find, find_once

T = TypeVar("T")

_before = operator.attrgetter("_backward_hooks")
_after = operator.attrgetter("_post_accumulate_grad_hooks")


def queue_callback(callback: Callable[[], None]) -> None:
    """Have the autograd engine call this when the backward that runs now is over.

    Variable._execution_engine.queue_callback (2.11-2.15); nothing public tells that a backward has ended.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class Inherited(Generic[T]):
    """An attribute of which each thread has its own; those in which autograd runs a backward have that of its caller.

    A backward runs in threads of its own on devices other than the CPU, and on the CPU in the depths of backwards that
    call backward. Engine threads take over what torch keeps for Python (torch._C._stash_obj_in_tls, _get_obj_in_tls,
    _is_key_in_tls, _remove_obj_from_tls, 2.11-2.15); without it the attribute has its default there.
    """

    _NAMES = "_stash_obj_in_tls", "_get_obj_in_tls", "_is_key_in_tls", "_remove_obj_from_tls"

    def __init__(self, default: T) -> None:
        self.default = default
        self._own = threading.local()
        self._put, self._get, self._has, self._remove = (find(f"_C.{name}") for name in self._NAMES)

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = f"{owner.__module__}.{owner.__qualname__}.{name}"

    def __get__(self, instance: object, owner: type) -> T:
        if self._get is None:
            return getattr(self._own, "value", self.default)
        return cast(T, self._get(self._key)) if self._has(self._key) else self.default

    def __set__(self, instance: object, value: T) -> None:
        if self._put is None:
            self._own.value = value
        elif value != self.default or self._remove is None:
            if _stashes_without_a_reference():
                _keep(value)
            self._put(self._key, value)
        elif self._has(self._key):
            self._remove(self._key)  # to give up an object, a thread that ends needs the interpreter


@functools.cache
def _stashes_without_a_reference() -> bool:
    """Whether torch gives up a reference to what it has stashed and took none (2.11): it would be freed in use."""
    put, _, _, remove = (find(f"_C.{name}") for name in Inherited._NAMES)
    key, value = f"{__name__}.probe", [object()]
    before = sys.getrefcount(value)
    assert put is not None, "nothing to stash with"
    put(key, value)
    found = sys.getrefcount(value) == before
    if found:
        _keep(value)
    (put(key, None) if remove is None else remove(key))
    return found


def _keep(value: object) -> None:
    """Count one more reference to an object, for somebody who gives one up."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor of which autograd knows this one as a view (Tensor._base, 2.11-2.15)."""
    return tensor._base


def profiled(name: str, future: "torch.futures.Future[Any]") -> None:
    """Have a profiler that runs see something of this name, from now until the future is done.

    torch.autograd._profiler_enabled, record_function._call_end_callbacks_on_future (2.11-2.15); else it sees nothing.
    """
    enabled = find("autograd._profiler_enabled")
    if enabled is None or not enabled():
        return
    with torch.autograd.profiler.record_function(name) as event:
        if hasattr(event, "_call_end_callbacks_on_future"):
            event._call_end_callbacks_on_future(future)


def spanned(name: str) -> AbstractContextManager[object]:
    """A span for a profiler, if one runs (torch.autograd._profiler_enabled, 2.11-2.15; else it sees none)."""
    enabled = find_once("autograd._profiler_enabled")
    return recording(name) if enabled is not None and enabled() else nullcontext()


def recording(name: str) -> AbstractContextManager[object]:
    """A span of this name for whoever observes: torch.autograd.profiler.record_function, by its functions in C++.

    torch.autograd._record_function_with_args_enter and _exit (2.11-2.15): 1.5 us instead of 6.
    """
    enter = find_once("autograd._record_function_with_args_enter")
    leave = find_once("autograd._record_function_with_args_exit")
    return _Span(name, enter, leave) if enter and leave else torch.autograd.profiler.record_function(name)


class _Span:
    __slots__ = ("_enter", "_handle", "_leave", "_name")

    def __init__(self, name: str, enter: Callable[[str], Any], leave: Callable[[Any], None]) -> None:
        self._name, self._enter, self._leave = name, enter, leave

    def __enter__(self) -> None:
        self._handle = self._enter(self._name)

    def __exit__(self, *_given: object) -> None:
        self._leave(self._handle)


def in_compiled_autograd() -> bool:
    """Whether backward is traced or run by compiled autograd (torch._dynamo.compiled_autograd, 2.11-2.15).

    The end of such a backward is not announced: callbacks for it are dropped. For what runs in backward only, and can
    be traced itself.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is None:
        return False
    return getattr(module, "compiled_autograd_enabled", False) or getattr(module, "in_compiled_autograd_region", False)


def compiled_autograd_may_come() -> bool:
    """Whether compiled autograd is on, or will be in what torch.compile has compiled (as above, 2.11-2.15)."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is None:
        return False
    enabled = getattr(module, "compiled_autograd_enabled", False)
    return bool(enabled or getattr(torch._dynamo.config, "compiled_autograd", False))


def take_missing_gradients() -> bool:
    """Have compiled autograd take hooks of nodes whose first gradient is missing; whether it had to be told.

    It looks for a hook's node among the users of the first gradient that the hook returns, and ends in StopIteration
    where there are none: that of an output that the loss has nothing of
    (torch._dynamo.compiled_autograd.AutogradCompilerInstance.reorder_pre_hook_nodes_to_mimic_eager, 2.11-2.15).
    """
    from torch._dynamo.compiled_autograd import AutogradCompilerInstance
    from torch._dynamo.external_utils import call_hook

    reorder = AutogradCompilerInstance.reorder_pre_hook_nodes_to_mimic_eager
    graph = torch.fx.Graph()
    hook = graph.call_function(call_hook, (graph.placeholder("hook"),), {"hook_type": "pre_hook"})
    _first, second = (graph.call_function(operator.getitem, (hook, i)) for i in (0, 1))
    graph.output(second)
    try:
        reorder(cast(Any, SimpleNamespace(fx_tracer=SimpleNamespace(graph=graph))))
        return False
    except StopIteration:
        pass

    @functools.wraps(reorder)
    def reorder_used(self: Any) -> None:
        graph = self.fx_tracer.graph
        for node in graph.find_nodes(op="call_function", target=call_hook):
            if node.kwargs.get("hook_type") == "pre_hook":
                for gradient in [user for user in node.users if not user.users]:
                    graph.erase_node(gradient)
        reorder(self)

    AutogradCompilerInstance.reorder_pre_hook_nodes_to_mimic_eager = reorder_used  # type: ignore[method-assign]
    return True


def will_run(*nodes: Any) -> bool:
    """Whether the backward that runs will execute all of these nodes (torch._C._will_engine_execute_node, 2.11-2.15).

    False for the AccumulateGrad nodes of parameters under torch.autograd.grad, and of those that
    backward(inputs=...) leaves out; the engine raises for a leaf whose gradient torch.autograd.grad will return.
    """
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return False


def in_transform() -> bool:
    """Whether a transform of torch.func runs, in which parameters show no end (torch._C._functorch, 2.11-2.15).

    Its own backward ends in what it was asked for, never in a parameter, and a backward() inside of it is refused.
    """
    return torch._C._functorch.maybe_current_level() is not None


def may_nest() -> bool:
    """Whether re-entrant checkpoints may run backwards of their own inside of the one that runs now.

    Variable._execution_engine.is_checkpoint_valid (2.11-2.15), of which they ask the same: False under
    torch.autograd.grad and backward(inputs=...). Those of compiled autograd tell no end.
    """
    return not in_compiled_autograd() and bool(torch.autograd.Variable._execution_engine.is_checkpoint_valid())


def is_nested() -> bool:
    """Whether the backward that runs was called in the backward of a torch.autograd.Function, as in such a checkpoint.

    Only the stack knows: torch.autograd.graph._engine_run_backward over function.BackwardCFunction.apply (2.11-2.15).
    Without these names it raises AttributeError: taken for no such backward, gradients would count as unused.
    """
    run, apply = torch.autograd.graph._engine_run_backward, torch.autograd.function.BackwardCFunction.apply
    frame, inside = sys._getframe(), False
    while frame.f_back is not None and not (inside and frame.f_code is apply.__code__):
        inside = inside or frame.f_code is run.__code__
        frame = frame.f_back
    return frame.f_back is not None


def in_distributed_autograd() -> bool:
    """Whether this thread is in a context of torch.distributed.autograd (_current_context, 2.11-2.15).

    There are such contexts only where an RPC agent runs, which costs less to ask
    (torch.distributed.rpc._is_current_rpc_agent_set, 2.11-2.15; without it the context alone is asked for).
    """
    is_running = find_once("distributed.rpc._is_current_rpc_agent_set")
    if not (is_running() if is_running is not None else torch.distributed.rpc.is_available()):
        return False
    try:
        cast(Any, torch.distributed.autograd)._current_context()
    except RuntimeError:
        return False
    return True


def has_hooks(*params: Tensor, own: int = 0) -> bool:
    """Whether anybody has put a hook on the gradient of one of these leaves: before accumulation
    (Tensor._backward_hooks, 2.11-2.15), or after it, besides so many of the caller's own on each.
    """
    return any(map(_before, params)) or max(counts_after(params), default=0) > own


def has_hooks_at_end(param: Tensor) -> bool:
    """Whether anybody has put a hook on the node that accumulates this leaf's gradient; inference tensors have none."""
    if not param.requires_grad or param.is_inference():
        return False
    with torch.inference_mode(False):  # in which nothing has a node
        return any(hooks_of(torch.autograd.graph.get_gradient_edge(param).node))


def hooks_after(param: Any) -> int:
    """How many hooks run when a parameter's gradient has been accumulated (._post_accumulate_grad_hooks, 2.11-2.15)."""
    return len(_after(param) or ())


def counts_after(params: Iterable[Tensor]) -> list[int]:
    """The same of each parameter that has any, without a step of Python for each: asked at every forward."""
    return [*map(len, filter(None, map(_after, params)))]


def hooks_of(node: Any) -> tuple[Mapping[int, object], ...]:
    """What holds the hooks before and after a node of autograd; each fills when somebody registers one.

    All hooks of a kind are in one dictionary, which handles refer to (RemovableHandle.hooks_dict_ref, 2.11-2.15);
    nothing tells of it otherwise. Empty where handles do not.
    """
    handles = [register(_ignore) for register in (node.register_prehook, node.register_hook)]
    held = [getattr(handle, "hooks_dict_ref", _ignore)() for handle in handles]
    for handle in handles:
        handle.remove()
    return tuple(hooks for hooks in held if hooks is not None)


def _ignore(*_gradients: object) -> None:
    pass


def register_after_grad(param: Tensor, hook: Callable[[Tensor], object]) -> torch.utils.hooks.RemovableHandle:
    """Register a post-accumulate-grad hook, also on a parameter that is frozen just now, which torch refuses.

    It stays on the tensor and is called again when the parameter is trained again; nothing private is needed.
    """
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    try:
        register: Any = param.register_post_accumulate_grad_hook
        handle: torch.utils.hooks.RemovableHandle = register(hook)
        return handle
    finally:
        if frozen:
            param.requires_grad_(False)


def remove_optimizer_hooks(params: Iterable[Tensor]) -> None:
    """Take off the hooks by which torch.distributed.optim steps optimizers in backward, before any reduction.

    torch.distributed.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map (2.11-2.15); there are none
    unless its `_apply_optimizer_in_backward` was called.
    """
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    handles = getattr(module, "param_to_optim_hook_handle_map", {})
    for param in params:
        for handle in handles.get(param, []):
            handle.remove()


def preserve_versions(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Leave version counters as they are while buffers are overwritten with what they hold on rank 0.

    torch.autograd._unsafe_preserve_version_counter (2.11-2.15): a buffer that a backward still needs may be synced
    before the next forward. Without it, autograd reports the change.
    """
    tensors = tuple(tensors)
    found = find("autograd._unsafe_preserve_version_counter")
    return cast(AbstractContextManager[None], found(tensors)) if found and tensors else nullcontext()
