"""What handlers that work on local tensors share: from DTensors to parts, and back."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchshard._torch import is_traced
from torchshard.comm.collectives import all_gather
from torchshard.comm.group import Group
from torchshard.layout.cuts import without
from torchshard.layout.layout import Sharding, contiguous_stride
from torchshard.layout.pieces import nested_pieces
from torchshard.layout.placements import Partial, R, Shard
from torchshard.tensor.dtensor import DTensor, dtensors_in, wrap
from torchshard.tensor.gradients.autograd import redistribute
from torchshard.tensor.layout import TensorLayout, layout_for
from torchshard.tensor.moving.redistribute import check_assumed, moved, redistribute_local, redistribute_together

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_DECISIONS = 4096  # kept a mesh; when full, all are dropped
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

_Decision = TypeVar("_Decision")


@dataclass(frozen=True, slots=True)
class EagerAlone:
    """A handler that leaves traces to the rule: what it sends differs between ranks, or follows from values."""

    handler: Callable[..., Any]

    def __call__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """What the handler says; NotImplemented in a trace."""
        return NotImplemented if self.leaves((*args, *kwargs.values())) else self.handler(func, *args, **kwargs)

    def leaves(self, values: Sequence[Any]) -> bool:
        """Whether a call with these arguments is one of a trace."""
        return is_traced(next(dtensors_in(values))._local_tensor)


@dataclass(frozen=True, slots=True)
class ForKind:
    """A handler that is chosen once for all calls of a kind: those with the same layouts and other arguments.

    Attributes:
        choose: gives it for a call, or None where that is left to the rule; what it gives holds none of the tensors.
    """

    choose: Callable[..., Callable[..., Any] | None]


def decided(decide: Callable[..., _Decision]) -> Callable[..., _Decision]:
    """A function of a sharding, and of others and numbers, that is asked once for each: the mesh keeps what it says."""

    @functools.wraps(decide)
    def found(sharding: Sharding, *others: Any) -> _Decision:
        decisions: dict[Any, _Decision] = sharding.mesh.decisions  # type: ignore[attr-defined]
        key = decide, sharding, *others
        decision = decisions.get(key)
        if decision is None:
            if len(decisions) >= MAX_DECISIONS:
                decisions.clear()
            decision = decisions[key] = decide(sharding, *others)
        return decision

    return found


def part(x: Any, sharding: Sharding | None = None) -> Tensor:
    """This rank's part of x in a sharding, the whole where None; a plain scalar is the same everywhere.

    Raises:
        RankMismatchError: from_local was not told the shape, and the ranks hold pieces of different sizes or strides.
    """
    if type(x) is not DTensor:
        return x  # type: ignore[no-any-return]
    layout = x._spec
    if layout.assumed:
        check_assumed(x._local_tensor, layout)
    return redistribute_local(x._local_tensor, layout.plain, layout.to(sharding or layout.mesh.replicated()))


def reduced(*tensors: Any) -> list[DTensor]:
    """DTensors without Partial, below autograd: small ones of one kind by one collective. They are there to be read."""
    moves = [(x._spec, x._spec.to(x._spec.sharding.without_partial())) for x in tensors]
    parts = redistribute_together([x._local_tensor for x in tensors], moves)
    return [wrap(x, moved(*move)) for x, move in zip(parts, moves, strict=True)]


def added(*scalars: DTensor) -> Sequence[Tensor]:
    """The values of scalars of one sharding and dtype, which hold terms of sums: by one collective, and to be read."""
    layout, terms = scalars[0]._spec, [x._local_tensor for x in scalars]
    if not layout.sharding.partial:
        return terms
    source = layout_for(layout.sharding, (len(terms),), (1,), layout.dtype).marked(assumed=layout.assumed)
    return redistribute_local(torch.stack(terms), source, source.to(source.sharding.without_partial())).unbind(0)


def told(group: Group, *numbers: Tensor) -> Sequence[Tensor]:
    """Tensors of one shape and dtype, each of those of all ranks one after another: by one message.

    A trace is to read this rank's own from what came, not from what it gave: inductor may reuse the memory of all that
    was stacked while that of one of them, reused as well, is still read (2.13, 2.15).
    """
    return all_gather(torch.stack(numbers)[None], 0, [1] * group.size, group).unbind(1)


def made_of(local: Tensor, sharding: Sharding, shape: tuple[int, ...]) -> DTensor:
    """The row-major DTensor of this global shape whose part on this rank is `local`."""
    return wrap(local.contiguous(), layout_for(sharding, tuple(shape), contiguous_stride(shape), local.dtype))


def held(layout: TensorLayout, dim: int) -> tuple[int, int]:
    """Where this rank's part begins along a dim, and how long it is there."""
    assert layout.box is not None, "a rank outside of the mesh takes part"
    return layout.box.offset[dim], layout.box.size[dim]


def own_numbers(index: Tensor, start: int, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Which numbers are those of elements held here, and numbers to look up in the part: any for elements held
    elsewhere, none for those of nobody, which the operator refuses.
    """
    mine = (index >= start) & (index < start + count)
    nobody = (index < 0) | (index >= length)
    return mine, torch.where(mine, index - start, 0).masked_fill_(nobody, max(count, 1))


def in_boxes(x: Any) -> Any:
    """A DTensor whose part has a place: one that is split in runs or units is moved; anything else is left as it is."""
    if type(x) is not DTensor or not x._spec.sharding.cuts:
        return x
    return redistribute(x, without(x._spec.sharding, x._spec.sharding.cuts))


@decided
def batched(sharding: Sharding, dim: int, at: int, terms: bool = False) -> Sharding:
    """Split along dim `at` by the axes that split a tensor of this sharding along `dim`, and whole along the others.

    Args:
        sharding: of the tensor.
        dim: which of its dims is the batch.
        at: which dim of another tensor is; no matter for terms.
        terms: for a tensor without a batch, made of a sum over it.
    """
    axes = sharding.splits.get(dim, ())
    split = Partial("sum") if terms else Shard(at)
    placements = [split if a in axes else R for a in range(sharding.mesh.ndim)]
    return sharding.mesh.sharding(placements, {at: axes} if axes and not terms else {})


def split_along(x: DTensor, dims: Sequence[int]) -> bool:
    """Whether a tensor is split along some of the dims."""
    return any(isinstance(p, Shard) and p.dim in dims for p in x._spec.placements)


@decided
def eliminated(sharding: Sharding, dims: tuple[int, ...], keepdim: bool) -> tuple[Sharding, tuple[int, ...]]:
    """The sharding once these dims have been eliminated, and the axes that split them."""
    axes = tuple(sorted([axis for d in dims for axis in sharding.splits.get(d, ())]))
    whole = without(sharding, dims)
    if keepdim:
        return whole, axes
    at = {d: d - sum(gone < d for gone in dims) for d in whole.splits}
    placements = [p.at(at[p.dim]) if isinstance(p, Shard) else p for p in whole.placements]
    return sharding.mesh.sharding(placements, {at[d]: split for d, split in whole.splits.items()}), axes


def by_batch(x: Any, dim: int) -> bool:
    """Whether a tensor is split along its batch, no rank being without some of it, and not in runs or units."""
    if type(x) is not DTensor or x._spec.sharding.cuts or dim not in x._spec.sharding.splits:
        return False
    mesh, axes = x._spec.mesh, x._spec.sharding.splits[dim]
    return mesh.coordinate is not None and nested_pieces(x.shape[dim], [mesh.shape[a] for a in axes])[-1][1] > 0


def wide(x: Tensor) -> Tensor:
    """A tensor in the precision to compute in: float32 for half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
