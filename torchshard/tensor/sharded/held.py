"""A ShardedTensor and this rank's parts: where gradients cross between them, and methods that ask for memory."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard._torch import skip_methods, waited
from torchshard.errors import UnsupportedOperatorError
from torchshard.tensor.sharded import specs
from torchshard.unsupported import unsupported


@skip_methods()
class HeldInParts:
    """What a ShardedTensor says of its parts. Operators on these are recorded: their gradients are the tensor's."""

    _local_shards: list[Any]
    _metadata: Any
    requires_grad: bool

    def metadata(self) -> Any:
        """The ShardedTensorMetadata of the whole tensor."""
        return specs.asking((), self._metadata, self.requires_grad)[1]

    def local_shards(self) -> list[Any]:
        """This rank's parts, as torch's Shards; none, one or several."""
        parts = self._parts()
        if not parts or parts[0] is self._local_shards[0].tensor:
            return self._local_shards
        held = zip(parts, self._local_shards, strict=True)
        if torch.compiler.is_dynamo_compiling():
            return [specs.Shard(part, shard.metadata) for part, shard in held]
        return [_HandedOut(part, shard) for part, shard in held]

    def _parts(self) -> tuple[Tensor, ...]:
        parts = tuple([shard.tensor for shard in self._local_shards])
        if not (parts and self.requires_grad and torch.is_grad_enabled()) or any(part.requires_grad for part in parts):
            return parts
        return _Parted.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def local_tensor(self) -> Tensor:
        """This rank's part, where it has exactly one.

        Raises:
            NotImplementedError: it has none or several; local_shards() has them.
        """
        if len(self._local_shards) != 1:
            raise NotImplementedError(f"this rank holds {len(self._local_shards)} parts, not one; see local_shards()")
        return self.local_shards()[0].tensor  # type: ignore[no-any-return]

    def share_memory_(self) -> Any:
        """Move this rank's parts to shared memory."""
        for shard in self._local_shards:
            shard.tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether this rank's parts are in shared memory."""
        return all(shard.tensor.is_shared() for shard in self._local_shards)

    def storage(self) -> Any:
        """Refused: a ShardedTensor has no storage of its own."""
        raise _no_memory("storage()")

    def apply_(self, callable: Any) -> Any:
        """Refused: torch would write to where a ShardedTensor has no memory."""
        raise _no_memory("apply_()")

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise _no_memory("__dlpack__()")


class _HandedOut(specs.Shard):  # type: ignore[misc, valid-type]
    """A part with history, for one that a ShardedTensor holds: what is put in its place is held from then on."""

    def __init__(self, part: Tensor, held: Any) -> None:
        super().__init__(part, held.metadata)
        self._held = held

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "tensor" and "_held" in vars(self):
            self._held.tensor = value

    def __reduce__(self) -> Any:
        return specs.Shard, (self.tensor, self.metadata)


def joined(shards: Sequence[Any], metadata: Any, spec: Any, group: dist.ProcessGroup) -> Any:
    """A ShardedTensor around these parts, which are not checked; it has the history that they have."""
    from torchshard.tensor.sharded.sharded_tensor import made

    if not torch.is_grad_enabled() or all(shard.tensor.grad_fn is None for shard in shards):
        here = [(shard, waited(shard.tensor)) for shard in shards]  # what others read and pickles hold is memory
        return made([s if s.tensor is t else specs.Shard(t, s.metadata) for s, t in here], metadata, spec, group)
    tensors = [shard.tensor for shard in shards]
    return _Joined.apply([shard.metadata for shard in shards], metadata, spec, group, *tensors)  # type: ignore[no-untyped-call]


@skip_methods()
class _Parted(torch.autograd.Function):
    """This rank's parts of a ShardedTensor: the same memory."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.cut = x.detach()
        return tuple([shard.tensor.detach() for shard in x._local_shards])

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        from torchshard.tensor.sharded.operators import cut_as

        if all(grad is None for grad in given):
            return None
        parts = [shard.tensor for shard in ctx.cut._local_shards]
        grads = [torch.zeros_like(part) if grad is None else grad for part, grad in zip(parts, given, strict=True)]
        return cut_as(ctx.cut, [grad.contiguous() for grad in grads], grads[0])


@skip_methods()
class _Joined(torch.autograd.Function):
    """A ShardedTensor of this rank's parts: the same memory."""

    @staticmethod
    def forward(
        ctx: Any, own: Sequence[Any], metadata: Any, spec: Any, group: dist.ProcessGroup, *tensors: Tensor
    ) -> Any:
        from torchshard.tensor.sharded.sharded_tensor import made

        ctx.set_materialize_grads(False)
        shards = [specs.Shard(waited(t).detach(), place) for t, place in zip(tensors, own, strict=True)]
        x = made(*specs.asking(shards, metadata, False), spec, group)
        ctx.cut = x.detach()
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from torchshard.tensor.sharded.operators import require_alike

        if grads[0] is None:
            return None, None, None, None, *[None for _ in ctx.cut._local_shards]
        require_alike("backward", [ctx.cut, *grads], grads)
        return None, None, None, None, *[shard.tensor for shard in grads[0]._local_shards]


def _no_memory(what: str) -> UnsupportedOperatorError:
    return unsupported(
        f"{what} shares the memory of a tensor, which a ShardedTensor spreads over ranks.",
        expected="a plain tensor",
        got="a ShardedTensor",
        fix=f"x.local_tensor().{what} for the part of this rank; x.gather() makes a plain tensor of the whole",
    )
