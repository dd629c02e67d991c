"""What FSDP1 asks where parameters are DTensors: the six transforms, for any mesh.

FSDP1 flattens parameters, cuts the flat tensor, gathers it for forward, and makes views of it. It knows plain tensors;
an extension takes DTensors apart before they are flattened, puts them together over the views, and does what concerns
them in sharded state dicts.
"""

import weakref
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchshard._torch import fsdp_extension_base, mark_flattened, untraced
from torchshard.errors import ShardingError
from torchshard.parallel.fsdp import chunks
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.owners import Placed


def is_ours(x: Any) -> bool:
    """Whether a parameter was a DTensor of this package, by what was taken off it."""
    return isinstance(x, Placed) and x.kind is DTensor


class DTensorExtensions(fsdp_extension_base()):  # type: ignore[misc]
    """The extension for modules whose parameters are DTensors, of this package or of torch.

    FSDP makes one for each module that it wraps, after `install()`. The axes that parameters are laid out on may be
    any but those that FSDP has: FSDP, hybrid sharding, with tensor parallelism over one axis or more.

    Attributes:
        device_handle: what FSDP talks to the device with; None to leave streams alone.
        compute_stream: where views are made; FSDP sets it. By default the current stream.
    """

    def __init__(self, device_handle: Any = None) -> None:
        super().__init__()
        self.device_handle = device_handle
        self.compute_stream: Any = None
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        self._axes: set[str] = set()

    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Placed | None]:
        """This rank's part of a DTensor, and what to make the DTensor of again; other tensors as they are.

        Raises:
            ShardingError: the parameter is Partial, or is held under two names, which FSDP1 would untie.
        """
        x = chunks.as_ours(tensor)
        if x is None:
            return tensor, None
        layout = x._spec
        if layout.sharding.partial:
            raise ShardingError(
                "A Partial parameter cannot be flattened: no rank holds its values.",
                expected="Shard(dim) or Replicate() on every axis",
                got=layout,
                where=f"axis {layout.mesh.names[layout.sharding.partial[0]]} of the mesh {layout.mesh}",
                fix="redistribute it before FSDP is constructed",
            )
        if (seen := self._seen.get(id(tensor))) is not None and seen() is tensor:
            raise ShardingError(
                "FSDP1 flattens a DTensor parameter that a module holds under two names twice, which would untie it.",
                expected="each DTensor parameter under one name",
                got=f"a parameter seen before, {layout}",
                fix="torchshard.parallel.fsdp.fully_shard, which keeps parameters tied",
            )
        self._seen[id(tensor)] = weakref.ref(tensor)
        self._axes |= set(layout.mesh.names)
        # Of what is no Parameter FSDP makes one that requires a gradient, also of a frozen one.
        part = nn.Parameter(x._local_tensor.detach(), requires_grad=tensor.requires_grad)
        return part, Placed.of(tensor)

    @untraced
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Placed) -> Tensor:
        """The DTensor over a view of the flat parameter; differentiable.

        Raises:
            ShardingError: the view is not this rank's part of the parameter, as where a saved one was split otherwise.
        """
        layout = param_extension.layout
        with self._on_compute_stream():
            made = param_extension.lent(chunks.part_of(tensor, layout))
            mark_flattened(made)
            return made

    def chunk_tensor(
        self,
        tensor: Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> Tensor:
        """A tensor of a sharded state dict as torch's ShardedTensor: this rank's rows of `world_size` chunks.

        Of a DTensor, a ShardedTensor over the ranks of its own mesh that split it, whose one local shard is in turn the
        ShardedTensor of the chunks of this rank's part. Of torch's ShardedTensor likewise. On `device`, by default
        where the tensor is.
        """
        return chunks.as_sharded_tensor(tensor, world_size, num_devices_per_node, pg, device)

    def chunk_dtensor(self, tensor: Tensor, rank: int, device_mesh: DeviceMesh) -> Tensor:
        """A tensor of a sharded state dict as torch's DTensor on the mesh that `device_mesh` was cut out of.

        Split by rows along FSDP's own axis (the last of `device_mesh`), as it was along its own axes, else replicated.

        Raises:
            ShardingError: the mesh of the tensor is no part of that mesh.
        """
        return chunks.as_dtensor(tensor, device_mesh)

    def pre_load_state_dict_transform(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """The ShardedTensor that FSDP's ranks hold, and its local shards, of one that chunk_tensor has made."""
        return chunks.innermost(tensor)

    def all_gather_dtensor(self, tensor: Tensor, parent_mesh: DeviceMesh | None) -> Tensor:
        """This rank's part of the parameter, of a DTensor that chunk_dtensor has made, of this package or of torch.

        Raises:
            ShardingError: it lives on another mesh than `parent_mesh`.
        """
        return chunks.gathered(tensor, parent_mesh, self._axes)

    def _on_compute_stream(self) -> Any:
        if self.device_handle is None:
            return nullcontext()
        return self.device_handle.stream(self.compute_stream or self.device_handle.current_stream())
