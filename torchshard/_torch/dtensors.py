"""Subclasses of tensors: made cheaply, recognised by torch, and torch's own DTensor and meshes."""

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchshard._torch.finding import find, find_once, has_fast_paths
from torchshard._torch.frames import skip_alone
from torchshard._torch.lengths import (
    bind_lengths_of_parts,
    bound_lengths_of_formulas,
    record_lengths,
    return_lengths_as_looked_at,
)

_Wrapper = TypeVar("_Wrapper", bound=Tensor)


def strided_shard() -> Any:
    """torch's placement for another nesting order of axes on one dim (2.11-2.15); FSDP2 makes them."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def norm_partial() -> Any:
    """torch's placement for terms of a p-norm (2.11-2.15)."""
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    return _NormPartial


def orders_of_axes(x: Tensor) -> dict[int, tuple[int, ...]]:
    """By dim, the order in which axes split one of torch's DTensors (DTensorSpec.shard_order, 2.11-2.15)."""
    return {dim: tuple(axes) for dim, axes in getattr(x._spec, "shard_order", None) or ()}  # type: ignore[attr-defined]


def lie_with_others(wrapper: _Wrapper, local: Tensor) -> _Wrapper:
    """Where a wrapper stands for one in a trace, let those have the same memory whose local tensors have; returns it.

    AOTAutograd looks there for inputs that a write to another input changes, and refuses what it cannot keep up with
    (2.11-2.15).
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(local, FakeTensor):
        first = _by_memory.setdefault(local.untyped_storage()._cdata, wrapper)
        if first is not wrapper:
            torch._functionalize_unsafe_set(wrapper, first)
    return wrapper


_by_memory: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()


def is_traced(x: Tensor) -> bool:
    """Whether a tensor only stands for one: values are not there, and ranks cannot be asked (2.11-2.15).

    There is no public test for fake and functional tensors; `torch.compiler.is_compiling` does not cover AOTAutograd.
    """
    if type(x) is Tensor:
        return torch._is_functional_tensor(x) or x.is_meta
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(x, (FakeTensor, FunctionalTensor)) or torch._is_functional_tensor(x) or x.is_meta


def in_region() -> bool:
    """Whether torch.compile, or torch.export, makes a graph now.

    (torch._guards.TracingContext, 2.11-2.15: torch.compiler.is_compiling() says so in functions that Dynamo only calls
    since 2.13.)
    """
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def is_compiled(x: Tensor) -> bool:
    """Whether torch.compile traces with this tensor."""
    return in_region() and is_traced(x) and not torch.compiler.is_exporting()


def notes_of_trace() -> dict[Any, Any] | None:
    """Where to keep what is known of the tensors of the graph that is recorded now, as long as that lasts.

    (torch.fx.experimental.proxy_tensor.get_proxy_mode, 2.11-2.15.) None where no graph is, or none that could tell.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    tracer = getattr(get_proxy_mode(), "tracer", None)
    return None if tracer is None else vars(tracer).setdefault("_torchshard_notes", {})


def traced_value(x: Tensor) -> Tensor | None:
    """What a tensor is in the graph that is recorded now, until it is written to; None where the graph has writes.

    (torch._sync, torch._from_functional_tensor, 2.11-2.15.)
    """
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(x, FunctionalTensor):
        return None
    torch._sync(x)  # type: ignore[attr-defined, no-untyped-call]
    return torch._from_functional_tensor(x.elem)


def standing_for(value: Tensor) -> Tensor:
    """A tensor with this value in the graph, to which writing changes no other (2.11-2.15)."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FunctionalTensor.to_functional(value)


def is_referred_to(x: Tensor) -> bool:
    """Whether more than a name of Python's holds a tensor, as views of it do (Tensor._use_count, 2.11-2.15)."""
    return bool(x._use_count() > 1)  # type: ignore[attr-defined]


def exchange(x: Tensor, y: Tensor) -> None:
    """Let two objects of a class with slots stand for one another's tensors; each keeps its attributes otherwise.

    What torch.utils.swap_tensors does of tensors that nobody refers to (torch._C._swap_tensor_impl, 2.11-2.15).
    """
    for name in type(x).__slots__:  # type: ignore[attr-defined]
        mine, theirs = (getattr(t, name, _MISSING) for t in (x, y))
        for t, value in ((x, theirs), (y, mine)):
            if value is not _MISSING:
                setattr(t, name, value)
            elif hasattr(t, name):
                delattr(t, name)
    torch._C._swap_tensor_impl(x, y)


_MISSING = object()


def real_object(x: Any) -> Any:
    """What stands behind an opaque object of a trace (torch._library: FakeScriptObject.real_obj, 2.11-2.15).

    It passes for the object itself, but holds what cannot be pickled. Anything else is given back.
    """
    from torch._library.fake_class_registry import FakeScriptObject

    return object.__getattribute__(x, "real_obj") if type(x) is FakeScriptObject else x


def expected(n: int) -> int:
    """A length as a plain number: of a symbolic one what it is in this run, without a guard (SymNode.hint, 2.11-2.15).

    For estimates only. Without a hint the graph is specialised to the number.
    """
    hint = getattr(getattr(n, "node", None), "hint", None)
    return hint if isinstance(hint, int) else int(n)


def number(n: int) -> int:
    """A length as a plain number, where it can only be one (SymNode.expr, 2.11-2.15); others as they are.

    A trace has such lengths as symbols still, and cannot record what is computed of them.
    """
    expression = getattr(getattr(n, "node", None), "expr", None)
    return int(n) if getattr(expression, "is_number", False) else n


class _FirstKept(dict[Any, Any]):
    """A dict whose entries stay what they were at first."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.setdefault(key, value)


def mend_trace(n: Any) -> None:
    """Before a tensor with the symbolic length n is traced: what the tracer of 2.11-2.15 does wrong with such.

    The tracer takes each result that is a symbol (4 s / 4) for the definition of that symbol from then on, and recurses
    where such a result depends on the symbol again: in this trace a symbol stays what it was at first. And where sizes
    of local tensors have symbols of their own, guards of inductor's cached graphs name inputs that the graph does not
    have, which is a KeyError: such a graph is not taken from the cache. Either is an attribute of one trace's objects.
    Of a view that comes in, the tracer knows a length 7 s, but not s, of which other lengths are made: it is told.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    known = getattr(tracer, "sympy_expr_tracker", None)
    if type(known) is dict:
        known = tracer.sympy_expr_tracker = _FirstKept(known)
    if known is not None and n in tracer.symnode_tracker:
        times, symbol = n.node.expr.as_coeff_Mul()
        if times != 1 and symbol.is_Symbol and symbol not in known:
            n // int(times)
    shapes: Any = getattr(getattr(n, "node", None), "shape_env", None)
    evaluate = getattr(shapes, "evaluate_guards_expression", None)
    if evaluate is not None and not isinstance(evaluate, _OfKnownInputs):
        shapes.evaluate_guards_expression = _OfKnownInputs(evaluate)
    record_lengths()
    bind_lengths_of_parts()
    return_lengths_as_looked_at()
    bound_lengths_of_formulas()
    mend_strides_of_results()


def mend_strides_of_results() -> bool:
    """Have graphs give a wrapper the strides that they compute for it; whether this torch had to be mended (2.11).

    Its SubclassCreationMeta takes numbers of sizes for those of strides too; either has None where a graph computes.
    """
    meta = find("_functorch._aot_autograd.schemas.SubclassCreationMeta.compute_outer_size_and_stride")
    ask = SimpleNamespace(outer_size=(None,), outer_stride=(None,))
    if meta is None or meta(ask, (2, 3), curr_start_idx=0) == ((2,), (3,)):
        return False
    from torch._functorch._aot_autograd import schemas

    @skip_alone  # called behind a graph break, too
    def sizes_and_strides(self: Any, given: Sequence[Any], *, curr_start_idx: int) -> tuple[Any, ...]:
        numbers = iter(given[curr_start_idx:])
        outer = self.outer_size, self.outer_stride
        return tuple([tuple([next(numbers) if n is None else n for n in lengths]) for lengths in outer])

    schemas.SubclassCreationMeta.compute_outer_size_and_stride = sizes_and_strides  # type: ignore
    return True


class _OfKnownInputs:
    """ShapeEnv.evaluate_guards_expression, false where an input is named that there is not."""

    def __init__(self, evaluate: Callable[..., bool]) -> None:
        self.evaluate = evaluate

    def __call__(self, code: str, args: Any) -> bool:
        try:
            return self.evaluate(code, args)
        except KeyError:
            return False


def unrecorded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of lengths; a trace does not record what it computes (disable_proxy_modes_tracing, 2.11-2.15).

    Results are traced from their formulas where they are used: 4 s / 4 is then s itself, a size of an input.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing():
        return function(*args, **kwargs)


def asked(function: Callable[..., Any], *args: Any) -> None:
    """As above, of a function that asks of lengths what is best in this run: graphs are made anew where that turns."""
    if renewed():
        unrecorded(function, *args)


def renewed() -> bool:
    """Whether graphs are made anew for other lengths; an exported program keeps what it has for all of them."""
    return not torch.compiler.is_exporting()


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
    if has_fast_paths() and fast is not None:
        try:
            local = torch.zeros(2)
            made = fast(Probe, local, Spec(), False)
            if type(made) is Probe and made.shape == (4,) and made._local_tensor is local:
                return fast  # type: ignore[no-any-return]
        except (TypeError, AttributeError, RuntimeError):
            pass
    return portable_constructor


def portable_constructor(cls: type[Tensor], local: Tensor, spec: Any, requires_grad: bool) -> Tensor:
    """A wrapper subclass with slots `_local_tensor` and `_spec`, whose storage offset is 0, not that of `local`.

    Where values of `local` are conjugated or negated when they are read, those of the wrapper are
    (torch._C._set_conj, _set_neg, 2.11-2.15), as the fast constructor has it: autograd asks the wrapper.
    """
    made: Any = Tensor._make_wrapper_subclass(
        cls,
        spec.shape,
        strides=spec.stride,
        dtype=spec.dtype,
        device=local.device,
        requires_grad=requires_grad,
    )
    made._local_tensor, made._spec = local, spec
    if local.is_conj():
        torch._C._set_conj(made, True)
    if local.is_neg():
        torch._C._set_neg(made, True)
    return made  # type: ignore[no-any-return]


def current_mesh() -> Any:
    """The DeviceMesh of the surrounding `with mesh:` (2.11-2.15 keep it in a private stack).

    Raises:
        RuntimeError: there is none.
    """
    from torch.distributed.device_mesh import _mesh_resources

    try:
        return _mesh_resources.get_current_mesh()
    except RuntimeError as error:
        raise RuntimeError(
            "No mesh is given, and there is no surrounding `with mesh:`; give device_mesh=, for example "
            'init_device_mesh("cpu", (world_size,))'
        ) from error


def takes_plain_for_replicated() -> bool:
    """Whether torch has its own DTensors take plain tensors for replicated ones at this moment.

    So in its `implicit_replication()`, and in operators that make plain tensors of numbers alone, as one_hot does
    (torch._C._get_dtensor_allow_implicit_replication, 2.12-2.15; without it, these are refused).
    """
    asked = find_once("_C._get_dtensor_allow_implicit_replication")
    return asked is not None and bool(asked())


def introduce(cls: type[Tensor]) -> None:
    """Tell torch's optimizers of a third-party tensor class; done on first use.

    They use their foreach kernels only for the classes in a private list (2.11-2.15; AdamW silently loops on others).
    """
    from torch.optim.optimizer import _foreach_supported_types as by_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as by_utilities

    for supported in (by_optimizers, by_utilities):
        if cls not in supported:
            supported.append(cls)


def root_mesh(mesh: Any) -> Any:
    """The mesh that a device mesh was cut out of, or itself (DeviceMesh._get_root_mesh, 2.11-2.15)."""
    return mesh._get_root_mesh()


def bring_home(mesh: Any) -> None:
    """Have a mesh that was pickled, and the one that it was cut out of, be of this process.

    They keep their hash with what is pickled, and it is of strings, which hash otherwise in each process
    (DeviceMesh._hash, 2.11-2.15). Their ranks are a tensor, which torch.load(map_location="meta") leaves without
    values, as it does all tensors, and for which Dynamo stores something else with its guards; the numbers are kept
    beside it (_rank_map, _flatten_rank_map, 2.11-2.15). Without these names meshes stay as they are loaded.
    """
    for kept in (mesh, root_mesh(mesh)):
        if hasattr(kept, "_hash"):
            kept._hash = None
        numbers, ranks = getattr(kept, "_flatten_rank_map", None), getattr(kept, "_rank_map", None)
        if numbers is not None and ranks is not None:
            kept._rank_map = torch.tensor(numbers, dtype=getattr(ranks, "dtype", torch.int), device="cpu")


def graphs_are_shared() -> bool:
    """Whether graphs that this rank compiles are to run on others, and so to hold none of its numbers.

    (compile_on_one_rank of torch.distributed.config, 2.12-2.13, and of torch.compiler.config, 2.14-2.15, which warn of
    the former.)
    """
    name, rooms = "compile_on_one_rank", [getattr(each, "config", None) for each in (torch.compiler, torch.distributed)]
    return bool(next((getattr(room, name) for room in rooms if hasattr(room, name)), False))


def is_on_its_way(x: Tensor) -> bool:
    """Whether that is what torch's functional collectives return before they end.

    (torch.distributed._functional_collectives.AsyncCollectiveTensor, 2.11-2.15.) Copies, pickles and whatever takes its
    memory do not wait for it.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return isinstance(x, AsyncCollectiveTensor)


@skip_alone  # a hook of gradients
def waited(x: Tensor) -> Tensor:
    """The tensor itself; the one that it brings, where it is on its way."""
    return x.wait() if x.__class__ is not Tensor and is_on_its_way(x) else x  # type: ignore[attr-defined]
