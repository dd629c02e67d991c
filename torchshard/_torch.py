"""The only file that touches private names of torch: each with its reason, the versions it was seen in, its fallback.

A name is looked for when it is first used; where it is missing, a public way takes its place. `without_fast_paths()`
switches the optional ones off, so that the fallbacks are tested as they are.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_fast_paths = True


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """Run the fallbacks instead of the optional private fast paths (for tests; what was looked up before stays)."""
    global _fast_paths
    _fast_paths = False
    try:
        yield
    finally:
        _fast_paths = True


def _find(path: str) -> Any:
    """The object at a dotted path below torch; None where it is missing or fast paths are off."""
    found: Any = torch if _fast_paths else None
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# ------------------------------------------------------------------------------------------------ process groups


def default_group() -> dist.ProcessGroup:
    """The default process group, or torch's own ValueError saying that there is none (2.11-2.15)."""
    from torch.distributed.distributed_c10d import _get_default_group

    return _get_default_group()


def group_store(group: dist.ProcessGroup) -> Store:
    """The store through which the group's ranks found each other (ProcessGroup.get_group_store, 2.11-2.15).

    There is no public way to it; without it an error says so.
    """
    return group.get_group_store()


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group's collectives may take (Backend.options, 2.11-2.15), else torch's default for all groups."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout


def group_of_members(ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """A process group made by its members alone; all of them call this, the others do not.

    dist.new_group(use_local_synchronization=True) names such a group by its ranks and by the number of groups that this
    process is in; members that are in different numbers of groups then wait for each other forever. Here the name is of
    the ranks, and of how often they have made one (torch.distributed.distributed_c10d._new_process_group_helper,
    2.11-2.15). Without that, the public way.

    Args:
        ranks: global ranks, in ascending order.
        device: of the tensors that will be sent; the default group's time limit for it is that of the new group.
    """
    from torch.distributed import distributed_c10d as c10d

    world = default_group()
    make, backend = getattr(c10d, "_new_process_group_helper", None), dist.get_backend(world)
    timeout = group_timeout(world, device)
    if not _fast_paths or make is None or backend == "fake":
        return cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout, use_local_synchronization=True))
    store, names = group_store(world), "_".join(map(str, ranks))
    turn = store.add(f"torchshard/groups/{names}/{dist.get_rank()}", 1)
    name = f"torchshard-{hashlib.sha1(names.encode(), usedforsecurity=False).hexdigest()}-{turn}"
    place, bound = list(ranks).index(dist.get_rank()), world.bound_device_id
    group: dist.ProcessGroup = make(
        len(ranks), place, list(ranks), dist.Backend(backend), store, name, timeout=timeout, device_id=bound
    )[0]
    c10d._world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(ranks)}
    return group


def stand_in(
    cls: type[Tensor], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor of a class that answers for its operators, without memory of its own (2.11-2.15).

    Tensor._make_wrapper_subclass is documented in torch's notes on extending it, in spite of its name.
    """
    return Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=device)


# ------------------------------------------------------------------------------------------------ autograd


def queue_callback(callback: Callable[[], None]) -> None:
    """Have the autograd engine call this when the backward that runs now is over.

    Variable._execution_engine.queue_callback (2.11-2.15); nothing public tells that a backward has ended.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_compiled_autograd() -> bool:
    """Whether backward is traced or run by compiled autograd (torch._dynamo.compiled_autograd, 2.11-2.15).

    The end of such a backward is not announced: callbacks for it are dropped.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return any(getattr(module, name, False) for name in ("compiled_autograd_enabled", "in_compiled_autograd_region"))


def will_run(node: Any) -> bool:
    """Whether the backward that runs now will execute this node (torch._C._will_engine_execute_node, 2.11-2.15).

    False for the AccumulateGrad nodes of parameters under torch.autograd.grad, and of those that
    backward(inputs=...) leaves out; the engine raises for a leaf whose gradient torch.autograd.grad will return.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def has_other_hooks(param: Tensor) -> bool:
    """Whether anybody but its reducer has put a hook on this parameter's gradient.

    Tensor._backward_hooks and ._post_accumulate_grad_hooks (2.11-2.15); of the latter the reducer has one itself.
    """
    after = getattr(param, "_post_accumulate_grad_hooks", None)
    return bool(param._backward_hooks) or (after is not None and len(after) > 1)


def register_after_grad(param: Tensor, hook: Callable[[Tensor], object]) -> torch.utils.hooks.RemovableHandle:
    """Register a post-accumulate-grad hook, also on a parameter that is frozen just now, which torch refuses.

    It stays on the tensor and is called again when the parameter is trained again; nothing private is needed.
    """
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    try:
        handle: torch.utils.hooks.RemovableHandle = param.register_post_accumulate_grad_hook(hook)
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


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target in one call (torch._foreach_copy_, 2.11-2.15); without it one by one."""
    found = _find("_foreach_copy_")
    if found:
        found(targets, sources)
    else:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def device_index(device: Any) -> int:
    """Number of a CUDA device given as int, str or torch.device (torch._utils._get_device_index, 2.11-2.15)."""
    from torch._utils import _get_device_index

    return _get_device_index(device, True)


# ------------------------------------------------------------------------------------------------ distributed tensors


def is_submesh(mesh: Any) -> bool:
    """Whether a device mesh was cut out of a larger one (DeviceMesh._get_root_mesh, 2.11-2.15)."""
    root = getattr(mesh, "_get_root_mesh", None)
    return bool(root is not None and root() != mesh)


def functional_collectives() -> Any:
    """The operators `torch.ops._c10d_functional` (2.11-2.15): collectives on a group's name, which compile traces.

    There is no public spelling of them; torch.distributed._functional_collectives wraps their results in a tensor
    subclass that waits lazily, at some 20 us a call.
    """
    return torch.ops._c10d_functional


def strided_shard() -> Any:
    """torch's placement for another nesting order of axes on one dim (2.11-2.15); FSDP2 makes them."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def norm_partial() -> Any:
    """torch's placement for terms of a p-norm (2.11-2.15)."""
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    return _NormPartial


def is_traced(x: Tensor) -> bool:
    """Whether a tensor only stands for one: values are not there, and ranks cannot be asked (2.11-2.15).

    There is no public test for fake and functional tensors; `torch.compiler.is_compiling` does not cover AOTAutograd.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(x, (FakeTensor, FunctionalTensor)) or torch._is_functional_tensor(x) or x.is_meta


def wrapper_constructor() -> Callable[[type[Tensor], Tensor, Any, bool], Tensor]:
    """The fastest way to make a wrapper subclass with slots `_local_tensor` and `_spec`.

    `torch.Tensor._dtensor__new__` (2.11-2.15, 0.7 us) is what torch's DTensor uses; it takes any subclass, and a spec
    with `tensor_meta.shape`, `.stride` and `.dtype`. Otherwise the public constructor, 1.4 us.
    """

    class Probe(Tensor):
        __slots__ = ("_local_tensor", "_spec")
        _local_tensor: Tensor

    class Meta:
        shape, stride, dtype = (4,), (1,), torch.float32

    class Spec:
        tensor_meta = Meta()

    fast = getattr(Tensor, "_dtensor__new__", None)
    if _fast_paths and fast is not None:
        try:
            local = torch.zeros(2)
            made = fast(Probe, local, Spec(), False)
            if type(made) is Probe and made.shape == (4,) and made._local_tensor is local:
                return fast  # type: ignore[no-any-return]
        except (TypeError, AttributeError, RuntimeError):
            pass
    return _portable_constructor


def _portable_constructor(cls: type[Tensor], local: Tensor, spec: Any, requires_grad: bool) -> Tensor:
    made: Any = Tensor._make_wrapper_subclass(
        cls,
        spec.shape,
        strides=spec.stride,
        dtype=spec.dtype,
        device=local.device,
        requires_grad=requires_grad,
    )
    made._local_tensor, made._spec = local, spec
    return made  # type: ignore[no-any-return]


def current_mesh() -> Any:
    """The DeviceMesh of the surrounding `with mesh:` (2.11-2.15 keep it in a private stack).

    Raises:
        RuntimeError: there is none.
    """
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_current_mesh()


def local_callable(func: Any) -> Callable[..., Any]:
    """What to call for an ATen operator on local tensors.

    torch's own Python binding where there is one: it parses arguments in half the time of an OpOverload (1.1 against
    1.95 us for add; 2.11-2.15). Bindings take the same arguments in the same order, but take the default reduction of
    a loss for "none".
    """
    if _fast_paths and func.namespace == "aten" and not any(a.name == "reduction" for a in func._schema.arguments):
        name = func._overloadpacket.__name__
        for home in (torch._C._VariableFunctions, torch._C.TensorBase):
            found = getattr(home, name, None)
            if found is not None:
                return found  # type: ignore[no-any-return]
    return func  # type: ignore[no-any-return]


def in_backward() -> bool:
    """Whether the autograd engine is running in this thread (2.11-2.15)."""
    return torch._C._current_graph_task_id() != -1


def introduce(cls: type[Tensor]) -> None:
    """Tell torch's optimizers of a third-party tensor class; done on first use.

    They use their foreach kernels only for the classes in a private list (2.11-2.15; AdamW silently loops on others).
    """
    from torch.optim.optimizer import _foreach_supported_types as by_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as by_utilities

    for supported in (by_optimizers, by_utilities):
        if cls not in supported:
            supported.append(cls)


def decomposition(func: Any) -> Callable[..., Any] | None:
    """What an operator is made of where ATen composes it of others for every backend; None where it does not.

    Such operators reach a tensor subclass whole only in inference mode (OpOverload.decompose, 2.11-2.15).
    """
    return func.decompose if func._can_decompose() else None


def operator_names(func: Any) -> tuple[str, str]:
    """Name and overload of an ATen operator: ("add", "Tensor") (2.11-2.15; func.name() has other spellings)."""
    return func._overloadpacket.__name__, func._overloadname


def operator_in(ops: Any, name: str) -> Any:
    """The operator of a name such as "mm", "mm.out" or "mylib::scale", below torch.ops (2.11-2.15).

    All its overloads where the name tells none.

    Raises:
        AttributeError: there is none.
    """
    space, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(ops, space or "aten"), packet)
    return getattr(found, overload) if overload else found


def one_operator(op: Any) -> Any:
    """The overload that is meant by a name, an overload, all overloads (the default one) or a custom_op (2.11-2.15).

    Raises:
        TypeError: none of these.
        AttributeError: there is no operator of this name, or several overloads without a default one.
    """
    found = operator_in(torch.ops, op) if isinstance(op, str) else op
    found = getattr(found, "_opoverload", found)  # of a CustomOpDef
    if isinstance(found, torch._ops.OpOverloadPacket):
        overloads = found.overloads()
        return getattr(found, overloads[0] if len(overloads) == 1 else "default")
    if not isinstance(found, torch._ops.OpOverload):
        raise TypeError(f"expected an operator, such as torch.ops.aten.mm.default or its name, not {op!r}")
    return found


def schema(func: Any) -> Any:
    """Arguments and returns of an operator, with what they alias and write (OpOverload._schema, 2.11-2.15)."""
    return func._schema


def is_view(x: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another (Tensor._is_view, 2.11-2.15)."""
    return x._is_view()


def below_dispatch() -> Any:
    """Operators see a tensor subclass as its wrapper alone in this context (torch._C._DisableTorchDispatch)."""
    return torch._C._DisableTorchDispatch()


def lacks_fake(error: RuntimeError) -> bool:
    """Whether a torch.library.custom_op refused meta tensors because it has no register_fake.

    Such an operator raises a plain RuntimeError (2.11-2.15), where others without a meta kernel raise
    NotImplementedError; only the message tells.
    """
    return "no fake impl registered" in str(error)


def intercepting(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[None]:
    """A context in which every operator of this thread, those of backward too, becomes run(operator, args, kwargs).

    torch.utils._python_dispatch.TorchDispatchMode (2.11-2.15); there is no public way to see operators below autograd.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Intercepting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return run(func, args, kwargs or {})

    mode: Any = Intercepting
    return cast(AbstractContextManager[None], mode())


def no_torch_function() -> Any:
    """What a tensor class without torch functions of its own has as __torch_function__ (2.11-2.15)."""
    return torch._C._disabled_torch_function_impl


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


def current_node() -> Any:
    """The autograd node that runs now in this thread, None outside of backward (torch._C, 2.11-2.15).

    Without it compiled graphs cannot know whose gradients they make; hooks then reduce them.
    """
    found = _find("_C._current_autograd_node")
    return found() if found and in_backward() else None


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and how they were nested (torch.utils._pytree, 2.11-2.15; 2.11 has no other)."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def tree_of(leaves: Sequence[Any], nesting: Any) -> Any:
    """Containers nested as `leaves_of` has found it, with these leaves (torch.utils._pytree, 2.11-2.15)."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, nesting)


def leaf_of_gradient() -> Any:
    """The leaf whose gradient the autograd node that runs now makes first, as of AccumulateGrad.variable (2.11-2.15).

    None where that is no leaf, or outside of backward.
    """
    node = current_node()
    edges = node.next_functions if node is not None else ()
    return getattr(edges[0][0], "variable", None) if edges else None


def backend_by_name(name: str) -> Callable[..., Any]:
    """The compiler that `torch.compile(backend=name)` would call (torch._dynamo.lookup_backend, 2.11-2.15).

    Raises:
        ValueError: there is none of that name.
    """
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return cast(Callable[..., Any], lookup_backend(name))
    except InvalidBackend:
        raise ValueError(name) from None


def inductor_options() -> set[str]:
    """Names of all options of inductor (torch._inductor.config, as torch._inductor.list_options, 2.11-2.15)."""
    import torch._inductor

    return set(torch._inductor.list_options())


def inductor_patches(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """What torch.compile would give inductor for this mode and these options, both checked by torch itself.

    torch._TorchCompileInductorWrapper (2.11-2.15) holds it as `.config`.

    Raises:
        RuntimeError: an unknown mode, or a value of a wrong type.
    """
    return dict(torch._TorchCompileInductorWrapper(mode, options, None).config)


def compile_with_inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any], rewrite: "GraphPass | None" = None
) -> Callable[..., Any]:
    """Compile what Dynamo hands to a backend (torch._inductor.compile_fx.compile_fx, 2.11-2.15).

    Args:
        graph: as Dynamo made it.
        inputs: as Dynamo gave them.
        patches: options of inductor for this graph only.
        rewrite: what to do with each graph after inductor's own passes, forward and backward.
    """
    from torch._inductor.compile_fx import compile_fx

    if rewrite is not None:
        patches = {**patches, "post_grad_custom_post_pass": _inductor_pass(rewrite)}
    return cast(Callable[..., Any], compile_fx(graph, inputs, config_patches=patches))


class GraphPass(Protocol):
    """What rewrites a graph, and what it depends on besides the graph."""

    key: object

    def __call__(self, graph: torch.fx.Graph) -> None: ...


def _inductor_pass(rewrite: GraphPass) -> Any:
    """A CustomGraphPass (2.11-2.15), after those that the user has configured; its uuid is part of the cache's key."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    configured = config.post_grad_custom_post_pass
    several = configured if isinstance(configured, list | tuple) else [configured]
    before = [given for given in several if given is not None]

    class Composed(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for given in before:
                given(graph)
            rewrite(graph)

        def uuid(self) -> Any:
            keys = [given.uuid() if isinstance(given, CustomGraphPass) else None for given in before]
            return None if None in keys else (*keys, rewrite.key)

    return Composed()


def gradient_outputs(graph: torch.fx.Graph) -> list[tuple[int, torch.fx.Node, int]]:
    """The gradients of graph inputs among the outputs of a backward graph, after AOTAutograd.

    Position among the outputs, node, and position of the input in Dynamo's graph (AOTAutograd's descriptors,
    2.11-2.15). Without descriptors, none: hooks then reduce these gradients.
    """
    try:
        from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
    except ImportError:
        return []
    output = graph.output_node()
    return [
        (position, node, made.grad_of.idx)
        for position, (node, made) in enumerate(zip(output.args[0], output.meta.get("desc") or (), strict=False))  # type: ignore[arg-type]
        if isinstance(node, torch.fx.Node)
        and isinstance(made, GradAOTOutput)
        and isinstance(made.grad_of, PlainAOTInput)
    ]


def compile_pieces(
    whole: torch.fx.GraphModule,
    pieces: torch.fx.GraphModule,
    compiler: Callable[..., Callable[..., Any]],
    inputs: Sequence[Any],
) -> Callable[..., Any]:
    """Compile the pieces of a split graph one by one, each with inputs as the compiled ones before it make them.

    What torch's DDPOptimizer does with the pieces that it makes (torch._dynamo.backends.distributed, 2.11-2.15):
    sources and metadata of Dynamo are carried over, the graphs go to torch's trace artifacts.

    Args:
        whole: the graph before it was split.
        pieces: what torch.fx.passes.split_module made of it.
        compiler: called with each piece and its inputs.
        inputs: of the whole.
    """
    from torch._dynamo.backends import distributed as theirs
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
    from torch._guards import detect_fake_mode
    from torch._logging._internal import trace_structured
    from torch._subclasses.fake_tensor import FakeTensorMode

    children = {name: child for name, child in pieces.named_children() if isinstance(child, torch.fx.GraphModule)}
    theirs.propagate_dynamo_source(whole, pieces)
    theirs.propagate_metadata(whole, pieces)
    theirs.ddp_graph_log.debug("whole:\n%s\nsplit:\n%s", whole.graph, pieces.graph)
    trace_structured("optimize_ddp_split_graph", payload_fn=lambda: pieces.print_readable(print_output=False))
    for name, child in children.items():
        trace_structured(
            "optimize_ddp_split_child",
            lambda name=name: {"name": name},  # type: ignore[misc]
            payload_fn=lambda child=child: child.print_readable(print_output=False),  # type: ignore[misc]
        )
    fake_mode = detect_fake_mode(inputs) or FakeTensorMode()
    with _disable_saved_tensors_hooks_during_tracing():
        theirs.SubmodCompiler(pieces, compiler, fake_mode).run(*inputs)
    pieces.recompile()
    return pieces


def source_name(node: torch.fx.Node) -> str:
    """What the user calls the parameter that comes in at this node of Dynamo's graph, as in "layers.0.weight".

    Node._dynamo_source (2.11-2.15) says where Dynamo has found it; without it, the node's own name.
    """
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    text = name() if callable(name) else name
    quoted = re.findall(r"\['([^']*)'\]", text or "")
    return ".".join(quoted[1:]) or node.name


def trace_backward(graph: torch.fx.GraphModule, inputs: Sequence[Any], rewrite: GraphPass) -> Callable[..., Any]:
    """Trace forward and backward as inductor does, rewrite the backward, and run both node by node.

    AOTAutograd with inductor's decompositions, partitioner and graph passes (torch._inductor.fx_passes, 2.11-2.15).
    Nothing is compiled, so that a plan can be shown in a second. AOTAutograd would leave the backward for later
    (torch._functorch.config.force_non_lazy_backward_lowering, 2.11-2.15).
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def in_fake_mode(module: torch.fx.GraphModule) -> Any:
        values = (node.meta.get("val") for node in module.graph.nodes)
        found = next((x.fake_mode for x in values if isinstance(x, FakeTensor)), None)
        return V.set_fake_mode(found or FakeTensorMode())

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        with in_fake_mode(joint):
            joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def backward(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        passes = {"post_grad_custom_post_pass": _inductor_pass(rewrite)}
        with in_fake_mode(module), torch._inductor.config.patch(passes):
            post_grad_passes(module, is_inference=False)
        module.recompile()
        return make_boxed_func(module.forward)

    compiler = aot_autograd(
        fw_compiler=lambda module, _inputs: make_boxed_func(module.forward),
        bw_compiler=backward,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        return compiler(graph, inputs)
