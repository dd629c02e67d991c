"""State dicts of modules that FSDP1 has wrapped: what belongs to DTensor parameters goes out as torch's DTensors.

torch's functions for state dicts gather, send and load by class, and know their own. Values leave over the same memory,
and come in as whatever holds the parameter: a DTensor of either class, or a plain tensor.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchshard._torch import below_torch_functions, is_sharded_tensor
from torchshard.parallel.fsdp.chunks import as_ours, innermost, part_of
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.interop import to_torch
from torchshard.tensor.owners import Placed
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor

Parameters = Sequence[tuple[nn.Module, str, Any]]


def hook_up(parameters: Parameters) -> None:
    """Hooks on the owners of the parameters that a flat one consists of: (owner, name, what was taken off)."""
    owners: dict[nn.Module, dict[str, Placed]] = {}
    for module, name, taken in parameters:
        if taken is not None:
            owners.setdefault(module, {})[name] = taken
    for module, held in owners.items():
        module.register_state_dict_post_hook(partial(_saved, held=held))
        module.register_load_state_dict_pre_hook(partial(_loaded, held=held))


def _saved(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any, held: dict[str, Placed]) -> None:
    for name in held:
        if isinstance(value := state.get(prefix + name), DTensor):
            state[prefix + name] = to_torch(value)


def _loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any, held: dict[str, Placed]) -> None:
    for name, taken in held.items():
        if prefix + name in state:
            part = part_of(state[prefix + name], taken.layout, f"state dict, {prefix + name}")
            state[prefix + name] = taken.lent(part.detach())


@below_torch_functions
def part(value: Any, taken: Placed | None, where: str) -> Any:
    """What FSDP1 flattens of a value of an optimizer state: this rank's part, plain; scalars and others as they are.

    Of ShardedTensors it is torch's own, which FSDP1 gathers itself.
    """
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if isinstance(value, ShardedTensor) or is_sharded_tensor(value):
        return innermost(value, where)[0]
    if taken is None:
        return value.full_tensor() if isinstance(value, DTensor) else value
    x = as_ours(value)
    if x is not None and x.device.type != x.device_mesh.device_type:
        value = x.to(x.device_mesh.device_type)
    return part_of(value, taken.layout, where)
