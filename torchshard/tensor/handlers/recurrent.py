"""Layers of recurrent modules that kernels of MKL-DNN run as a whole: each rank runs them on its part of the batch.

What such a kernel keeps for its backward is each rank's own, and no DTensor.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import EagerAlone, batched, by_batch, made_of, part

_TIME_FIRST, _STATE = 1, 0
"""Which dim of sequences, and of states, is the batch."""


def _layer(func: Any, x: Any, *args: Any) -> Any:
    if not _splits(x):
        return NotImplemented
    weights, states, rest = args[:4], args[4:6], args[6:]
    sharding = x._spec.sharding
    sequences, of_states = batched(sharding, _TIME_FIRST, _TIME_FIRST), batched(sharding, _TIME_FIRST, _STATE)
    parts = [part(x, sequences), *map(part, weights), *[part(state, of_states) for state in states]]
    out, *ends, kept = func(*parts, *rest)
    found = [made_of(out, sequences, (*x.shape[:2], *out.shape[2:]))]
    found += [made_of(end, of_states, (x.shape[1], *end.shape[1:])) for end in ends]
    return *found, kept


def _layer_backward(func: Any, x: Any, *args: Any) -> Any:
    if not _splits(x):
        return NotImplemented
    weights, states, (out, *ends), grads = args[:4], args[4:6], args[6:9], args[9:12]
    *rest, kept = args[12:]
    sharding = x._spec.sharding
    sequences, of_states = batched(sharding, _TIME_FIRST, _TIME_FIRST), batched(sharding, _TIME_FIRST, _STATE)
    terms = batched(sharding, _TIME_FIRST, 0, True)
    parts = [part(x, sequences), *map(part, weights), *[part(state, of_states) for state in states]]
    parts += [part(out, sequences), *[part(end, of_states) for end in ends]]
    of_results = zip(grads, (sequences, of_states, of_states), strict=True)
    given = [None if grad is None else part(grad, s) for grad, s in of_results]
    of_x, *of_weights, of_first, of_cell = func(
        *parts, *given, *rest, kept._local_tensor if type(kept) is DTensor else kept
    )
    found = [made_of(of_x, sequences, tuple(x.shape))]
    found += [made_of(grad, terms, tuple(grad.shape)) for grad in of_weights]
    found += [made_of(g, of_states, tuple(s.shape)) for g, s in zip((of_first, of_cell), states, strict=True)]
    return tuple(found)


def _splits(x: Any) -> bool:
    return by_batch(x, _TIME_FIRST)


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "mkldnn_rnn_layer.default": EagerAlone(_layer),
    "mkldnn_rnn_layer_backward.default": EagerAlone(_layer_backward),
}
