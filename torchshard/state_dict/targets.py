"""What a tensor shall become: each kind says who shall hold what, and makes the tensor of the parts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.comm.circle import this_rank
from torchshard.layout.boxes import Box, whole
from torchshard.layout.cuts import boxes_at
from torchshard.layout.holding import Holding
from torchshard.layout.layout import Sharding, contiguous_stride
from torchshard.state_dict.forms import Form, Memory
from torchshard.tensor.dtensor import wrap
from torchshard.tensor.layout import dense_stride, layout_for
from torchshard.tensor.mesh import BoundMesh
from torchshard.tensor.moving.carrying import by_bytes
from torchshard.tensor.sharded import checking, specs
from torchshard.tensor.sharded.sharded_tensor import made


class Target(ABC):
    """Who shall hold what of a tensor, and what is made of it."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What it is, in words that are the same on every rank."""

    @abstractmethod
    def holding(self, form: Form, memory: Memory) -> Holding:
        """Who shall hold what."""

    @abstractmethod
    def boxes(self, form: Form) -> list[Box]:
        """What this rank shall hold, empty boxes included."""

    @abstractmethod
    def device(self, form: Form) -> torch.device:
        """Where they shall lie."""

    def room(self, form: Form, box: Box) -> Tensor:
        """Memory for one of them, its dims in the memory order of the whole tensor."""
        if dense_stride(form.shape, form.stride) == contiguous_stride(form.shape):
            return torch.empty(box.size, dtype=form.dtype, device=self.device(form))
        return torch.empty_strided(
            box.size, dense_stride(box.size, form.stride), dtype=form.dtype, device=self.device(form)
        )

    @abstractmethod
    def finish(self, form: Form, parts: Sequence[Tensor]) -> Tensor | None:
        """The tensor; None where this rank shall have none."""


@dataclass(frozen=True)
class Whole(Target):
    """Whole tensors, on these ranks.

    Attributes:
        ranks: global ranks.
        cpu: whether in CPU memory.
    """

    ranks: tuple[int, ...]
    cpu: bool

    @property
    def text(self) -> str:
        """As of Target."""
        return f"whole on the ranks {list(self.ranks)}"

    def holding(self, form: Form, memory: Memory) -> Holding:
        """As of Target."""
        key = "whole", self.ranks, form.shape
        return memory.get(key) or memory.setdefault(key, Holding.everywhere(form.shape, self.ranks))

    def boxes(self, form: Form) -> list[Box]:
        """As of Target."""
        return [whole(form.shape)] if this_rank() in self.ranks else []

    def device(self, form: Form) -> torch.device:
        """As of Target."""
        return torch.device("cpu") if self.cpu else form.device

    def finish(self, form: Form, parts: Sequence[Tensor]) -> Tensor | None:
        """As of Target."""
        if not parts:
            return None
        return (parts[0].cpu() if self.cpu else parts[0]).requires_grad_(form.requires_grad)


@dataclass(frozen=True)
class OnMesh(Target):
    """DTensors of one sharding."""

    sharding: Sharding

    @property
    def mesh(self) -> BoundMesh:
        """The mesh."""
        mesh = self.sharding.mesh
        assert isinstance(mesh, BoundMesh), "a sharding that belongs to no DeviceMesh"
        return mesh

    @cached_property
    def text(self) -> str:
        """As of Target."""
        return f"{self.sharding} on the ranks {list(self.mesh.ranks)}"

    def holding(self, form: Form, memory: Memory) -> Holding:
        """As of Target."""
        key = self.sharding, form.shape
        return memory.get(key) or memory.setdefault(key, Holding.of_sharding(self.sharding, form.shape))

    def boxes(self, form: Form) -> list[Box]:
        """As of Target."""
        at = self.mesh.coordinate
        return [] if at is None else [box for box, _ in boxes_at(self.sharding, form.shape, at)]

    def device(self, form: Form) -> torch.device:
        """As of Target."""
        return _device_on(self.mesh, form)

    def finish(self, form: Form, parts: Sequence[Tensor]) -> Tensor | None:
        """As of Target."""
        device = self.device(form)
        local = self._joined(form, parts).to(device) if parts else torch.empty(0, dtype=form.dtype, device=device)
        layout = layout_for(self.sharding, form.shape, dense_stride(form.shape, form.stride), form.dtype)
        return wrap(local, layout).requires_grad_(form.requires_grad)

    def _joined(self, form: Form, parts: Sequence[Tensor]) -> Tensor:
        """This rank's parts as one; if they are several, in memory of its own, unless they are where they were."""
        at = self.mesh.coordinate
        if len(parts) == 1 or at is None:
            return parts[0]
        if form.local is not None and form.sharding is self.sharding:
            return form.local
        local = self.room(form, whole(self.sharding.part(form.shape, at)))
        for part, (_, inside) in zip(parts, boxes_at(self.sharding, form.shape, at), strict=True):
            local[inside.slices].copy_(part)
        return local


@dataclass(frozen=True)
class AsOn(Target):
    """Plain tensors on the ranks of a mesh, with the values of one rank, which keeps its own.

    Attributes:
        source: the global rank.
        mesh: of the others.
    """

    source: int
    mesh: BoundMesh

    @property
    def text(self) -> str:
        """As of Target."""
        return f"as on rank {self.source}, on the ranks {list(self.mesh.ranks)}"

    def holding(self, form: Form, memory: Memory) -> Holding:
        """As of Target."""
        key = self, form.shape
        others = [rank for rank in self.mesh.ranks if rank != self.source]
        return memory.get(key) or memory.setdefault(key, Holding.everywhere(form.shape, others))

    def boxes(self, form: Form) -> list[Box]:
        """As of Target."""
        return [] if this_rank() == self.source else [whole(form.shape)]

    def device(self, form: Form) -> torch.device:
        """As of Target."""
        return _device_on(self.mesh, form)

    def finish(self, form: Form, parts: Sequence[Tensor]) -> Tensor | None:
        """As of Target."""
        if not parts:
            return form.parts[0][1].requires_grad_(form.requires_grad)
        return (parts[0] if form.device.type == "meta" else parts[0].to(form.device)).requires_grad_(form.requires_grad)


@dataclass(frozen=True)
class InParts(Target):
    """ShardedTensors cut by a spec.

    Attributes:
        spec: how.
        ranks: global ranks of the group, in its order.
        group: the process group.
        _described: what is made of tensors that are alike, which share it: a description is as long as there are ranks.
    """

    spec: Any
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    _described: dict[Any, tuple[Any, list[Any]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def text(self) -> str:
        """As of Target."""
        return f"cut as {self.spec}"

    def described(self, form: Form) -> tuple[Any, list[Any]]:
        """The metadata of what is made of a tensor, and those of this rank's parts."""
        key = form.shape, form.dtype, form.requires_grad
        if key not in self._described:
            made = specs.metadata_of(self.spec, form.shape, specs.TensorProperties(form.dtype))
            made = replace(made, tensor_properties=replace(made.tensor_properties, requires_grad=form.requires_grad))
            here = this_rank()
            self._described[key] = made, [s for s in made.shards_metadata if s.placement.rank() == here]
        return self._described[key]

    def holding(self, form: Form, memory: Memory) -> Holding:
        """As of Target."""
        key = id(self.spec), form.shape, self.ranks
        if key not in memory:
            metadata, _ = self.described(form)
            checking.check_whole(metadata, self.ranks)
            memory[key] = specs.holding_of(metadata, self.ranks)
        return memory[key]

    def boxes(self, form: Form) -> list[Box]:
        """As of Target."""
        return [specs.box_of(shard, form.shape) for shard in self.described(form)[1]]

    def device(self, form: Form) -> torch.device:
        """As of Target."""
        return specs.device_here(self.described(form)[0])

    def room(self, form: Form, box: Box) -> Tensor:
        """As of Target."""
        return torch.empty(box.size, dtype=form.dtype, device=self.device(form))

    def finish(self, form: Form, parts: Sequence[Tensor]) -> Tensor | None:
        """As of Target."""
        metadata, mine = self.described(form)
        dense = [by_bytes(Tensor.contiguous, p.to(s.placement.device())) for p, s in zip(parts, mine, strict=True)]
        shards = [specs.Shard(part.requires_grad_(form.requires_grad), s) for part, s in zip(dense, mine, strict=True)]
        return made(shards, metadata, self.spec, self.group)


def _device_on(mesh: BoundMesh, form: Form) -> torch.device:
    """That of the tensor, if it is of the mesh's kind."""
    kind = mesh.device_mesh.device_type
    return form.device if form.device.type == kind else torch.device(kind)
