"""torch.nn.attention.flex_attention of DTensors: each rank attends with its samples and its heads.

A batch and heads may be split, as in other attention (rules/attention.py); queries and keys of one head are whole. The
functions that change scores, or mask them, are told the places of samples and heads in the whole tensor. A block mask
is a description, the same on every rank; what the functions read beside it are DTensors, and whole on every rank.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import is_traced
from torchshard.layout.layout import Mesh, Sharding
from torchshard.layout.pieces import nested_pieces
from torchshard.layout.placements import Partial, Placement, R, Shard
from torchshard.tensor.calls.call import one_mesh
from torchshard.tensor.calls.plain import refuse_plain
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.gradients.autograd import over, redistribute, to_local
from torchshard.tensor.handlers.parts import held
from torchshard.tensor.layout import dense_stride, layout_for
from torchshard.tensor.modes import replicates_plain_tensors

_BATCH, _HEADS = 0, 1


def flex_attention(
    operator: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[DTensor, ...]:
    """The operator behind flex_attention, of DTensors.

    Args:
        operator: takes the same of plain tensors.
        query: (B, Hq, L, E), a DTensor.
        key: (B or 1, Hkv, S, E), a DTensor of the same mesh.
        value: (B or 1, Hkv, S, Ev), a DTensor of the same mesh.
        score_mod: of a score and its places; traced.
        block_mask: BlockMask.as_tuple(), of plain tensors.
        scale: of the scores.
        kernel_options: of the kernel.
        score_mod_other_buffers: what score_mod reads beside its arguments.
        mask_mod_other_buffers: what the mask's function does.

    Returns:
        (B, Hq, L, Ev), split as the queries along batch and heads; the logarithms of the sums, and the largest scores,
        (B, Hq, L), where the kernel gives them.

    Raises:
        UnsupportedOperatorError: a plain tensor among them; names the argument.
        ShardingError: DTensors of several meshes.
    """
    named = {"query": query, "key": key, "value": value}
    named |= {f"score_mod reads, {k}": x for k, x in enumerate(score_mod_other_buffers)}
    named |= {f"mask_mod reads, {k}": x for k, x in enumerate(mask_mod_other_buffers)}
    mesh = _mesh_of(named)
    kept = _kept(query, key, value)
    q = redistribute(query, kept)
    layout = q._spec
    split = [axis for axes in kept.splits.values() for axis in axes]
    terms = mesh.sharding(tuple([Partial("sum") if axis in split else R for axis in range(mesh.ndim)]))
    locals_ = [
        _alone(q.to_local(), q is query),
        *[_of_samples(x, kept, query.shape[_BATCH]) for x in (key, value)],
    ]
    if mesh.coordinate is None:
        return (over(locals_[0], layout_for(kept, tuple(query.shape), layout.stride, layout.dtype)),) * 3
    (sample, samples), (head, heads) = held(layout, _BATCH), held(layout, _HEADS)

    def score(x: Any, b: Any, h: Any, *rest: Any) -> Any:
        return score_mod(x, b + sample, h + head, *rest)

    def mask(b: Any, h: Any, *rest: Any) -> Any:
        return block_mask[-1](b + sample, h + head, *rest)

    whole = tuple(query.shape[:3])
    blocks = [_own(x, whole, (sample, samples), (head, heads)) for x in block_mask[:-1]]
    results = operator(
        *locals_,
        score if sample or head else score_mod,
        (*blocks, mask if sample or head else block_mask[-1]),
        scale,
        kernel_options,
        tuple([_whole(x, terms) for x in score_mod_other_buffers]),
        tuple([_whole(x, terms) for x in mask_mod_other_buffers]),
    )
    return tuple([_result(x, kept, (samples, heads), whole) for x in results])


def _mesh_of(named: dict[str, Any]) -> Mesh:
    """The one mesh of all DTensors; plain tensors are refused where they may differ between ranks."""
    for name, x in named.items():
        allowed = name not in ("query", "key", "value") and replicates_plain_tensors()
        if isinstance(x, Tensor) and type(x) is not DTensor and x.ndim and not allowed:
            raise refuse_plain("flex_attention", name, x)
    return one_mesh("flex_attention", [(name, x._spec) for name, x in named.items() if type(x) is DTensor])


def _kept(query: DTensor, key: DTensor, value: DTensor) -> Sharding:
    """What of the splits along batch and heads can stay, first of those of the queries."""
    mesh: Mesh = query._spec.mesh
    placements: list[Placement] = [R] * mesh.ndim
    order: dict[int, tuple[int, ...]] = {}
    for x in (query, key, value):
        sharding = x._spec.sharding
        for dim in (_BATCH, _HEADS):
            axes = tuple([a for a in sharding.splits.get(dim, ()) if placements[a] is R])
            tried = (*order.get(dim, ()), *axes)
            if axes and dim not in sharding.cuts and _divides(query, key, value, dim, [mesh.shape[a] for a in tried]):
                order[dim] = tried
                for axis in axes:
                    placements[axis] = Shard(dim)
    return mesh.sharding(tuple(placements), order)


def _divides(query: DTensor, key: DTensor, value: DTensor, dim: int, counts: Sequence[int]) -> bool:
    """Whether each rank gets some of this dim, and with its query heads the key heads that they read.

    What does not fit stays whole: the operator refuses it, and might take the part of a rank.
    """
    if value.shape[dim] != key.shape[dim] or (dim == _BATCH and key.shape[dim] not in (1, query.shape[dim])):
        return False
    if dim == _HEADS and query.shape[dim] != key.shape[dim]:
        return bool(key.shape[dim] % math.prod(counts) == 0)
    return bool(nested_pieces(query.shape[dim], counts)[-1][1] > 0)


def _of_samples(x: DTensor, kept: Sharding, samples: int) -> Tensor:
    """The part of keys or values; one sample for all gets terms of its gradient from each rank's samples."""
    if x.shape[_BATCH] == samples:
        moved = redistribute(x, kept)
        return _alone(moved.to_local(), moved is x)
    axes = kept.splits.get(_BATCH, ())
    heads = {dim: order for dim, order in kept.splits.items() if dim == _HEADS}
    whole, terms = [
        kept.mesh.sharding(tuple([p if a in axes else other for a, other in enumerate(kept.placements)]), heads)
        for p in (R, Partial("sum"))
    ]
    moved = redistribute(x, whole)
    return _alone(to_local(moved, terms), moved is x)


def _alone(x: Tensor, came_so: bool) -> Tensor:
    """What was brought here for a kernel, in a trace for CPUs in memory of its own.

    Inductor's kernel for CPUs reads operands from where the memory of their base begins, and inductor leaves out copies
    whose strides are those of the view. So places are looked up, which it does not leave out.
    """
    if came_so or x.device.type != "cpu" or not is_traced(x):
        return x
    return x.index_select(0, torch.arange(x.shape[0]))


def _whole(x: Any, terms: Sharding) -> Any:
    """What a function reads beside its arguments."""
    if type(x) is not DTensor:
        return x
    return to_local(redistribute(x, x._spec.mesh.replicated()), terms)


def _own(x: Any, whole: Sequence[int], *own: tuple[int, int]) -> Any:
    """The rows of a block mask for these samples and heads, where it has some for each.

    They are looked up, not narrowed, for inductor's kernel for CPUs: see `_alone`.
    """
    if not isinstance(x, Tensor):
        return x
    for dim, (start, count) in enumerate(own):
        if x.shape[dim] != 1 and x.shape[dim] == whole[dim]:
            x = x.index_select(dim, torch.arange(start, start + count, device=x.device))
    return x


def _result(x: Tensor, kept: Sharding, own: tuple[int, int], whole: Sequence[int]) -> DTensor:
    is_split = tuple(x.shape[:2]) == own  # statistics that were not asked for have no elements
    shape = (*whole, *x.shape[3:]) if is_split else tuple(x.shape)
    sharding = kept if is_split else kept.mesh.replicated()
    return over(x, layout_for(sharding, shape, dense_stride(shape, x.stride()), x.dtype))
