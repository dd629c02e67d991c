"""The DTensor class. Its operators are in dispatch.py, how it moves in redistribute.py, gradients in autograd.py."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchshard._torch import current_mesh, no_torch_function, wrapper_constructor
from torchshard.layout.layout import Layout, Sharding
from torchshard.tensor.layout import TensorLayout, from_torch
from torchshard.tensor.mesh import bind


class DTensor(Tensor):
    """A tensor whose pieces live on the ranks of a mesh; made by `from_local`, `distribute_tensor` or a factory.

    Shape, stride and dtype are those of the global tensor. Operators take layouts to layouts by rules and move data
    only where a rule needs it; the result is what eager torch gives on the full tensor, or an error that says why not.
    """

    __slots__ = ("_local_tensor", "_severed_at", "_spec")
    __torch_function__ = no_torch_function()

    _local_tensor: Tensor
    _spec: TensorLayout
    _severed_at: int | None  # see guards.py

    @staticmethod
    def __torch_dispatch__(  # type: ignore[override]
        func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Operators live as long as the process, so their address names them; hashing one costs three times as much.
        if not kwargs:
            try:
                entry = ENTRIES[id(func)][len(args)]
            except KeyError:
                entry = _add_entry(func, len(args), ())
            return entry(*args)
        try:
            entry = ENTRIES[id(func)][(len(args), *kwargs)]
        except KeyError:
            entry = _add_entry(func, len(args), tuple(kwargs))
        return entry(*args, **kwargs)

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[TorchPlacement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[TorchPlacement] | None = None,
    ) -> "DTensor":
        """The DTensor whose part on this rank is `local_tensor`; differentiable.

        Args:
            local_tensor: this rank's part (for a Partial axis: its term); used as it is, not copied.
            device_mesh: where; by default the mesh of the surrounding `with mesh:`.
            placements: one an axis; everything replicated by default.
            run_check: ask the other ranks: for the sizes of their parts where `shape` is not given, and along
                replicated axes for the values of the first rank, which all then have.
            shape: global shape. Without it and without `run_check` the parts are taken to be of equal size; the first
                collective makes sure of that, and raises RankMismatchError where they are not.
            stride: global stride, to be given together with `shape`.
            grad_placements: of the gradient, before it becomes that of `local_tensor`; by default those of the tensor,
                with Replicate for Partial.

        Raises:
            ShardingError: placements that do not fit, or parts that are no pieces of one tensor.
            RuntimeError: only one of shape and stride is given, or local_tensor is a DTensor already.
        """
        from torchshard.tensor import autograd

        mesh = device_mesh or current_mesh()
        return autograd.from_local(local_tensor, mesh, placements, run_check, shape, stride, grad_placements)  # type: ignore[no-any-return]

    def to_local(self, *, grad_placements: Sequence[TorchPlacement] | None = None) -> Tensor:
        """This rank's part, sharing memory with the DTensor; differentiable.

        Args:
            grad_placements: of the gradient that comes back for the part; by default those of the tensor, with
                Replicate for Partial.
        """
        from torchshard.tensor import autograd

        return autograd.to_local(self, grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[TorchPlacement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> "DTensor":
        """The same tensor with other placements, or on another mesh; differentiable any number of times.

        Args:
            device_mesh: the tensor's own by default. To go to another one, all ranks of both meshes call this, and go
                through backward, together; a rank that is in one of them only holds an empty local tensor on the
                other's side. (Ranks outside of a tensor's mesh make it with the rest: by distribute_tensor, or by
                from_local of an empty tensor with `shape` and `stride`.)
            placements: one an axis.
            async_op: start the last communication and return; the result waits for it when it is first used, and so
                does the gradient. This tensor must not be written to before that.
            forward_dtype: to convert to before anything is sent; the result has it.
            backward_dtype: of the gradient while it is sent; afterwards it is converted to this tensor's dtype.

        Raises:
            ShardingError: placements that do not fit the mesh or the tensor, a mesh of other devices, or a Partial that
                cannot be made exactly.
            RankMismatchError: the ranks of two meshes do not come to the same redistribution.
            RuntimeError: no placements.
        """
        from torchshard.tensor import autograd

        if placements is None:
            raise RuntimeError("redistribute needs placements, for example [Replicate()]")
        layout = self._spec
        mesh = layout.mesh if device_mesh is None else bind(device_mesh)
        target = from_torch(placements, mesh, layout.shape)
        return autograd.redistribute(self, target, forward_dtype, backward_dtype, async_op)

    def full_tensor(self, *, grad_placements: Sequence[TorchPlacement] | None = None) -> Tensor:
        """The whole tensor on every rank of the mesh; differentiable.

        Args:
            grad_placements: of the gradient that comes back for the full tensor; replicated by default.
        """
        from torchshard.tensor import autograd

        return autograd.redistribute(self, self._spec.mesh.replicated()).to_local(grad_placements=grad_placements)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor lives on."""
        return self._spec.mesh.device_mesh  # type: ignore[attr-defined, no-any-return]

    @property
    def placements(self) -> tuple[TorchPlacement, ...]:
        """What each axis does, as torch's objects.

        Raises:
            ShardingError: axes nest in an order that torch has no placement for; `layout` has it.
        """
        return self._spec.torch_placements

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DTensor(local_tensor={self._local_tensor}, {self._spec.sharding})"

    def __tensor_flatten__(self) -> tuple[list[str], Sharding]:
        return ["_local_tensor"], self._spec.sharding

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], sharding: Sharding, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> "DTensor":
        local = inner["_local_tensor"]
        layout = sharding.layout(tuple(outer_size), tuple(outer_stride), local.dtype)
        return wrap(local, layout)  # type: ignore[arg-type]

    def __coerce_tangent_metadata__(self) -> "DTensor":
        """The layout that AOTAutograd expects of the gradient of a traced result: gradients are not Partial there."""
        from torchshard.tensor import autograd

        return autograd.redistribute(self, self._spec.sharding.without_partial())

    def __coerce_same_metadata_as_tangent__(
        self, expected: Sharding, expected_type: type[Tensor] | None = None
    ) -> "DTensor | None":
        """This gradient in the layout that a compiled backward was made for; None where it expects no DTensor."""
        from torchshard.tensor import autograd

        return autograd.redistribute(self, expected) if expected_type is None else None

    def _stable_hash_for_caching(self) -> str:
        """What of this tensor decides about a compiled graph, for AOTAutograd's cache between processes."""
        layout, mesh = self._spec, self._spec.mesh
        decides = mesh.cache_key, layout.sharding, layout.shape, layout.stride, layout.dtype, self.requires_grad  # type: ignore[attr-defined]
        return hashlib.blake2b(repr(decides).encode(), digest_size=16).hexdigest()

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """What this rank writes of the tensor: see checkpointing.py."""
        from torchshard.tensor import checkpointing

        return checkpointing.write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        """Offsets and sizes of what this rank holds: see checkpointing.py."""
        from torchshard.tensor import checkpointing

        return checkpointing.chunks(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The local tensor that an index names: see checkpointing.py."""
        from torchshard.tensor import checkpointing

        return checkpointing.shard(self, index)


new = wrapper_constructor()


def wrap(local: Tensor, layout: TensorLayout) -> DTensor:
    """A DTensor without history whose part on this rank is `local`, which is not checked."""
    return new(DTensor, local, layout, False)  # type: ignore[return-value]


def new_view(cls: type[Tensor], local: Tensor, layout: TensorLayout, requires_grad: bool) -> DTensor:
    """The wrapper of what an operator that gives views made.

    In inference mode, too, autograd gives the view of a normal tensor a version counter, which inference tensors
    cannot have; so the wrapper is a normal one.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return new(cls, local, layout, requires_grad)  # type: ignore[return-value]
    return new(cls, local, layout, requires_grad)  # type: ignore[return-value]


def layout_of(x: DTensor) -> Layout:
    """Mesh, placements, nesting order, global shape, stride and dtype of a DTensor in one object, with its boxes."""
    return x._spec.plain


# Operator (its address) -> number of arguments and keywords -> what runs; filled by dispatch.py.
ENTRIES: dict[int, dict[Any, Callable[..., Any]]] = {}


def _add_entry(func: Any, count: int, keywords: tuple[str, ...]) -> Callable[..., Any]:
    from torchshard.tensor import dispatch

    return dispatch.add_entry(func, count, keywords)
