"""In-graph mode: one graph, whose backward fills the wrapper's buckets and launches them while it runs."""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch

from torchshard import _torch
from torchshard.compiler.call import Call, is_attached
from torchshard.compiler.options import Options
from torchshard.compiler.rewrite import BucketPass, graph_parameters
from torchshard.ddp import active
from torchshard.ddp.reducing.reducer import Reducer


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], reducer: Reducer, chosen: Options
) -> Callable[..., Any]:
    """Compile a graph of a wrapped module with inductor."""
    patches = _torch.inductor_patches(chosen.mode, dict(chosen.inductor))
    parameters = graph_parameters(inputs, reducer.names_by_id)
    if not parameters:
        return _torch.compile_with_inductor(graph, inputs, patches)
    _refuse_cuda_graphs(patches, reducer.device)
    rewrite = BucketPass(parameters, chosen.sizes(reducer.lending.segments))
    patches["reorder_for_peak_memory"] = False  # launches stay where they are
    return InGraph(_torch.compile_with_inductor(graph, inputs, patches, rewrite), list(parameters))


def without_wrapper(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What was compiled for a module that is not wrapped; says once if it is wrapped later.

    For where Dynamo does not compile again for a wrapper.
    """
    note = Note(
        'backend "torchshard": a module was compiled and called before it was wrapped in DistributedDataParallel; its '
        "gradients are right, but reduced by hooks after the whole backward. Wrap it before the first call"
    )

    def run(*args: Any) -> Any:
        if not note.said and torch.is_grad_enabled() and active.reducer() is not None:
            note.say()
        return compiled(*args)

    return run


class InGraph:
    """A compiled graph; each call of it in a wrapper's forward tells its backward which reducer to use.

    Args:
        compiled: by inductor.
        params: positions of the inputs that are parameters of the wrapper.
    """

    def __init__(self, compiled: Callable[..., Any], params: Sequence[int]) -> None:
        self._compiled, self._params = compiled, params
        self._positions: Mapping[int, int] | None = None
        self._last: tuple[Callable[[], object], list[int], Mapping[int, int]] = _nobody, [], {}
        self._note = Note(
            'backend "torchshard": the backward of a compiled graph was not found from its outputs; the gradients that '
            "it makes are reduced by hooks after it has run"
        )

    def __call__(self, *args: Any) -> Any:
        """Run the forward."""
        outputs = self._compiled(*args)
        reducer = active.reducer_to_compile_for()
        if reducer is not None and torch.is_grad_enabled():
            self._attach(reducer, args, outputs)
        return outputs

    def _attach(self, reducer: Reducer, args: Sequence[Any], outputs: Sequence[Any]) -> None:
        if not any(args[i].requires_grad for i in self._params):
            return
        node = next(filter(partial(self._is_own, args), _compiled_nodes(outputs)), None)
        if node is None or self._positions is None:
            if any(isinstance(x, torch.Tensor) and x.requires_grad for x in outputs):
                self._note.say()
            return
        Call(reducer, self._numbers(reducer, [*map(args.__getitem__, self._positions)]), self._positions).attach(node)

    def _numbers(self, reducer: Reducer, params: Sequence[Any]) -> Mapping[int, int]:
        """The reducer's number of the parameter at each position, where it has one; mostly the same as last time."""
        assert self._positions is not None, "found before"
        last, known, numbers = self._last
        ids = [*map(id, params)]
        if last() is not reducer or known != ids:
            found = ((i, reducer.numbers.get(own)) for i, own in zip(self._positions, ids, strict=True))
            numbers = {i: number for i, number in found if number is not None}
            self._last = weakref.ref(reducer), ids, numbers
        return numbers

    def _is_own(self, args: Sequence[Any], node: Any) -> bool:
        """Whether gradients of these inputs come from a node; finds out where. Other graphs' nodes lie below."""
        if is_attached(node):
            return False
        leaves = [getattr(leaf, "variable", None) for leaf, _ in node.next_functions]
        if self._positions is None:
            inputs = {id(args[i]): i for i in self._params}
            self._positions = {inputs[id(v)]: at for at, v in enumerate(leaves) if id(v) in inputs} or None
        if self._positions is None or max(self._positions.values()) >= len(leaves):
            return False
        at = self._positions
        return all(map(is_, map(leaves.__getitem__, at.values()), map(args.__getitem__, at)))


def _nobody() -> None:
    return None


class Note:
    """A message that is said once."""

    def __init__(self, text: str) -> None:
        self.text, self.said = text, False

    def say(self) -> None:
        """Warn, the first time."""
        if not self.said:
            self.said = True
            warnings.warn(self.text, UserWarning, stacklevel=3)


def _compiled_nodes(outputs: Sequence[Any], depth: int = 4) -> Iterator[Any]:
    """Autograd nodes of compiled graphs, the nearest first; outputs that are views have nodes of their own above."""
    level = [x.grad_fn for x in outputs if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    for _ in range(depth):
        yield from (node for node in level if "CompiledFunctionBackward" in node.name())
        level = [below for node in level for below, _ in node.next_functions if below is not None]


def _refuse_cuda_graphs(patches: Mapping[str, Any], device: torch.device) -> None:
    if device.type == "cuda" and patches.get("triton.cudagraphs"):
        raise NotImplementedError(
            'backend "torchshard": CUDA graphs (mode="reduce-overhead" or "max-autotune", option triton.cudagraphs) '
            "cannot hold the reduction of gradients; leave them out, or give options={'reduction': 'split'}"
        )
