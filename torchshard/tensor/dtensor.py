"""The DTensor class. Its operators are in calls/, how it moves in moving/, gradients in gradients/autograd.py."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from torchshard import _torch
from torchshard.errors import ShardingError
from torchshard.tensor.calls.turning import TurnsInPlace
from torchshard.tensor.gradients.tangents import Tangent
from torchshard.tensor.layout import SEVERED, TensorLayout, Told, require_lengths, require_own_graphs, sized, told_of
from torchshard.tensor.memory import WithoutMemory, no_memory
from torchshard.tensor.mesh import PICKLED, bind, restored
from torchshard.tensor.moving.pending import arrived
from torchshard.tensor.regions.caching import digest, tie
from torchshard.tensor.regions.counting import traced
from torchshard.tensor.torch_placements import from_torch


@_torch.skip_methods(but_not_below=["backward"])  # what runs eagerly behind a graph break is not compiled
class DTensor(WithoutMemory, TurnsInPlace, Tangent, Tensor):
    """A tensor whose pieces live on the ranks of a mesh; made by `from_local`, `distribute_tensor` or a factory.

    Shape, stride and dtype are those of the global tensor. Operators take layouts to layouts by rules and move data
    only where a rule needs it; the result is what eager torch gives on the full tensor, or an error that says why not.
    """

    __slots__ = ("_filled", "_local_tensor", "_spec", "_window")
    __torch_function__ = _torch.no_torch_function()
    _local_tensor: Tensor
    _spec: TensorLayout
    _window: Any  # of severed views only, see calls/guards.py
    _filled: int | None  # of views that were an `out=`, see calls/guards.py

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
            placements: one for each axis (dim of the mesh); everything replicated by default.
            run_check: ask the other ranks for size, strides and requires_grad of their parts, and along replicated axes
                for the values of the first rank, which all then have.
            shape: global shape. Without it and without `run_check` all parts are taken to be like this one in size and
                memory order; the first collective makes sure of it, and raises RankMismatchError if they are not.
            stride: global stride, to be given together with `shape`.
            grad_placements: of the gradient of `local_tensor`; by default those of the tensor, Replicate for Partial.

        Raises:
            ShardingError: placements that do not fit, or parts that are no pieces of one tensor.
            RankMismatchError: ranks asked by `run_check` have parts of other kinds.
            RuntimeError: only one of shape and stride is given, or local_tensor is a DTensor already.
        """
        from torchshard.tensor.gradients import autograd

        mesh = _torch.current_mesh() if device_mesh is None else device_mesh
        return autograd.from_local(local_tensor, mesh, placements, run_check, shape, stride, grad_placements, tie(mesh))

    def to_local(self, *, grad_placements: Sequence[TorchPlacement] | None = None) -> Tensor:
        """This rank's part, sharing memory with the DTensor; differentiable.

        Args:
            grad_placements: of the gradient for the part; by default those of the tensor, with Replicate for Partial.
        """
        from torchshard.tensor.gradients import autograd

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
        """The same tensor with other placements, or on another mesh; differentiable, and the gradient lies as it does.

        Args:
            device_mesh: the tensor's own by default. To go to another one, all ranks of both meshes call this, and go
                through backward, together; a rank that is in one of them only holds an empty local tensor on the
                other's side. (Ranks outside of a tensor's mesh make it with the rest: by distribute_tensor, or by
                from_local of an empty tensor with `shape` and `stride`.)
            placements: one for each axis (dim of the mesh).
            async_op: start the last communication and return; the result waits for it when it is first used, and so
                does the gradient. This tensor must not be written to before that.
            forward_dtype: to convert to before anything is sent; the result has it.
            backward_dtype: of the gradient while it is sent; afterwards it is converted to this tensor's dtype.

        Raises:
            ShardingError: placements that do not fit, other devices, or a Partial that cannot be made exactly.
            RankMismatchError: the ranks of two meshes do not come to the same redistribution.
            RuntimeError: no placements.
        """
        from torchshard.tensor.gradients import autograd

        if placements is None:
            raise RuntimeError("redistribute needs placements, for example redistribute(placements=[Replicate()])")
        layout = self._spec
        mesh = layout.mesh if device_mesh is None else bind(device_mesh)
        target = from_torch(placements, mesh, layout.shape)
        return autograd.redistribute(self, target, forward_dtype, backward_dtype, async_op, asked=True)

    def _placed(self, placements: Sequence[TorchPlacement]) -> "DTensor":
        """For hooks: with these placements, by the method that regions know; itself where nothing changes."""
        same = from_torch(placements, self._spec.mesh, self.shape) is self._spec.sharding
        return self if same else self.redistribute(placements=placements)

    def full_tensor(self, *, grad_placements: Sequence[TorchPlacement] | None = None) -> Tensor:
        """The whole tensor on every rank of the mesh; differentiable.

        Args:
            grad_placements: of the gradient that comes back for the full tensor; replicated by default.
        """
        from torchshard.tensor.gradients import autograd

        return autograd.whole(self, grad_placements).to_local(grad_placements=grad_placements)

    @staticmethod
    def from_torch(upstream: Tensor) -> "DTensor":
        """One of torch's own DTensors, around the same local tensor; differentiable.

        Raises:
            ShardingError: the local tensor is not the piece that shape and placements say, or ranks do not ascend.
        """
        from torchshard.tensor import interop

        return interop.from_torch(upstream)

    def to_torch(self) -> Tensor:
        """torch's own DTensor around the same local tensor; differentiable.

        Raises:
            ShardingError: axes nest in an order that torch has no placement for, or ranks do not ascend along one.
        """
        from torchshard.tensor import interop

        return interop.to_torch(self)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor lives on."""
        return self._spec.mesh.device_mesh  # type: ignore[attr-defined, no-any-return]

    @property
    def placements(self) -> tuple[TorchPlacement, ...]:
        """One placement for each axis (dim of the mesh), as torch's objects.

        Raises:
            ShardingError: axes nest in an order that torch has no placement for; `layout_of(x)` has it.
        """
        return self._spec.torch_placements

    @property
    def data(self) -> "DTensor":
        """The same tensor without history; set it to take over the values and the layout of another DTensor."""
        from torchshard.tensor.calls import guards

        guards.count_apart(self)
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, other: Tensor) -> None:
        if type(other) is not DTensor:
            raise ShardingError(
                "The data of a DTensor can be replaced by another DTensor only.",
                expected="a DTensor",
                got=f"{type(other).__name__} of shape {tuple(other.shape)}",
                fix="distribute_tensor(it, x.device_mesh, x.placements)",
            )
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self._local_tensor, self._spec = other._local_tensor, other._spec
        if other._spec.marks & SEVERED:
            self._window = other._window

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Gradients of the leaves, as of any tensor; `gradient` must be a DTensor or a scalar.

        Raises:
            UnsupportedOperatorError: `gradient` is another plain tensor, and implicit_replication() is not on.
        """
        given = self._gradient(gradient)
        Tensor.backward(self, given, retain_graph, create_graph, inputs)  # type: ignore[no-untyped-call]

    def _gradient(self, given: Tensor | None) -> Tensor | None:
        from torchshard.tensor.gradients import autograd

        return None if given is None else autograd.distributed(given, self._spec.mesh)

    # Values as Python and NumPy have them. Like item() they are those of the whole tensor, so every rank must ask.

    def tolist(self) -> Any:
        """The values of the whole tensor as nested lists, a number for a scalar. Every rank must call it."""
        from torchshard.tensor.calls import outside

        return outside.whole(self, "tolist()").tolist()

    __bool__, __int__, __float__ = map(_torch.reading_number, ("__bool__", "__int__", "__float__"))
    __complex__, __index__ = map(_torch.reading_number, ("__complex__", "__index__"))

    def numpy(self, *, force: bool = False) -> Any:
        """With force=True a copy of the whole tensor as an array, which every rank must ask for.

        Raises:
            UnsupportedOperatorError: without `force` the array would have to share memory with the tensor.
        """
        if force:
            from torchshard.tensor.calls import outside

            return outside.whole(self, "numpy()").numpy(force=True)
        raise no_memory("numpy()", "numpy(force=True)")

    def new(self, *data: Any, device: Any = None) -> Tensor:  # type: ignore[override]
        """torch's oldest constructor: empty, of these lengths; of the values in a list; or the tensor that is given."""
        first = data[0] if data else 0
        if isinstance(first, (list, tuple, Tensor)) and not isinstance(first, torch.Size):
            return first.view_as(first) if isinstance(first, Tensor) else self.new_tensor(first, device=device)
        return self.new_empty(*(data or (0,)), device=device)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.ndim == 0 else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # Printing must not communicate. A term or an old copy would look like the value, so neither is shown.
        layout = self._spec
        if layout.sharding.partial or layout.marks & SEVERED:
            return f"DTensor({layout}; full_tensor() has the values)"
        return f"DTensor(local_tensor={self._local_tensor}, {layout.sharding})"

    # torch's own ways to copy and pickle look for memory behind a wrapper that is a view.

    def __copy__(self) -> "DTensor":
        return self._like_me(self.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> "DTensor":
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            return Tensor.__deepcopy__(self, memo)  # type: ignore[no-any-return, no-untyped-call]  # raises as for any
        here = self._local_tensor.__class__ is Tensor  # and memory that tensors share is copied once
        copied = wrap(copy.deepcopy(self._local_tensor, memo), self._spec) if here else self.detach().clone()
        if here and self._spec.marks & SEVERED:
            copied._window = self._window.copied(memo)  # type: ignore[attr-defined]
        made = memo[id(self)] = self._like_me(copied, memo)
        if self.grad is not None and not isinstance(self, torch.nn.Parameter):  # of these the copies have none
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.storage_offset() == 0 and not self._spec.marks & SEVERED:
            return Tensor.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]
        return Tensor.__reduce_ex__(self._like_me(self.detach().clone()), protocol)  # type: ignore[no-untyped-call]

    def _like_me(self, made: Tensor, memo: dict[int, Any] | None = None) -> "DTensor":
        """Give a tensor without history what this one has beside its values."""
        made.__dict__.update(self.__dict__ if memo is None else copy.deepcopy(self.__dict__, memo))
        return made.requires_grad_(self.requires_grad)  # type: ignore[return-value]

    def __tensor_flatten__(self) -> tuple[list[str], Told]:
        layout = self._spec
        if layout.marks & SEVERED:
            self._window.take_apart()
        if self._local_tensor.__class__ is not Tensor:  # while tracing, or on its way
            self._local_tensor = arrived(self._local_tensor)
            traced(DTensor)
        layout.mesh.require_living()  # type: ignore[attr-defined]  # a graph made before has the names of groups alone
        return ["_local_tensor"], told_of(layout) if layout.marks else layout.sharding

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], told: Told, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> "DTensor":
        local = inner["_local_tensor"]
        local = local.detach() if local.requires_grad else local  # torch warns of parts that require gradients
        if local.__class__ is Tensor:  # not while tracing: lengths are numbers
            return wrap(local, told.layout(outer_size, outer_stride, local.dtype))  # type: ignore[arg-type]
        _take_functions()
        require_own_graphs()
        require_lengths(local, outer_size)
        layout = told.layout(sized(tuple(outer_size), local.shape, told), tuple(outer_stride), local.dtype)
        return _torch.lie_with_others(wrap(local, layout), local)  # type: ignore[arg-type]

    def _stable_hash_for_caching(self) -> str:
        """What of this tensor decides about a compiled graph, for AOTAutograd's cache between processes."""
        layout, local = self._spec, self._local_tensor
        kind = told_of(layout), layout.shape, layout.stride, layout.dtype, local.shape, local.stride(), local.device
        return digest(layout.mesh.cache_key, kind, self.requires_grad)  # type: ignore[attr-defined]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """What this rank writes of the tensor: see checkpointing.py."""
        from torchshard.tensor import checkpointing

        return checkpointing.write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        """Offsets and sizes of what this rank holds and may load into: see checkpointing.py."""
        from torchshard.tensor import checkpointing

        return checkpointing.targets(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The local tensor that an index names: see checkpointing.py."""
        from torchshard.tensor import checkpointing

        return checkpointing.shard(self, index)


new = _torch.wrapper_constructor()


def wrap(local: Tensor, layout: TensorLayout) -> DTensor:
    """A DTensor without history whose part on this rank is `local`, which is not checked."""
    return new(DTensor, local, layout, False)  # type: ignore[return-value]


def dtensors_in(values: Iterable[Any]) -> Iterator[DTensor]:
    """The DTensors among values and in lists of them, in order."""
    for x in values:
        if isinstance(x, (list, tuple)):
            yield from dtensors_in(x)
        elif type(x) is DTensor:
            yield x


# As torch does for its own: the default torch.load makes objects of known classes only, and may come before any use.
torch.serialization.add_safe_globals([DTensor, restored, *PICKLED])


@cache
def _take_functions() -> None:
    """Before a trace meets operators that torch has to be told of."""
    from torchshard.tensor.regions import taking

    taking.take_operators()


def _printed(x: DTensor) -> Tensor:
    layout = x._spec
    if layout.sharding.partial or layout.marks & SEVERED:
        raise ShardingError(
            "torch's print shows the part of a DTensor that a rank has; this one's is no part of its values.",
            expected="Shard or Replicate on every axis, and no view that was moved",
            got=layout,
            fix="print x.full_tensor(), or x.redistribute(...)",
        )
    return x.to_local()


_torch.print_parts(DTensor, _printed)

# Operator (its address) -> number of arguments and keywords -> what runs; filled by calls/dispatch.py.
ENTRIES: dict[int, dict[Any, Callable[..., Any]]] = {}


def _add_entry(func: Any, count: int, keywords: tuple[str, ...]) -> Callable[..., Any]:
    from torchshard.tensor.calls import dispatch

    return dispatch.add_entry(func, count, keywords)
