"""Tensor and sequence parallelism: plans that turn the parameters of a module into DTensors."""

from typing import TYPE_CHECKING

from torchshard._lazy import lazily

if TYPE_CHECKING:
    from torchshard.parallel import fsdp as fsdp
    from torchshard.parallel.attention import HeadwiseParallel
    from torchshard.parallel.context import context_parallel
    from torchshard.parallel.loss import loss_parallel
    from torchshard.parallel.mapping import local_map
    from torchshard.parallel.parameterwise import ParameterwiseParallel
    from torchshard.parallel.plan import parallelize_module
    from torchshard.parallel.preparing import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
    from torchshard.parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
    from torchshard.tensor.parts import local_parameters, placed_parameters, placed_states

__all__ = [
    "ColwiseParallel",
    "HeadwiseParallel",
    "ParallelStyle",
    "ParameterwiseParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "context_parallel",
    "local_map",
    "local_parameters",
    "loss_parallel",
    "parallelize_module",
    "placed_parameters",
    "placed_states",
]

_HOMES = {
    "torchshard.parallel.attention": "HeadwiseParallel",
    "torchshard.parallel.context": "context_parallel",
    "torchshard.parallel.mapping": "local_map",
    "torchshard.parallel.loss": "loss_parallel",
    "torchshard.tensor.parts": "local_parameters placed_parameters placed_states",
    "torchshard.parallel.parameterwise": "ParameterwiseParallel",
    "torchshard.parallel.plan": "parallelize_module",
    "torchshard.parallel.preparing": "PrepareModuleInput PrepareModuleInputOutput PrepareModuleOutput",
    "torchshard.parallel.styles": "ColwiseParallel ParallelStyle RowwiseParallel SequenceParallel",
}
__getattr__, __dir__ = lazily(__name__, _HOMES, rooms="fsdp")
