"""The pieces of a graph that was split, compiled one by one."""

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


def compile_pieces(
    whole: torch.fx.GraphModule,
    pieces: torch.fx.GraphModule,
    compiler: Callable[..., Callable[..., Any]],
    inputs: Sequence[Any],
) -> Callable[..., Any]:
    """Compile the pieces of a split graph one by one, each with inputs as those before it make them.

    Sources and metadata of Dynamo are carried over, and the graphs go to torch's trace artifacts, with functions of
    torch's DDPOptimizer (torch._dynamo.backends.distributed, 2.11-2.15). How it learns what a compiled piece returns
    (TracingContext.fakify_first_call) takes results of a wrapper subclass for plain tensors, and keeps pieces out of
    AOTAutograd's cache. So here a piece runs on fake tensors; inductor keeps the strides that results have there
    (torch._inductor.config.keep_output_stride, 2.11-2.15). Tokens of ordered effects stay inside of a piece as with
    inductor (torch._functorch.config.unlift_effect_tokens, 2.11-2.15): other compilers would give them to the next
    piece in place of values.

    Args:
        whole: the graph before it was split.
        pieces: what torch.fx.passes.split_module made of it; the compiled pieces take their places in it.
        compiler: called with each piece and its inputs.
        inputs: of the whole.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo.backends import distributed as theirs
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
    from torch._logging._internal import trace_structured

    theirs.propagate_dynamo_source(whole, pieces)
    theirs.propagate_metadata(whole, pieces)
    theirs.ddp_graph_log.debug("whole:\n%s\nsplit:\n%s", whole.graph, pieces.graph)
    trace_structured("optimize_ddp_split_graph", payload_fn=lambda: pieces.print_readable(print_output=False))
    for node in pieces.graph.find_nodes(op="call_module"):
        child: Any = pieces.get_submodule(node.target)
        trace_structured(
            "optimize_ddp_split_child",
            lambda name=node.target: {"name": name},  # type: ignore[misc]
            payload_fn=lambda child=child: child.print_readable(print_output=False),  # type: ignore[misc]
        )
    with (
        _disable_saved_tensors_hooks_during_tracing(),
        torch._functorch.config.patch(unlift_effect_tokens=True),
        torch._inductor.config.patch(keep_output_stride=True),
    ):
        _Compiling(pieces, compiler, inputs).run(*inputs)
    return pieces


class _Compiling(torch.fx.Interpreter):
    """Runs a split graph on fake tensors, and has each piece compiled when its inputs are there.

    Args:
        pieces: the graph; compiled pieces take the places of the others.
        compiler: called with each piece and its inputs.
        inputs: of the graph.
    """

    def __init__(self, pieces: torch.fx.GraphModule, compiler: Callable[..., Any], inputs: Sequence[Any]) -> None:
        from torch._guards import detect_fake_mode
        from torch._subclasses.fake_tensor import FakeTensorMode

        super().__init__(pieces)
        self._compiler, self._fake_mode = compiler, detect_fake_mode(inputs) or FakeTensorMode()
        self._left = len(pieces.graph.find_nodes(op="call_module"))

    def run_node(self, n: torch.fx.Node) -> Any:
        """Nobody needs what follows the last piece, nor what that returns."""
        return super().run_node(n) if self._left else None

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile a piece, and run it as it was."""
        piece: Any = self.fetch_attr(target)
        given = [self._faked(arg) for arg in args]
        output = piece.graph.output_node()
        single = not isinstance(output.args[0], tuple)
        if single:
            output.args = (output.args,)  # all that backends are given return tuples
            piece.recompile()
        piece.compile_subgraph_reason = _reason()
        with _own_context():
            compiled = self._compiler(piece, given)
        setattr(self.module, target, _Piece(compiled, single))
        self._left -= 1
        if not self._left:
            return None
        results = self._run(piece, given)
        return results[0] if single else results

    def _faked(self, value: Any) -> Any:
        from torch._dynamo.utils import to_fake_tensor
        from torch._subclasses.fake_tensor import is_fake

        is_real = isinstance(value, torch.Tensor) and not is_fake(value)
        return to_fake_tensor(value, self._fake_mode) if is_real else value

    def _run(self, piece: torch.fx.GraphModule, given: Sequence[Any]) -> Any:
        """What a piece returns; sizes and numbers that follow from values are those that Dynamo has given names.

        PropagateUnbackedSymInts, ShapeEnv.ignore_fresh_unbacked_symbols (torch.fx.experimental.symbolic_shapes);
        FakeTensorMode.epoch, as what such a number was called before is remembered, and allow_non_fake_inputs, for
        constants (2.11-2.15).
        """
        from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts

        mode = self._fake_mode
        before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
        mode.epoch += 1
        try:
            with (
                mode,
                torch.set_grad_enabled(torch.is_grad_enabled()),  # nodes of the piece may change it
                mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else nullcontext(),
            ):
                return PropagateUnbackedSymInts(piece).run(*given)
        finally:
            mode.allow_non_fake_inputs = before


class _Piece(torch.nn.Module):
    """A compiled piece, which returns a tuple, in place of one that returns a single result or several."""

    def __init__(self, compiled: Callable[..., Any], single: bool) -> None:
        super().__init__()
        self.compiled, self.single = compiled, single

    def forward(self, *args: Any) -> Any:
        results = self.compiled(*args)
        return results[0] if self.single else results


@contextmanager
def _own_context() -> Iterator[None]:
    """Give a piece a context of its own: its backward, compiled later, finds there what its forward has noted.

    torch._guards.TracingContext, of which the current one is torch._guards._TLS.tracing_context (2.11-2.15);
    torch._guards.tracing would forget the stacks of symbols.
    """
    from torch._guards import _TLS, TracingContext

    outer = TracingContext.try_get()
    _TLS.tracing_context = copy.copy(outer)
    try:
        yield
    finally:
        _TLS.tracing_context = outer


def _reason() -> Any:
    """Why there is a graph: torch._dynamo.output_graph.GraphCompileReason (2.11-2.15), as with torch's DDPOptimizer."""
    from torch._dynamo.output_graph import GraphCompileReason

    text = "intentional graph-break where a bucket of gradients is full"
    return GraphCompileReason(text, [traceback.FrameSummary(__file__, 0, "torchshard")])
