"""Dynamo's question whose forward is running: for torch's own wrapper its DDPOptimizer cuts what is compiled then."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel


class Standing:
    """What Dynamo finds where it looks for torch's wrapper whose forward is running.

    Dynamo asks `DistributedDataParallel._active_ddp_module` at each compilation, and if there is one, has the graph
    compiled by torch._dynamo.backends.distributed.DDPOptimizer, made of its `bucket_bytes_cap` and the compiler that
    was chosen (torch._dynamo.convert_frame.CatchErrorsWrapper, 2.11-2.15; not with
    torch._dynamo.config.optimize_ddp=False). From the first time on that it is to find this one, the class makes of
    it what calls `compile`; all others it cuts as before.

    Args:
        is_asked: whether Dynamo shall find it now.
        compile: compiles a graph, given its inputs and the compiler that was chosen.
    """

    def __init__(
        self,
        is_asked: Callable[[], bool],
        compile: Callable[[Any, Sequence[Any], Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._is_asked, self.compile = is_asked, compile

    def stand(self) -> None:
        """Be found, but in a forward of torch's wrapper, which then is."""
        if DistributedDataParallel._active_ddp_module is None:
            DistributedDataParallel._active_ddp_module = self  # type: ignore[assignment]

    def __bool__(self) -> bool:
        asked = self._is_asked()
        if asked:
            _teach_optimizer()
        return asked

    @property
    def bucket_bytes_cap(self) -> "Standing":
        """What the optimizer is made of."""
        return self


class _Compiling:
    """What Dynamo takes for its DDPOptimizer."""

    def __init__(self, standing: Standing, compiler: Callable[..., Any]) -> None:
        self._standing, self._compiler = standing, compiler

    def compile_fn(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._standing.compile(graph, inputs, self._compiler)


@functools.cache
def _teach_optimizer() -> None:
    from torch._dynamo.backends import distributed

    class DDPOptimizer(distributed.DDPOptimizer):
        """Torch's own, but for whom torchshard stands."""

        def __new__(cls, bucket_bytes_cap: Any, backend_compile_fn: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(bucket_bytes_cap, Standing):
                return _Compiling(bucket_bytes_cap, backend_compile_fn)
            return super().__new__(cls)

    distributed.DDPOptimizer = DDPOptimizer  # type: ignore[misc]


def given_backend(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile was given, within what it puts around (torch._TorchCompileWrapper.compiler_fn, 2.11-2.15)."""
    given = getattr(compiler, "compiler_fn", compiler)
    while isinstance(given, functools.partial):
        given = given.func
    return given
