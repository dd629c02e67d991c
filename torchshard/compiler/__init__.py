"""torch.compile for data parallel: gradients reduced inside of the backward graph, or between pieces of it.

`torch.compile(model, backend="torchshard")` finds the backend by its entry point; nothing has to be imported.
"""

from typing import TYPE_CHECKING

from torchshard._lazy import lazily

if TYPE_CHECKING:
    from torchshard.compiler.explaining import explain
    from torchshard.compiler.measuring import measure
    from torchshard.compiler.objects import support_caches, support_groups
    from torchshard.compiler.simulating import simulate
    from torchshard.compiler.split import split_backend

__all__ = ["explain", "measure", "simulate", "split_backend", "support_caches", "support_groups"]

_HOMES = {
    "torchshard.compiler.explaining": "explain",
    "torchshard.compiler.measuring": "measure",
    "torchshard.compiler.objects": "support_caches support_groups",
    "torchshard.compiler.simulating": "simulate",
    "torchshard.compiler.split": "split_backend",
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
