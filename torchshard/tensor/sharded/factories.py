"""ShardedTensors from a spec: the factories of torch.distributed._shard.sharded_tensor, with their arguments."""

from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.layout.boxes import Box
from torchshard.tensor.sharded.moving import parts
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor
from torchshard.tensor.sharded.specs import flat_size


class Options(TypedDict, total=False):
    """What every factory takes by name, and ShardedTensor itself."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: dist.ProcessGroup | None
    init_rrefs: bool


def empty(sharding_spec: Any, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """A ShardedTensor whose values are not set.

    Args:
        sharding_spec: how it is cut.
        size: lengths of the dims, as numbers or as one sequence.
        options: `dtype`, `requires_grad`, `pin_memory` and `process_group`; the others are for torch's defaults alone.
    """
    return ShardedTensor(sharding_spec, *size, **options)


def zeros(sharding_spec: Any, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """A ShardedTensor of zeros; arguments as of `empty`."""
    return full(sharding_spec, flat_size(size), 0, **options)


def ones(sharding_spec: Any, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """A ShardedTensor of ones; arguments as of `empty`."""
    return full(sharding_spec, flat_size(size), 1, **options)


def full(sharding_spec: Any, size: Any, fill_value: Any, **options: Unpack[Options]) -> ShardedTensor:
    """A ShardedTensor that holds `fill_value` everywhere; other arguments as of `empty`."""
    return _set(ShardedTensor(sharding_spec, size, **options), lambda part, _: part.fill_(fill_value))


def rand(sharding_spec: Any, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Uniform random numbers from [0, 1); arguments as of `empty`.

    Every rank draws the whole tensor and keeps its parts: where generators stand alike, the values do not depend on how
    the tensor is cut.
    """
    return _drawn(torch.rand, ShardedTensor(sharding_spec, *size, **options))


def randn(sharding_spec: Any, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Normal random numbers; see `rand`."""
    return _drawn(torch.randn, ShardedTensor(sharding_spec, *size, **options))


def _drawn(draw: Callable[..., Tensor], x: ShardedTensor) -> ShardedTensor:
    drawn = draw(tuple(x.shape), dtype=x.dtype, device=x.device)
    return _set(x, lambda part, box: part.copy_(drawn[box.slices]))


def _set(x: ShardedTensor, write: Callable[[Tensor, Box], object]) -> ShardedTensor:
    for box, part in parts(x):
        write(part, box)
    return x


init_from_local_shards = ShardedTensor.from_local_shards
