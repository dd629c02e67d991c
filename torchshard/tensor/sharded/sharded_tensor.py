"""The ShardedTensor class. Its operators are in operators.py, how it moves in moving.py, pickles in saving.py."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchshard._torch import (
    group_of_theirs,
    no_torch_function,
    skip_alone,
    skip_methods,
    stand_in,
    their_sharded_tensor,
)
from torchshard.errors import ShardingError
from torchshard.layout.layout import contiguous_stride
from torchshard.tensor.sharded import checking, specs
from torchshard.tensor.sharded.held import HeldInParts, joined
from torchshard.tensor.sharded.specs import AnyGroup, Group, Shard, TensorProperties
from torchshard.tensor.sharded.tracing import TracedByParts


@skip_methods(but_not_below=["backward"])
class ShardedTensor(HeldInParts, TracedByParts, Tensor):
    """A tensor whose parts are boxes with an owner each; every rank may hold none, one or several.

    It is described by torch's own metadata. Pointwise and optimizer operators run on the parts, without communication;
    others are refused with the way out. The constructor leaves the values unset, as torch's does.

    Args:
        sharding_spec: how it is cut: ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec.
        size: lengths of the dims, as numbers or as one sequence.
        dtype: of the elements; torch's default dtype by default.
        layout: torch.strided, the only one.
        requires_grad: as of any tensor.
        pin_memory: whether the parts lie in pinned memory.
        memory_format: torch.contiguous_format, the only one.
        process_group: the ranks; the default group by default.
        init_rrefs: refused: parts are reached by collectives, not by RPC.
    """

    __torch_function__ = no_torch_function()

    _token: object  # shared by tensors of the same memory, of which this rank may have none

    @staticmethod
    def __new__(
        cls: type["ShardedTensor"],
        sharding_spec: Any,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> "ShardedTensor":
        """Allocate this rank's parts."""
        _refuse_rrefs(init_rrefs)
        if layout is not torch.strided or memory_format is not torch.contiguous_format:
            raise ShardingError(
                "The parts of a ShardedTensor are dense.",
                expected="layout=torch.strided, memory_format=torch.contiguous_format",
                got=f"{layout}, {memory_format}",
            )
        properties = TensorProperties(dtype or torch.get_default_dtype(), layout, requires_grad, pin_memory=pin_memory)
        metadata = specs.metadata_of(sharding_spec, specs.flat_size(size), properties)
        group = specs.group_given(process_group)
        ranks = dist.get_process_group_ranks(group)
        checking.check_whole(metadata, ranks)
        shards = [
            Shard(
                torch.empty(
                    shard.shard_sizes, dtype=properties.dtype, device=shard.placement.device(), pin_memory=pin_memory
                ).requires_grad_(requires_grad),
                shard,
            )
            for shard in metadata.shards_metadata
            if shard.placement.rank() == dist.get_rank()
        ]
        checking.check_own(shards, metadata, dist.get_rank())
        return made(shards, metadata, sharding_spec, group)

    @staticmethod
    def __torch_dispatch__(  # type: ignore[override]
        func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from torchshard.tensor.sharded import operators

        return operators.run(func, args, kwargs or {})

    @classmethod
    def from_spec(cls, spec: Any, *size: Any, **options: Any) -> "ShardedTensor":
        """A ShardedTensor whose values are not set; the same as ShardedTensor(spec, *size, **options)."""
        return cls(spec, *size, **options)

    @classmethod
    def from_local(
        cls, local_tensor: Tensor, dim: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> "ShardedTensor":
        """The parts of all ranks, one a rank, joined along `dim` in the group's order; sizes are exchanged.

        Args:
            local_tensor: this rank's part, used as it is; it may be empty.
            dim: along which the parts follow one another.
            process_group: the ranks; the default group by default.

        Raises:
            RankMismatchError: the parts do not fit together; names the ranks.
        """

        def shape() -> tuple[int, ...]:
            if not -local_tensor.ndim <= dim < local_tensor.ndim:
                raise ShardingError("No dim to join along.", expected=f"a dim of {tuple(local_tensor.shape)}", got=dim)
            return tuple(local_tensor.shape)

        group = specs.group_given(process_group)
        ranks = dist.get_process_group_ranks(group)
        shapes = checking.of_all(shape, group)
        dim = dim + local_tensor.ndim if dim < 0 else dim
        place = ranks.index(dist.get_rank())
        offset = [0] * local_tensor.ndim
        offset[dim] = sum(shape[dim] for shape in shapes[:place])
        size = list(shapes[0])
        size[dim] = sum(shape[dim] for shape in shapes)
        part = Shard.from_tensor_and_offsets(local_tensor, offset, dist.get_rank())
        return cls.from_local_shards([part], size, process_group=group)

    @classmethod
    def from_local_shards(
        cls,
        local_shards: Sequence[Any],
        *global_size: Any,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> "ShardedTensor":
        """A ShardedTensor around the parts of all ranks, which compare their metadata; all ranks call this.

        Args:
            local_shards: torch's Shards: this rank's tensors, used as they are, with offsets, sizes and placement.
            global_size: of the whole tensor.
            process_group: the ranks; the default group by default.
            init_rrefs: refused.

        Raises:
            ShardingError: parts that overlap, leave holes, lie outside, or do not agree with their metadata; the same
                on every rank, with the rank that it concerns.
            RankMismatchError: ranks differ in size, dtype or properties; names them.
        """
        _refuse_rrefs(init_rrefs)
        group = specs.group_given(process_group)
        ranks = dist.get_process_group_ranks(group)
        metadata = checking.global_metadata(local_shards, global_size, group, ranks)
        return joined(local_shards, metadata, specs.inferred_spec(metadata), group)  # type: ignore[no-any-return]

    @classmethod
    def from_shards_and_metadata(
        cls,
        local_shards: Sequence[Any],
        sharded_tensor_metadata: Any,
        process_group: dist.ProcessGroup | None = None,
        init_rrefs: bool = False,
        sharding_spec: Any = None,
    ) -> "ShardedTensor":
        """A ShardedTensor around this rank's parts, described by metadata that every rank has; no communication.

        Raises:
            ShardingError: the metadata does not make up a tensor, or this rank's parts do not agree with it.
        """
        _refuse_rrefs(init_rrefs)
        group = specs.group_given(process_group)
        ranks = dist.get_process_group_ranks(group)
        checking.check_whole(sharded_tensor_metadata, ranks)
        checking.check_own(local_shards, sharded_tensor_metadata, dist.get_rank())
        spec = sharding_spec or specs.inferred_spec(sharded_tensor_metadata)
        return joined(local_shards, sharded_tensor_metadata, spec, group)  # type: ignore[no-any-return]

    @property
    def _process_group(self) -> dist.ProcessGroup | None:
        return self._group.process_group

    @property
    def data(self) -> "ShardedTensor":
        """The same tensor without history; set it to take over the parts of another ShardedTensor, as modules do."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, ShardedTensor):
            raise ShardingError("Not the data of a ShardedTensor.", expected="a ShardedTensor", got=type(other))
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        for name in ("_local_shards", "_metadata", "_sharding_spec", "_group", "_token"):
            setattr(self, name, getattr(other, name))
        self.__dict__.pop("_nothing", None)  # of another dtype, maybe

    # As torch's own class calls them.
    _init_from_local_shards = from_local_shards
    _init_from_local_shards_and_global_metadata = from_shards_and_metadata

    @classmethod
    def from_torch(cls, upstream: Any) -> "ShardedTensor":
        """One of torch's own ShardedTensors, around the same shards and metadata.

        Raises:
            ShardingError: its metadata does not make up a tensor.
        """
        metadata, group = upstream.metadata(), group_of_theirs(upstream)
        checking.check_whole(metadata, dist.get_process_group_ranks(group))
        ours = made(upstream.local_shards(), metadata, upstream.sharding_spec(), group)
        ours._token = getattr(upstream, "_token", ours._token)
        return ours

    def to_torch(self) -> Any:
        """torch's own ShardedTensor around the same memory, without history; it asks for gradients where this does."""
        shards, metadata = specs.asking(self._local_shards, self._metadata, self.requires_grad)
        theirs = their_sharded_tensor(shards, metadata, self._sharding_spec, self._group.living())
        theirs._token = self._token
        return theirs

    def backward(self, gradient: Tensor | None = None, *args: Any, **options: Any) -> None:
        """Gradients of the leaves, as of any tensor; `gradient` must be a ShardedTensor that is cut as this one is.

        Raises:
            ShardingError: it is a plain tensor, or cut in another way.
        """
        self._require_gradient(gradient)
        Tensor.backward(self, gradient, *args, **options)  # type: ignore[no-untyped-call]

    def _require_gradient(self, gradient: Tensor | None) -> None:
        from torchshard.tensor.sharded import operators

        found = [self, gradient] if isinstance(gradient, ShardedTensor) else [self]
        operators.require_alike("backward", found, [gradient])

    def sharding_spec(self) -> Any:
        """How the tensor is cut."""
        return self._sharding_spec

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the whole tensor into `out` on one rank. All ranks of the group call this.

        Args:
            dst: place of that rank in the process group.
            out: of the tensor's size; given there only. Values arrive in their own dtype, and are converted last.
            enforce_dtype: deprecated in torch; converting is always right here, so it changes nothing.
            dtype: to which the values are converted before they are written.

        Raises:
            ValueError: `out` is missing, is given elsewhere, or has another size.
        """
        from torchshard.tensor.sharded import moving

        moving.gather(self, dst, out, dtype)

    def reshard(self, resharding_spec: Any) -> "ShardedTensor":
        """Cut this tensor and its gradient as another spec says, in place; ranks receive what they lack. All call this.

        Args:
            resharding_spec: of any kind, on the ranks of the process group.
        """
        from torchshard.tensor.sharded import moving

        return moving.reshard(self, resharding_spec)

    def cpu(self, memory_format: Any = torch.preserve_format, process_group: Any = None) -> "ShardedTensor":
        """This tensor in CPU memory; itself where it is there already.

        Args:
            memory_format: torch.preserve_format or torch.contiguous_format.
            process_group: that can talk there; the tensor's own by default.
        """
        return self.to("cpu", memory_format=memory_format, process_group=process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: Any = torch.preserve_format,
        process_group: Any = None,
    ) -> "ShardedTensor":
        """This tensor on each rank's current CUDA device; arguments as of `to`."""
        where = torch.device("cuda" if device is None else device)
        return self.to(where, non_blocking=non_blocking, memory_format=memory_format, process_group=process_group)

    def to(self, *args: Any, **options: Any) -> "ShardedTensor":
        """This tensor with another dtype or on other devices: itself where nothing changes.

        Args:
            args: as of Tensor.to: a dtype, a device, both, or a tensor that has them.
            options: as of Tensor.to; and `process_group`, which can talk there, the tensor's own by default.
        """
        from torchshard.tensor.sharded import moving

        return moving.to(self, *args, **options)

    def is_pinned(self, device: Any = None) -> bool:
        """Whether the parts lie in pinned memory."""
        return bool(self._metadata.tensor_properties.pin_memory)

    def remote_shards(self) -> Any:
        """Refused, as in torch where init_rrefs is False."""
        raise RuntimeError("ShardedTensor has no RRefs to remote shards; gather() or reshard() brings them here")

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor({self._metadata})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTensor":
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            return Tensor.__deepcopy__(self, memo)  # type: ignore[no-any-return, no-untyped-call]  # raises as for any
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
        copied = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return memo.setdefault(id(self), copied)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        from torchshard.tensor.sharded import saving

        return saving.reduced(self)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """What this rank writes of the tensor: see checkpointing.py."""
        from torchshard.tensor.sharded import checkpointing

        return checkpointing.write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        """Offsets and sizes of what this rank holds: see checkpointing.py."""
        from torchshard.tensor.sharded import checkpointing

        return checkpointing.chunks(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The part that an index names: see checkpointing.py."""
        from torchshard.tensor.sharded import checkpointing

        return checkpointing.shard(self, index)


def made(
    shards: Sequence[Any], metadata: Any, spec: Any, group: AnyGroup, nothing: Tensor | None = None
) -> ShardedTensor:
    """A ShardedTensor around these parts, which are not checked; `nothing` stands for none in graphs."""
    size, properties = tuple(metadata.size), metadata.tensor_properties
    device = shards[0].tensor.device if shards else specs.device_here(metadata)
    x: Any = stand_in(ShardedTensor, size, contiguous_stride(size), properties.dtype, device)
    x._local_shards, x._metadata, x._sharding_spec, x._group = list(shards), metadata, spec, Group.of(group)
    x._token = object()
    if not shards and nothing is not None:
        x._nothing = nothing
    return x.requires_grad_(properties.requires_grad)  # type: ignore[no-any-return]


def group_of(x: ShardedTensor) -> dist.ProcessGroup:
    """The process group of a ShardedTensor.

    Raises:
        ShardingError: it was loaded without one, or it was destroyed and none like it has been made.
    """
    if (group := x._group.living()) is None:
        raise ShardingError(
            "This ShardedTensor was loaded without a process group: its ranks cannot talk.",
            expected="a process group of the ranks that saved it",
            got="none, or one of other ranks",
            fix="call init_process_group() before torch.load(), or load within load_with_process_group(group) of them",
        )
    return group


def _refuse_rrefs(init_rrefs: bool) -> None:
    if init_rrefs:
        raise NotImplementedError("init_rrefs=True: parts are reached by gather() and reshard(), not by RPC")


@skip_alone
def restored(*state: Any) -> ShardedTensor:
    """The ShardedTensor of a pickle; see saving.py."""
    from torchshard.tensor.sharded import saving

    return saving.restored(*state)


# The default torch.load makes objects of known classes only, and may come before any use.
torch.serialization.add_safe_globals([restored])
