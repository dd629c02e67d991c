"""ShardedTensors from a spec: the factories of torch.distributed._shard.sharded_tensor, with their arguments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchshard.layout.boxes import Box
from torchshard.tensor.sharded.moving import parts
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor
from torchshard.tensor.sharded.specs import flat_size


def empty(sharding_spec: Any, *size: Any, **options: Any) -> ShardedTensor:
    """A ShardedTensor whose values are not set.

    Args:
        sharding_spec: how it is cut.
        size: lengths of the dims, as numbers or as one sequence.
        options: as of ShardedTensor: dtype, requires_grad, pin_memory, process_group.
    """
    return ShardedTensor(sharding_spec, *size, **options)


def zeros(sharding_spec: Any, *size: Any, **options: Any) -> ShardedTensor:
    """A ShardedTensor of zeros; arguments as of `empty`."""
    return full(sharding_spec, flat_size(size), 0, **options)


def ones(sharding_spec: Any, *size: Any, **options: Any) -> ShardedTensor:
    """A ShardedTensor of ones; arguments as of `empty`."""
    return full(sharding_spec, flat_size(size), 1, **options)


def full(sharding_spec: Any, size: Any, fill_value: Any, **options: Any) -> ShardedTensor:
    """A ShardedTensor that holds `fill_value` everywhere; other arguments as of `empty`."""
    return _set(ShardedTensor(sharding_spec, size, **options), lambda part, _: part.fill_(fill_value))


def rand(sharding_spec: Any, *size: Any, **options: Any) -> ShardedTensor:
    """Uniform random numbers from [0, 1); arguments as of `empty`.

    Every rank draws the whole tensor and keeps its parts: where generators stand alike, the values do not depend on how
    the tensor is cut.
    """
    return _drawn(torch.rand, ShardedTensor(sharding_spec, *size, **options))


def randn(sharding_spec: Any, *size: Any, **options: Any) -> ShardedTensor:
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
