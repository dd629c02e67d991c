"""ShardedTensors in compiled regions: taken apart into this rank's parts, and put together again around traced ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import (
    group_named,
    let_return_beside_gradients,
    mend_graphs,
    nest_in_place,
    operate_with,
    skip_alone,
    skip_methods,
    store_who_asks,
)
from torchshard.errors import ShardingError
from torchshard.tensor.layout import require_own_graphs
from torchshard.tensor.regions.caching import digest
from torchshard.tensor.sharded import specs
from torchshard.unsupported import unsupported


class Cut:
    """Which parts there are and who has them: what a graph is made for. It is not to be changed.

    Args:
        metadata: of the whole tensor.
        spec: that says so.
        own: metadata of this rank's parts.
        group: as ShardedTensors hold it.
    """

    def __init__(self, metadata: Any, spec: Any, own: Sequence[Any], group: specs.Group) -> None:
        self.metadata, self.spec, self.own, self.group = metadata, spec, own, group

    @cached_property
    def _decides(self) -> tuple[Any, ...]:
        places = [str(s.placement) for s in self.metadata.shards_metadata]
        boxes = tuple(zip(specs.boxes_of(self.metadata), places, strict=True))
        return boxes, tuple(self.metadata.size), *self.group.decides

    def fits(self, other: "Cut") -> bool:
        """Whether the parts are the same, whatever spec says so."""
        return self is other or self._decides == other._decides

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cut) and self.fits(other) and self._spec_text == other._spec_text

    @cached_property
    def _spec_text(self) -> str:
        return str(self.spec)

    def __hash__(self) -> int:
        return hash(self._decides)

    def __repr__(self) -> str:
        return f"Cut{self._decides, self._spec_text}"

    def __reduce__(self) -> Any:
        members = self.group.members
        return _cut, (self.metadata, self.spec, self.own, None if members is None else members.name)

    def __deepcopy__(self, memo: Any) -> "Cut":
        return self


def _cut(metadata: Any, spec: Any, own: Sequence[Any], group: str | None) -> Cut:
    return Cut(metadata, spec, own, specs.Group.of(None if group is None else group_named(group)))


def _refuse_hooks(operator: Callable[..., Any], *operands: Any, **also: Any) -> Any:
    """In place of the operator behind hooks: what calls them is traced, which makes no ShardedTensor of its parts."""
    raise unsupported(
        "A backward hook in a compiled forward takes no gradient that is a ShardedTensor.",
        expected="a gradient that is a DTensor or a plain tensor",
        got="a ShardedTensor",
        where="a backward graph for compiled autograd",
        fix="register the hook outside of the region, or of a DTensor: torchshard.state_dict.to_dtensor(x, mesh, ...)",
    )


class _WherePartsHaveNoGradients:
    """A method that only those ShardedTensors have; operators in a graph would lose gradients of parts."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def __get__(self, x: Any, owner: type) -> Callable[..., Any]:
        if x is not None and any(shard.tensor.requires_grad for shard in x._local_shards):
            raise AttributeError(self.method.__name__)
        return self.method.__get__(x, owner)  # type: ignore[no-any-return]


@skip_methods()
class TracedByParts:
    """What Dynamo and AOTAutograd ask of a ShardedTensor."""

    _local_shards: list[Any]
    _metadata: Any
    _sharding_spec: Any
    _group: specs.Group
    _cut: Cut
    _nothing: Tensor  # in graphs, where this rank has no part
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @_WherePartsHaveNoGradients
    @skip_alone
    def __tensor_flatten__(self) -> tuple[list[str], Cut]:
        """Names of the attributes that hold this rank's parts, and what else decides about a graph."""
        cut = self.__dict__.get("_cut")
        if cut is None or cut.metadata is not self._metadata:
            own = [shard.metadata for shard in self._local_shards]
            cut = self._cut = Cut(self._metadata, self._sharding_spec, own, self._group)
            if not own:
                self._nothing = self._empty_part()
        names = [_part(k) for k in range(len(self._local_shards))] or ["_nothing"]
        if getattr(self, names[0]).__class__ is not Tensor:  # while tracing
            mend_graphs()
        return names, cut

    def _empty_part(self) -> Tensor:
        """A tensor without elements like this rank's parts, traced where they are; always one where there are none."""
        if self._local_shards:
            return self._local_shards[0].tensor.new_empty(0)  # type: ignore[no-any-return]
        own = self.__dict__.get("_nothing")
        return torch.empty(0, dtype=self.dtype, device=self.device) if own is None else own

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], cut: Cut, size: Any, stride: Any) -> Any:
        """A ShardedTensor around other tensors as this rank's parts."""
        from torchshard.tensor.sharded.sharded_tensor import ShardedTensor, made

        example = next(iter(inner.values()))
        if example.__class__ is not Tensor:  # while tracing
            require_own_graphs()
            let_return_beside_gradients(ShardedTensor)
            nest_in_place(ShardedTensor)
            store_who_asks(ShardedTensor)
            operate_with(ShardedTensor, "trace_wrapped", _refuse_hooks)
        changed = {"dtype": example.dtype, "requires_grad": False, "pin_memory": False}
        metadata = replace(cut.metadata, tensor_properties=replace(cut.metadata.tensor_properties, **changed))
        shards = [specs.Shard(inner[_part(k)], own) for k, own in enumerate(cut.own)]
        return made(shards, metadata, cut.spec, cut.group, example)

    def __coerce_tangent_metadata__(self) -> "TracedByParts":
        return self

    def __coerce_same_metadata_as_tangent__(self, expected: Cut, expected_type: Any = None) -> "TracedByParts | None":
        """This gradient, where a compiled backward expects one that is cut so; None where it expects no ShardedTensor.

        Raises:
            ShardingError: it is cut in another way.
        """
        if expected_type is not None:
            return None
        if not self.__tensor_flatten__()[1].fits(expected):
            raise ShardingError(
                "A gradient of a compiled region is cut in another way than its tensor.",
                expected=f"cut as {expected.spec}",
                got=f"cut as {self._sharding_spec}",
                fix="gradient.reshard(x.sharding_spec())",
            )
        return self

    @staticmethod
    def __zeros_as_tangent__(whole: Tensor, cut: Cut) -> Any:
        """Zeros for a result of a graph that got no gradient, of zeros in the shape of the whole tensor."""
        boxes = [zip(own.shard_offsets, own.shard_sizes, strict=True) for own in cut.own]
        parts = [whole[tuple([slice(o, o + n) for o, n in box])] for box in boxes]
        inner = {_part(k): part for k, part in enumerate(parts)} or {"_nothing": whole.new_empty(0)}
        return TracedByParts.__tensor_unflatten__(inner, cut, whole.shape, whole.stride())

    def _stable_hash_for_caching(self) -> str:
        """What of this tensor decides about a compiled graph, for AOTAutograd's cache between processes."""
        strides = [shard.tensor.stride() for shard in self._local_shards]
        return digest(self.__tensor_flatten__()[1], strides, self.dtype, self.device, self.requires_grad)


def _part(k: int) -> str:
    """The attribute that holds part number k; a class whose __getattr__ finds it would not be traced."""
    name = f"_part_{k}"
    if not hasattr(TracedByParts, name):

        def replace_by(x: Any, tensor: Tensor) -> None:  # a gradient's part by a copy with the strides of the graph
            x._local_shards[k].tensor = tensor

        setattr(TracedByParts, name, property(lambda x: x._local_shards[k].tensor, replace_by))
    return name


def _local_shards(x: Any) -> list[Any]:
    own = [shard.metadata for shard in x._local_shards]
    return [specs.Shard(part, metadata) for part, metadata in zip(x._parts(), own, strict=True)]


# What Dynamo is to trace for methods that give no tensors. Parts are asked of the tensor, as operators may write them.
METHODS = {
    "local_shards": _local_shards,
    "metadata": lambda x: x._metadata,
    "sharding_spec": lambda x: x._sharding_spec,
}
