"""Sequences of several lengths in one tensor, as nn.LSTM and its kin take them.

How many of them go on at each step is a plain tensor: torch reads these numbers in memory, for gradients too.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from torchshard.tensor.calls.outside import whole
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.handlers.parts import made_of, part
from torchshard.tensor.modes import say_replicated


def _pack_padded_sequence(func: Any, x: DTensor, lengths: DTensor, batch_first: bool) -> tuple[DTensor, Tensor]:
    say_replicated("_pack_padded_sequence.default", "it mixes steps and sequences")
    data, sizes = func(part(x), whole(lengths, "pack_padded_sequence"), batch_first)
    return made_of(data, x._spec.mesh.replicated(), data.shape), sizes


HANDLERS: Mapping[str, Callable[..., Any]] = {"_pack_padded_sequence.default": _pack_padded_sequence}
