"""torchshard: data parallel, sharded tensors and checkpoint conversion for torch.distributed.

The public names are resolved on first use, so that opening a checkpoint or asking for help does not import torch.
"""

from typing import TYPE_CHECKING

from torchshard._lazy import lazily

__version__ = "0.1.0"

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Partial, Placement, Replicate, Shard

    from torchshard import checkpoint as checkpoint
    from torchshard import compiler as compiler
    from torchshard import ddp as ddp
    from torchshard import debug as debug
    from torchshard import errors as errors
    from torchshard import keys as keys
    from torchshard import parallel as parallel
    from torchshard import simulation as simulation
    from torchshard import state_dict as state_dict
    from torchshard import tensor as tensor
    from torchshard.ddp.wrapper import DistributedDataParallel
    from torchshard.tensor.distribute import distribute_module, distribute_tensor
    from torchshard.tensor.dtensor import DTensor
    from torchshard.tensor.explain import explain
    from torchshard.tensor.factories import empty, full, linspace, logspace, ones, rand, randn, zeros
    from torchshard.tensor.layout import layout_of
    from torchshard.tensor.modes import fallback, implicit_replication
    from torchshard.tensor.proving.register import register_rule
    from torchshard.tensor.proving.validate import validate_rule
    from torchshard.tensor.sharded.sharded_tensor import ShardedTensor
    from torchshard.tensor.torch_placements import UnitShard

__all__ = [
    "DTensor",
    "DeviceMesh",
    "DistributedDataParallel",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "ShardedTensor",
    "UnitShard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "fallback",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "layout_of",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "register_rule",
    "validate_rule",
    "zeros",
]

_HOMES = {
    "torch.distributed.device_mesh": "DeviceMesh init_device_mesh",
    "torch.distributed.tensor": "Partial Placement Replicate Shard",
    "torchshard.ddp.wrapper": "DistributedDataParallel",
    "torchshard.tensor.distribute": "distribute_module distribute_tensor",
    "torchshard.tensor.dtensor": "DTensor",
    "torchshard.tensor.layout": "layout_of",
    "torchshard.tensor.explain": "explain",
    "torchshard.tensor.factories": "empty full linspace logspace ones rand randn zeros",
    "torchshard.tensor.modes": "fallback implicit_replication",
    "torchshard.tensor.proving.register": "register_rule",
    "torchshard.tensor.sharded.sharded_tensor": "ShardedTensor",
    "torchshard.tensor.torch_placements": "UnitShard",
    "torchshard.tensor.proving.validate": "validate_rule",
}
__getattr__, __dir__ = lazily(
    __name__, _HOMES, rooms="checkpoint compiler ddp debug errors keys parallel simulation state_dict tensor"
)
