"""Operators that torch has to be told of, so that traces take them with DTensors."""

from torchshard import _torch
from torchshard.rules.convolution import RESAMPLED
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.modes import plain_are_replicas
from torchshard.tensor.regions import control_flow, flex, hooks

_MADE_OF_NUMBERS = f"{RESAMPLED} one_hot multi_margin_loss"
"""What torch makes of indices, weights and masks in traces, and these of numbers alone.

Not multilabel_margin_loss, where what torch 2.13 makes of plain tensors has other values than the loss itself.
"""


def take_operators() -> None:
    """Those that call functions, and those of which torch's traces see what they are made of."""
    _torch.nest_in_place(DTensor)
    _torch.find_memory_of_parts(DTensor)
    _torch.let_return_beside_gradients(DTensor)
    _torch.store_who_asks(DTensor)
    functions = {"flex_attention": flex.flex_attention, "trace_wrapped": hooks.call_hooks, **control_flow.OPERATORS}
    for name, function in functions.items():
        _torch.operate_with(DTensor, name, function)
    for name in _MADE_OF_NUMBERS.split():
        _torch.decompose_within(DTensor, name, plain_are_replicas)
