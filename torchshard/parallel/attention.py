"""The style of nn.MultiheadAttention, whose layers are packed into one weight, and called by none of its submodules."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from torchshard.parallel.parameterwise import cut, giving, taking_all
from torchshard.parallel.styles import ParallelStyle
from torchshard.tensor.regions.naming import name_of_place
from torchshard.tensor.torch_placements import UnitShard


class HeadwiseParallel(ParallelStyle):
    """An nn.MultiheadAttention whose heads are split: each rank projects and attends for its own.

    The packed weight of queries, keys and values is cut within each of the three; the result is a sum over ranks. Heads
    need not be divided by the number of ranks. Plain masks are taken to be the same on every rank.

    Args:
        input_layouts: what plain queries, keys and values are; replicated by default. The module gets them replicated.
        output_layouts: what the output shall be; replicated by default (an all-reduce), or split along a dim (a
            reduce-scatter).
        use_local_output: give the output as a plain tensor, this rank's part, and so the weights of attention, if they
            are asked for: averaged over all heads, or of all heads.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts: tuple[Placement, ...] = (input_layouts or Replicate(),)
        self.output_layouts: tuple[Placement, ...] = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.MultiheadAttention):
            got = type(module)
            raise NotImplementedError(
                f"{type(self).__name__} takes nn.MultiheadAttention, and this is a {got.__module__}."
                f"{got.__qualname__}; for linear layers say ColwiseParallel(unit=, runs=) and RowwiseParallel(unit=)"
            )
        names = [name for name, _ in module.named_parameters()]
        cuts = {name: placement for name, placement in _cuts(module.head_dim).items() if name in names}
        cut(self, module, device_mesh, cuts)
        inputs, masks = name_of_place(device_mesh, *self.input_layouts), name_of_place(device_mesh, Replicate())
        outputs = *self.output_layouts, Replicate()  # what attends, and the weights
        place = taking_all(lambda key: inputs if key in _ATTENDED else masks, Replicate(), _without_hint)
        module.register_forward_pre_hook(place, with_kwargs=True)
        module.register_forward_hook(giving(lambda at: outputs[at], self.use_local_output))
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


_ATTENDED = (0, 1, 2, "query", "key", "value")


def _without_hint(module: nn.MultiheadAttention, args: list[Any], keywords: dict[str, Any]) -> None:
    """Say nothing of causality, by which torch makes a plain mask where it drops: the mask that is given says it."""
    mask = args[5] if len(args) > 5 else keywords.get("attn_mask")
    if mask is not None and module.training and module.dropout:
        if len(args) > 7:
            args[7] = False
        else:
            keywords["is_causal"] = False


def _cuts(width: int) -> Mapping[str, Placement]:
    """Where parameters go, with heads of this width; those that bring the heads together are `out_proj`'s."""
    packed, rows, last = UnitShard(0, width, runs=3), UnitShard(0, width), UnitShard(2, width)
    return {
        **dict.fromkeys(("in_proj_weight", "in_proj_bias"), packed),
        **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), rows),
        **dict.fromkeys(("bias_k", "bias_v"), last),
        "out_proj.weight": UnitShard(1, width),
    }
