"""Layouts of actual tensors."""

import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.tensor as upstream
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchshard._torch import (
    asked,
    expected,
    exports,
    graphs_are_shared,
    mend_trace,
    number,
    renewed,
    skip_alone,
    unrecorded,
)
from torchshard.errors import ShardingError
from torchshard.layout.layout import Layout, Sharding, contiguous_stride
from torchshard.layout.pieces import Symbolic
from torchshard.layout.placements import Partial, R
from torchshard.tensor.torch_placements import to_torch
from torchshard.unsupported import unsupported

if TYPE_CHECKING:
    from torchshard.tensor.dtensor import DTensor

# Marks: what may be true of a tensor beside its layout, on this rank. Plans are made for each combination.
SEVERED = 1  # stands for a view of another tensor, but had to be moved: it shares no storage with its base
TURNED = 2  # its part lies in memory in another order than from_local was told; operators read a copy in that order
_TERMS = 4  # and up, a bit for each axis: see terms_along

Symbolic.unrecorded, Symbolic.asked, Symbolic.expected = unrecorded, asked, expected
Symbolic.number, Symbolic.renewed = number, renewed


def terms_along(axes: Iterable[int]) -> int:
    """Marks of a parameter, and of its views: gradients of plain parts of it are terms along these axes, where whole.

    So they are where FSDP adds gradients of the ranks of an axis, on each of which a part serves a batch of its own.
    """
    return sum([_TERMS << axis for axis in axes])


class TensorLayout(Layout):
    """A Layout as DTensor holds it.

    Attributes:
        marks: SEVERED, TURNED, and those of `terms_along`, some or none.
        assumed: layouts that from_local has taken for granted, and of which this tensor was made without a collective
            that would have compared them: that all ranks hold pieces, or terms, of one size and memory order.
        tensor_meta: the layout itself: torch's fast constructor reads shape, stride and dtype there.
    """

    __slots__ = ("_marked", "_overlaps", "_torch_placements", "assumed", "marks", "plain", "tensor_meta")

    def __init__(self, sharding: Sharding, shape: tuple[int, ...], stride: tuple[int, ...], dtype: Any) -> None:
        for n in shape:
            if type(n) is not int:  # symbolic
                mend_trace(n)
        super().__init__(sharding, shape, stride, dtype)
        self.marks, self.assumed = 0, frozenset[TensorLayout]()
        self.plain: TensorLayout = self
        self.tensor_meta = self
        self._marked: dict[tuple[int, frozenset[TensorLayout]], TensorLayout] = {}
        self._torch_placements: tuple[TorchPlacement, ...] | None = None
        self._overlaps: bool | None = None

    def marked(self, marks: int | None = None, assumed: "frozenset[TensorLayout] | None" = None) -> "TensorLayout":
        """The same layout with these marks, and with this taken for granted; what is not given stays."""
        key = self.marks if marks is None else marks, self.assumed if assumed is None else assumed
        if key == (self.marks, self.assumed):
            return self
        if not any(key):
            return self.plain
        found = self.plain._marked.get(key)
        if found is None:
            found = TensorLayout(self.sharding, self.shape, self.stride, self.dtype)
            (found.marks, found.assumed), found.plain = key, self.plain
            found = self.plain._marked.setdefault(key, found)
        return found

    def with_marks(self, marks: int) -> "TensorLayout":
        """The same layout with these marks as well."""
        return self.marked(self.marks | marks)

    @property
    def terms(self) -> int:
        """Those of its marks that `terms_along` gives."""
        return self.marks & -_TERMS

    @property
    def sharding_of_gradient(self) -> Sharding:
        """That of the gradient of a part, where nothing else is said."""
        sharding = self.sharding.without_partial()
        if not self.terms:
            return sharding
        placements = [
            Partial() if placement is R and self.terms & _TERMS << axis else placement
            for axis, placement in enumerate(sharding.placements)
        ]
        return sharding.mesh.sharding(placements, dict(sharding.order))

    def to(self, sharding: Sharding) -> "TensorLayout":
        """The same tensor in another sharding."""
        return layout_for(sharding, self.shape, self.stride, self.dtype)

    @property
    def overlaps(self) -> bool:
        """Whether elements may lie on one another."""
        if self._overlaps is None:
            self._overlaps = overlaps(self.shape, self.stride)
        return self._overlaps

    @property
    def torch_placements(self) -> tuple[TorchPlacement, ...]:
        """The placements as torch's objects.

        Raises:
            ShardingError: a nesting order that torch has no placement for.
        """
        if self._torch_placements is None:
            self._torch_placements = to_torch(self)
        return self._torch_placements


@skip_alone
def layout_of(x: "DTensor") -> Layout:
    """How a DTensor is laid out, as one object that can be printed and compared.

    Returns:
        A Layout: global `shape`, `stride` and `dtype`; `sharding` (mesh, placements, and which axis splits first);
        `local_shape` and `box`, the shape, and the offsets and sizes, of this rank's part; `boxes()`, those of all.

    Raises:
        TypeError: `x` is no DTensor of this package.
    """
    found = getattr(x, "_spec", None)
    if isinstance(found, TensorLayout):
        return found.plain
    raise TypeError(f"layout_of takes a torchshard.DTensor, not a {type(x).__module__}.{type(x).__qualname__}")


def layout_for(sharding: Sharding, shape: Sequence[int], stride: Sequence[int], dtype: Any) -> TensorLayout:
    """The layout of a tensor on a DeviceMesh."""
    found = sharding.layout(shape, stride, dtype)
    assert isinstance(found, TensorLayout), f"{sharding} belongs to no DeviceMesh"
    return found


def is_made_of_others(x: torch.Tensor) -> bool:
    """Whether what a tensor says of memory is not its own: its class answers operators, with other tensors it has.

    So are quantized weights of torchao, masked tensors, and DTensors.
    """
    return type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def of_played_ranks() -> ShardingError:
    """What is said where torch's LocalTensorMode has one process play all ranks."""
    return ShardingError(
        "All ranks are played in one process, which DTensors of torchshard cannot be.",
        expected="a process that is one rank",
        got="LocalTensorMode",
        fix="start the ranks; torchshard.explain on a fake process group shows what each would do",
    )


def require_strided(x: Any, where: str) -> None:
    """Raise ShardingError unless a tensor has its elements in memory, by strides and as numbers.

    What is sparse, nested, quantized or in a format of MKL-DNN can neither be cut nor sent as one. One of torch's
    DTensors is spread already: ranks have parts of other sizes, or none, so that to send it as one never ends.
    """
    if isinstance(x, upstream.DTensor):
        raise ShardingError(
            "A DTensor is made of plain tensors.",
            expected="a plain torch.Tensor",
            got=f"one of torch's own DTensors, of shape {tuple(x.shape)} and placements {x.placements}",
            where=where,
            fix="DTensor.from_torch(it), which shares its memory, and redistribute(placements=...) for others",
        )
    if not isinstance(x, torch.Tensor):
        raise ShardingError(
            "A DTensor is made of a tensor.",
            expected="a torch.Tensor",
            got=f"{type(x).__name__}: {reprlib.repr(x)}",
            where=where,
            fix="torch.tensor(it), or torch.from_numpy(it) of an array",
        )
    if x.layout is torch.strided and not (x.is_nested or x.is_quantized):
        if type(x) is torch.Tensor:
            return
        if type(x).__name__ == "LocalTensor":
            raise of_played_ranks()
        if hasattr(x, "local_shards"):  # of torch.distributed.tensor._shards_wrapper
            raise ShardingError(
                "A tensor that wraps several parts of a larger one is no part of a DTensor.",
                expected="one plain torch.Tensor",
                got=f"{type(x).__name__} of {len(x.local_shards())} parts",
                where=where,
                fix="torchshard.ShardedTensor.from_local_shards of its parts and their offsets; or dcp.save the "
                "tensor, and convert the checkpoint",
            )
        return
    kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
    if x.is_quantized:
        kind = f"a quantized tensor of {x.dtype}"
    raise ShardingError(
        "A DTensor holds dense tensors only.",
        expected="a tensor with layout torch.strided that is not quantized",
        got=kind,
        where=where,
        fix="x.dequantize()" if x.is_quantized else "x.to_padded_tensor(0.0)" if x.is_nested else "x.to_dense()",
    )


@dataclass(frozen=True)
class MarkedSharding:
    """What a graph is told of a tensor with marks, in place of its sharding: where it leaves it is marked again."""

    sharding: Sharding
    marks: int

    def layout(self, shape: Sequence[int], stride: Sequence[int], dtype: Any) -> TensorLayout:
        """See Sharding.layout."""
        return layout_for(self.sharding, shape, stride, dtype).marked(self.marks)


Told = Sharding | MarkedSharding


def told_of(layout: TensorLayout) -> Told:
    """What a graph is told of a tensor of this layout beside its size, stride and dtype."""
    marks = layout.marks & ~SEVERED
    return MarkedSharding(layout.sharding, marks) if marks else layout.sharding


def sized(shape: tuple[int, ...], part: Sequence[int], told: Told) -> tuple[int, ...]:
    """A global shape in a trace, where a length of which every rank has the same fixed number is one too.

    torch's symbols are for lengths from 2 on: that of one row for each rank would become a number while it is traced.
    And where a length is a number, that of the part is one: Dynamo makes symbols of both where each has changed, so of
    the part alone where a tensor of the same size is split otherwise.
    """
    sharding = told.sharding if isinstance(told, MarkedSharding) else told
    if len(part) != len(shape):
        return shape
    for n, held in zip(shape, part, strict=True):
        if type(n) is int and type(held) is not int:
            int(held)
    for dim, axes in sharding.splits.items():
        n, held = shape[dim], part[dim]
        if type(n) is int or type(held) is not int:
            continue
        if expected(n) == held * math.prod([sharding.mesh.shape[a] for a in axes]):
            shape = (*shape[:dim], int(n), *shape[dim + 1 :])
    return shape


def require_own_graphs() -> None:
    """Raise UnsupportedOperatorError where a graph is to run on other ranks: it would hold this one's numbers."""
    if graphs_are_shared():
        raise unsupported(
            "A graph of DTensors or ShardedTensors is of the rank that compiles it.",
            expected="compile_on_one_rank=False in the configuration of torch",
            got="True",
            fix="compile on every rank",
        )


def require_lengths(part: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise ShardingError where torch.export is to vary a length of a DTensor, and not that of its part.

    Of an input that is made of others torch gives `Dim("n")` to the whole alone: the length would be a number.
    """
    lengths = part.shape if len(part.shape) == len(shape) else ()
    for dim, (n, held) in enumerate(zip(shape, lengths, strict=False)):
        if type(n) is not int and type(held) is int and held > 1 and exports(part):
            raise ShardingError(
                f"torch.export varies dim {dim} of a DTensor, and not that of its part.",
                expected="lengths of inputs that vary together",
                got=f'Dim("name") for dim {dim} of a DTensor that is {expected(n)} long, of which this rank has {held}',
                fix=f"dynamic_shapes={{{dim}: torch.export.Dim.DYNAMIC}} for it, or Dim.DYNAMIC(min=2, max=64)",
            )


def global_stride(shape: Sequence[int], local: Sequence[int]) -> tuple[int, ...]:
    """Strides of a global tensor whose parts have the strides `local`: expanded dims stay expanded."""
    kept = [d for d, stride in enumerate(local) if stride or shape[d] == 1]
    dense = dense_stride([shape[d] for d in kept], [local[d] for d in kept])
    stride = dict(zip(kept, dense, strict=True))
    return tuple([stride.get(d, 0) for d in range(len(shape))])


def dense_stride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for `shape`, the dims in the memory order that the strides `like` have.

    Expanded dims, of stride 0, stay between their neighbours, as in what torch makes like an expanded tensor
    (ATen's infer_dense_strides).
    """
    if 0 in like:
        inward = _inward(shape, like)
    else:
        inward = sorted(range(len(shape)), key=lambda d: (like[d], -d))
    stride, step = [0] * len(shape), 1
    for d in inward:
        stride[d], step = step, step * max(shape[d], 1)
    return tuple(stride)


def _inward(shape: Sequence[int], like: Sequence[int]) -> list[int]:
    """The dims from the innermost to the outermost, sorted by insertion: a stride of 0 compares with none."""
    order = list(range(len(like)))[::-1]
    for k in range(1, len(order)):
        at = k
        for before in range(k - 1, -1, -1):
            inner, outer = order[before], order[at]
            if 0 in (like[inner], like[outer]):
                continue
            if like[inner] < like[outer]:
                break
            if like[inner] > like[outer] or shape[inner] > shape[outer]:
                order[before], order[at], at = outer, inner, before
    return order


def same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides put the dims of a part in the same order in memory; a dim that does not step is anywhere."""
    if one == other or 0 in shape:
        return True
    steps = [d for d, n in enumerate(shape) if n != 1 and one[d] and other[d]]
    lengths = [shape[d] for d in steps]
    dense = [dense_stride(lengths, [stride[d] for d in steps]) for stride in (one, other)]
    return dense[0] == dense[1]


def told_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides as ranks compare them: row-major where there are no elements, 1 for a dim of one element."""
    if 0 in shape:
        return contiguous_stride(shape)
    return tuple([1 if n == 1 else step for n, step in zip(shape, stride, strict=True)])


def kept_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of what torch makes in the shape of a tensor: the tensor's own where they leave no gaps (empty_like)."""
    step = 1
    for n, s in sorted(((n, s) for n, s in zip(shape, stride, strict=True) if n != 1), key=lambda pair: pair[1]):
        if s != step:
            return dense_stride(shape, stride)
        step *= n
    return tuple(stride)


def known(*numbers: Any) -> bool:
    """Whether none of these is a symbol."""
    return all(known(*n) if isinstance(n, (list, tuple)) else not isinstance(n, torch.SymInt) for n in numbers)


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements may lie on one another: not if each dim steps over all that lies within those inside of it."""
    reach = 1
    for n, s in sorted(((n, s) for n, s in zip(shape, stride, strict=True) if n != 1), key=lambda pair: pair[1]):
        if s < reach:
            return 0 not in shape
        reach += (n - 1) * s
    return False
