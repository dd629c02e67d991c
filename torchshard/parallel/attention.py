"""The style of nn.MultiheadAttention, whose layers are packed into one weight, and called by none of its submodules."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from torchshard.parallel.preparing import prepare
from torchshard.parallel.styles import ParallelStyle, place_parameter, with_placements
from torchshard.tensor.naming import name_of_place
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
        for owner, names in ((module, _of_heads(module.head_dim)), (module.out_proj, _of_output(module.head_dim))):
            for name, placement in names.items():
                parameter = getattr(owner, name)
                if parameter is not None:
                    place_parameter(owner, name, parameter, device_mesh, placement, self.src_data_rank)
        inputs = name_of_place(device_mesh, *self.input_layouts)
        masks, (there,), local = name_of_place(device_mesh, Replicate()), self.output_layouts, self.use_local_output

        def before(
            module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            known: list[tuple[Tensor, Tensor]] = []  # queries that are keys as well are so afterwards

            def place(name: str, x: Any) -> Any:
                if not isinstance(x, Tensor):
                    return x
                for before, placed in known:
                    if before is x:
                        return placed
                known.append((x, prepare(x, inputs if name in _ATTENDED else masks, Replicate(), local=False)))
                return known[-1][1]

            given = dict(zip(_INPUTS, args, strict=False)) | keywords
            if len(given) < len(args) + len(keywords):
                return args, keywords  # too many, or told twice: the module says so
            if module.training and module.dropout and given.get("attn_mask") is not None:
                given["is_causal"] = False  # the mask says it; by this torch would make a plain one
            return (), {name: place(name, x) for name, x in given.items()}

        def after(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
            attended, weights = outputs
            shares = None if weights is None else with_placements(weights, (Replicate(),))
            found = with_placements(attended, (there,)), shares
            return tuple([x.to_local() if local and x is not None else x for x in found])

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


_ATTENDED = ("query", "key", "value")
_INPUTS = (*_ATTENDED, "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")


def _of_heads(width: int) -> Mapping[str, Placement]:
    """Where parameters go that belong to heads of this width."""
    packed, rows, last = UnitShard(0, width, runs=3), UnitShard(0, width), UnitShard(2, width)
    return {
        **dict.fromkeys(("in_proj_weight", "in_proj_bias"), packed),
        **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), rows),
        **dict.fromkeys(("bias_k", "bias_v"), last),
    }


def _of_output(width: int) -> Mapping[str, Placement]:
    """Where those go that bring heads of this width together."""
    return {"weight": UnitShard(1, width), "bias": Replicate()}
