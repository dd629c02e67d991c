"""The only file that touches private names of torch: each with its reason, the versions it was seen in, its fallback.

Every function here is feature-tested when first used. `without_fast_paths()` switches the optional ones off, so that
the fallbacks are tested as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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

    return isinstance(x, FakeTensor) or torch._is_functional_tensor(x) or x.is_meta


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
    1.95 us for add; 2.11-2.15). Bindings take the same arguments in the same order.
    """
    if _fast_paths and func.namespace == "aten":
        name = func._overloadpacket.__name__
        for home in (torch._C._VariableFunctions, torch._C.TensorBase):
            found = getattr(home, name, None)
            if found is not None:
                return found  # type: ignore[no-any-return]
    return func  # type: ignore[no-any-return]


def in_backward() -> bool:
    """Whether the autograd engine is running in this thread (2.11-2.15)."""
    return torch._C._current_graph_task_id() != -1


def introduce(cls: type[Tensor], safe: list[Any]) -> None:
    """Tell torch what it must know of a third-party tensor class; done on first use.

    Its optimizers use their foreach kernels only for the classes in a private list (2.11-2.15; AdamW silently loops on
    others), and the default torch.load makes only objects of classes that it knows.
    """
    from torch.optim.optimizer import _foreach_supported_types as by_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as by_utilities

    for supported in (by_optimizers, by_utilities):
        if cls not in supported:
            supported.append(cls)
    torch.serialization.add_safe_globals([cls, *safe])


def decomposition(func: Any) -> Callable[..., Any] | None:
    """What an operator is made of where ATen composes it of others for every backend; None where it does not.

    Such operators reach a tensor subclass whole only in inference mode (OpOverload.decompose, 2.11-2.15).
    """
    return func.decompose if func._can_decompose() else None


def operator_names(func: Any) -> tuple[str, str]:
    """Name and overload of an ATen operator: ("add", "Tensor") (2.11-2.15; func.name() has other spellings)."""
    return func._overloadpacket.__name__, func._overloadname


def schema(func: Any) -> Any:
    """Arguments and returns of an operator, with what they alias and write (OpOverload._schema, 2.11-2.15)."""
    return func._schema


def no_torch_function() -> Any:
    """What a tensor class without torch functions of its own has as __torch_function__ (2.11-2.15)."""
    return torch._C._disabled_torch_function_impl
