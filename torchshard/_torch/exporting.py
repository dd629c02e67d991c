"""torch.export: functions that an exported program calls as they are; whether anything is recorded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from torchshard._torch.dtensors import in_region, is_traced
from torchshard._torch.dynamo import leaves_of, tree_of

_Function = TypeVar("_Function", bound=Callable[..., Any])


def exported_whole(function: _Function) -> _Function:
    """Have torch.export take calls of this function for one operation, differentiable as the function is.

    Tracing before autograd knows wrapper subclasses only that came in from outside, or that it was told of: operators
    on others end in "Unable to cast NotImplemented to Tensor". So the function runs below that tracer, which is told of
    the call (torch._export.wrappers, 2.11-2.15, does the same for single classes of autograd.Function). Without it, the
    function is traced through.
    """

    @wraps(function)
    def call(*args: Any) -> Any:
        if not torch.compiler.is_exporting() or torch.compiler.is_dynamo_compiling():
            return function(*args)
        return _recorded(function, args)

    return cast(_Function, call)


def exports(x: torch.Tensor) -> bool:
    """Whether a tensor stands for an example that torch.export was given, of which nothing is recorded yet.

    (FakeTensorMode.fake_tensor_converter.export, 2.11-2.15: torch.compiler.is_exporting() does not cover that.)
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    converter = getattr(getattr(x, "fake_mode", None), "fake_tensor_converter", None)
    return bool(getattr(converter, "export", False)) and get_proxy_mode() is None


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of which some arguments come from the graph: those at the places `given` among the leaves of all."""

    function: Callable[..., Any]
    leaves: Sequence[Any]
    nesting: Any
    given: Sequence[int]

    def __call__(self, *values: Any) -> Any:
        leaves = list(self.leaves)
        for at, value in zip(self.given, values, strict=True):
            leaves[at] = value
        return self.function(*tree_of(leaves, self.nesting))


def _recorded(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        from torch._export.wrappers import _emit_flat_apply_call
        from torch._ops import _get_dispatch_mode_pre_dispatch
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
    except ImportError:
        return function(*args)
    keys, before = torch._C, torch._C.DispatchKey.PreDispatch
    mode = _get_dispatch_mode_pre_dispatch(keys._TorchDispatchModeKey.PROXY)
    if mode is None:
        return function(*args)
    include = keys._dispatch_tls_local_include_set().remove(before)
    exclude = keys._dispatch_tls_local_exclude_set() | keys.DispatchKeySet(before)
    # A fake view's memory is measured in symbols of its base, which the tracer does not know.
    with keys._ForceDispatchKeyGuard(include, exclude), disable_proxy_modes_tracing():
        result = function(*args)
    leaves, nesting = leaves_of(args)
    given = [at for at, leaf in enumerate(leaves) if isinstance(leaf, (torch.Tensor, torch.SymInt))]
    values = tuple([leaves[at] for at in given])
    fixed = [None if at in given else leaf for at, leaf in enumerate(leaves)]
    tracer, name = mode.tracer, f"torchshard_{function.__name__}"
    _emit_flat_apply_call(
        tracer=tracer, spec_name=name, const_target_for_apply=_Call(function, fixed, nesting, given),
        graphable_args=(values, {}), track_value=result,
        call_spec_cache_key=tracer.get_fresh_qualname(name),
    )  # fmt: skip
    return result


def is_recorded(x: torch.Tensor) -> bool:
    """Whether a graph is made with this tensor, rather than it being only fake, as in a bare FakeTensorMode.

    (torch.fx.experimental.proxy_tensor.get_proxy_mode, 2.11-2.15.)
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if in_region() or get_proxy_mode() is not None or torch.compiler.is_exporting():
        return is_traced(x)
    return is_traced(x) and not isinstance(x, FakeTensor)
