"""Distributed tensors in a torch.save file: one rank's part of a DTensor or ShardedTensor, as a tensor of few pieces.

Nothing of them is built: where a part lies in its tensor is worked out from mesh, placements and coordinate, or read
from the metadata of the shards. The classes have moved between modules from torch 2.1 to 2.13; all names are here.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from torchshard.checkpoint.entries import Piece, TensorEntry, narrowed
from torchshard.checkpoint.pickles.inert import PARAMETER, Global, Record, record
from torchshard.checkpoint.pickles.torch_values import ALLOWED as PLAIN
from torchshard.checkpoint.pickles.torch_values import attribute, attributes, sizes
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError
from torchshard.layout import Box, Mesh, Placement, R, Shard, Sharding
from torchshard.layout.cuts import intervals
from torchshard.layout.pieces import Interval
from torchshard.layout.strided import strided_intervals

_TENSOR = ("torch.distributed.tensor", "torch.distributed._tensor")
_DTENSORS = frozenset(
    [f"{module}{tail}.DTensor" for module in _TENSOR for tail in ("", ".api", "._api")]
    + ["torchshard.tensor.dtensor.DTensor"]
)
_SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_OUR_SHARDED = "torchshard.tensor.sharded.sharded_tensor.restored"
_SUBCLASSES = ("torch.Tensor", "torch._tensor.Tensor")
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"


class _Split(NamedTuple):
    """A strided split, as torch's FSDP2 makes one below tensor parallelism."""

    dim: int
    factor: int


class _Mesh(NamedTuple):
    mesh: Mesh
    coordinate: tuple[int, ...] | None  # None: the rank has no place in it


def _rebuild(function: Any, kind: Any, args: Any, state: Any) -> TensorEntry:
    """What torch calls for a tensor of a class of its own."""
    if not isinstance(function, Global) or not isinstance(kind, Global) or not isinstance(args, tuple):
        raise TypeError("a tensor whose class is not named")
    if kind.name in (*_SUBCLASSES, PARAMETER) and function.make is not None and function.name != _WRAPPER:
        made = function.make(*args)
        if isinstance(made, TensorEntry):
            return replace(made, attributes=(*made.attributes, *map(printable, attributes(state))))
    elif function.name == _WRAPPER and kind.name in _DTENSORS:
        parameter = attributes(state).get("_is_param") is True
        return replace(_dtensor(state), requires_grad=args[7:8] == (True,), parameter=parameter)
    elif function.name == _WRAPPER and kind.name == _SHARDED:
        return _sharded_tensor(state)
    raise CheckpointError("A tensor is of a class that is not read.", got=kind.name)


# --- DTensor -----------------------------------------------------------------------------------------------------


def _dtensor(state: Any) -> TensorEntry:
    found = attributes(state)
    local, spec = found.get("_local_tensor"), found.get("_spec")
    if not isinstance(local, TensorEntry) or not isinstance(spec, Record):
        raise TypeError("a DTensor without a local tensor or a spec")
    if spec.name == _OUR_LAYOUT:
        sharding, shape, *_ = spec.args
        shape = sizes(shape, "shape", None)
        mesh, placements, order = _our_sharding(sharding)
        plain = _check_placements(mesh, placements, shape)
        made = mesh.mesh.sharding(plain, dict(order))
        if any(shape[d] % cut.apart for d, cut in made.cuts.items()):
            raise CheckpointError("The placements of a DTensor do not fit its shape.", got=f"{made} for {shape}")
        return _of_boxes(local, shape, _held(made, shape, mesh.coordinate, placements), made if made.boxed else None)
    meta = spec.field("tensor_meta")
    if not isinstance(meta, Record) or not meta.args:
        raise TypeError("a DTensor without its shape")
    shape = sizes(meta.args[0], "shape", None)
    mesh = _device_mesh(spec.field("mesh"))
    placements = tuple([_placement(p) for p in _tuple(spec.field("placements"))])
    plain = _check_placements(mesh, placements, shape)
    if nesting := _order(spec.field("shard_order"), plain):
        made = mesh.mesh.sharding(plain, nesting)
        return _of_boxes(local, shape, _held(made, shape, mesh.coordinate, placements), made)
    strided = any(isinstance(p, _Split) for p in placements)
    boxes = [] if mesh.coordinate is None else list(_boxes(shape, placements, mesh.mesh.shape, mesh.coordinate))
    return _of_boxes(local, shape, boxes, None if strided else mesh.mesh.sharding(plain))


def _order(entries: Any, plain: Sequence[Placement]) -> dict[int, tuple[int, ...]]:
    """By dim, the order in which axes split it where that is not from left to right, as torch 2.11 tells it."""
    found = {}
    for entry in () if entries is None else _tuple(entries):
        if not isinstance(entry, Record):
            raise TypeError("an order of axes that is none")
        dim, axes = entry.args if len(entry.args) == 2 else (None, None)
        (dim,), axes = sizes((dim,), "order", None), sizes(axes, "order", None)
        if axes != tuple(sorted(axes)):
            found[dim] = axes
        if sorted(axes) != [axis for axis, p in enumerate(plain) if isinstance(p, Shard) and p.dim == dim]:
            raise CheckpointError("An order of axes does not fit the placements of a DTensor.", got=f"{axes}: {plain}")
    return found


def _tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > 64:
        raise TypeError(f"a list of placements is {printable(value)}")
    return tuple(value)


def _placement(value: Any) -> "Placement | _Split":
    name = value.name.rpartition(".")[2] if isinstance(value, (Record, Global)) else ""
    if isinstance(value, Record) and name in ("Shard", "_StridedShard"):
        dim = value.field("dim") if value.state is not None else (value.args or (None,))[0]
        factor = value.field("split_factor") if name == "_StridedShard" else 1
        cut = (*value.args, 1, 1)[1:3] if value.name == _OUR_SHARD else (factor, 1)
        dim, runs, unit = sizes((dim, *cut), "placement", None)
        if dim > 64 or not 0 < runs <= 4096 or unit < 1:
            got = printable((dim, runs, unit))
            raise CheckpointError("A placement has an impossible dim, split factor or unit.", got=got)
        return _Split(dim, runs) if name == "_StridedShard" else Shard(dim, runs, unit)
    if name == "Replicate":
        return R
    raise CheckpointError(
        "A Partial tensor was saved: each rank holds a term of it, and no rank its values.",
        got=printable(name or value),
        fix="Save tensor.redistribute(placements=[Replicate()] * mesh.ndim).",
    )


def _check_placements(
    mesh: _Mesh, placements: Sequence["Placement | _Split"], shape: Sequence[int]
) -> tuple[Placement, ...]:
    """The placements, a strided split as a plain one; they must fit the mesh and the shape."""
    plain = tuple([Shard(p.dim) if isinstance(p, _Split) else p for p in placements])
    dims = [p.dim for p in plain if isinstance(p, Shard)]
    if len(plain) != mesh.mesh.ndim or any(d >= len(shape) for d in dims):
        raise CheckpointError(
            "The placements of a DTensor do not fit its mesh or shape.", got=f"{plain} on {mesh.mesh} for {shape}"
        )
    return plain


def _boxes(
    shape: tuple[int, ...],
    placements: Sequence["Placement | _Split"],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Iterator[Box]:
    """What a coordinate holds, in the order of its local tensor: more than one box after a strided split."""
    factors: dict[int, dict[int, int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, _Split):
            factors.setdefault(placement.dim, {})[axis] = placement.factor
        elif isinstance(placement, Shard):
            factors.setdefault(placement.dim, {})[axis] = 1
    held = [
        strided_intervals(n, factors[d], mesh_shape, coordinate) if d in factors else [(0, n)]
        for d, n in enumerate(shape)
    ]
    yield from _boxes_of(held, placements)


def _held(
    sharding: Sharding, shape: tuple[int, ...], coordinate: Sequence[int] | None, placements: Sequence[Any]
) -> list[Box]:
    """What a coordinate holds of a sharding, which these placements say; nothing outside of the mesh."""
    return [] if coordinate is None else list(_boxes_of(intervals(sharding, shape, coordinate), placements))


def _boxes_of(held: Sequence[Sequence[Interval]], placements: Sequence[Any]) -> Iterator[Box]:
    """The boxes that these intervals of each dim make up."""
    if sum(map(len, held)) > 10_000:
        raise CheckpointError("A strided split cuts a tensor into too many parts.", got=placements)
    for parts in itertools.product(*held):
        yield Box(tuple([start for start, _ in parts]), tuple([length for _, length in parts]))


def _of_boxes(
    local: TensorEntry, shape: tuple[int, ...], boxes: Sequence[Box], sharding: Sharding | None
) -> TensorEntry:
    """A tensor of which `local` holds these boxes, a grid of them in its own order."""
    boxes = [box for box in boxes if box.numel]
    if not boxes:
        return TensorEntry(local.dtype, shape, (), sharding=sharding)
    starts = [sorted({(box.offset[d], box.size[d]) for box in boxes}) for d in range(len(shape))]
    at = [
        dict(zip([s for s, _ in dim], itertools.accumulate([0, *[n for _, n in dim]]), strict=False)) for dim in starts
    ]
    held = tuple([sum([n for _, n in dim]) for dim in starts])
    if held != local.shape or len(local.pieces) != 1:
        raise CheckpointError(
            "The local tensor of a DTensor has another shape than its placements say.", expected=held, got=local.shape
        )
    pieces = []
    for box in boxes:
        inside = Box(tuple([at[d][o] for d, o in enumerate(box.offset)]), box.size)
        pieces += [narrowed(piece, inside, box.offset, local.itemsize) for piece in local.pieces]
    return TensorEntry(local.dtype, shape, tuple(pieces), sharding=sharding)


def _device_mesh(value: Any) -> _Mesh:
    if not isinstance(value, Record) or not value.name.endswith(".DeviceMesh"):
        raise TypeError("a DTensor without a mesh")
    ranks, layout = value.field("mesh"), value.field("_layout")
    if isinstance(ranks, TensorEntry):
        shape = ranks.shape
    elif isinstance(layout, Record):
        axes = layout.field("axes")
        parts = [axis.field("shape") for axis in axes] if isinstance(axes, tuple) else _tuple(layout.field("shape"))
        shape = tuple([_product(part) for part in parts])
    else:
        raise TypeError("a mesh without a shape")
    names = value.field("_mesh_dim_names") or value.field("mesh_dim_names")
    coordinate = value.field("_coordinate_on_dim")
    if coordinate is not None:
        coordinate = sizes(coordinate, "coordinate of the rank in the mesh", None)
        if len(coordinate) != len(shape) or any(k >= n for k, n in zip(coordinate, shape, strict=True)):
            raise CheckpointError("A rank has a place outside of its mesh.", got=f"{coordinate} in {shape}")
    named = isinstance(names, tuple) and len(names) == len(shape) and all(isinstance(name, str) for name in names)
    return _Mesh(_mesh(shape, names if named else None), coordinate)


def _mesh(shape: tuple[int, ...], names: Sequence[str] | None) -> Mesh:
    shape = sizes(shape, "shape of a mesh", None)
    if not shape or _product(shape) > 10**6 or 0 in shape:
        raise CheckpointError("A mesh has an impossible shape.", got=printable(shape))
    return Mesh(shape, names)


def _product(part: Any) -> int:
    count = 1
    for n in sizes(part if isinstance(part, tuple) else (part,), "shape of a mesh", None):
        count *= n
    return count


# torchshard's own DTensor keeps a Layout, which pickles as calls of these.
_OUR_LAYOUT = "torchshard.layout.layout._layout"
_OUR_SHARDING = "torchshard.layout.layout._sharding"
_OUR_MESH = "torchshard.tensor.mesh.restored"
_OUR_SHARD = "torchshard.layout.placements.Shard"


def _our_sharding(value: Any) -> tuple[_Mesh, tuple[Any, ...], tuple[Any, ...]]:
    if not isinstance(value, Record) or value.name != _OUR_SHARDING or len(value.args) != 3:
        raise TypeError("a layout without a sharding")
    mesh, placements, order = value.args
    if not isinstance(mesh, Record) or mesh.name != _OUR_MESH or len(mesh.args) != 1:
        raise TypeError("a sharding without a mesh")
    pairs = []
    for pair in _tuple(order):
        dim, axes = _tuple(pair)
        (dim,) = sizes((dim,), "order", None)
        pairs.append((dim, sizes(axes, "order", None)))
    return _device_mesh(mesh.args[0]), tuple([_placement(p) for p in _tuple(placements)]), tuple(pairs)


# --- ShardedTensor -----------------------------------------------------------------------------------------------


def _sharded_tensor(state: Any) -> TensorEntry:
    if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[0], list):
        raise TypeError("a ShardedTensor without shards")
    shards, metadata = state[0], state[1]
    if not isinstance(metadata, Record):
        raise TypeError("a ShardedTensor without metadata")
    shape = sizes(metadata.field("size"), "size", None)
    properties = metadata.field("tensor_properties")
    dtype = properties.state[0] if isinstance(properties, Record) and isinstance(properties.state, tuple) else None
    name = _dtype(dtype)
    pieces: list[Piece] = []
    for shard in shards:
        pieces += _shard(shard, shape, name)
    return TensorEntry(name, shape, tuple(pieces))


def _our_sharded_tensor(shape: Any, dtype: Any, grad: Any, _described: Any, parts: Any, *_: Any) -> TensorEntry:
    """torchshard's own, which pickles as a call with the offsets, sizes and tensors of this rank's parts."""
    if not isinstance(parts, list):
        raise TypeError("a ShardedTensor without parts")
    shape, name = sizes(shape, "size", None), _dtype(dtype)
    pieces: list[Piece] = []
    for part in parts:
        offset, size, local = part
        if not isinstance(local, TensorEntry):
            raise TypeError("a part without a tensor")
        pieces += _placed(local, sizes(offset, "offsets", None), sizes(size, "sizes", None), shape, name)
    return TensorEntry(name, shape, tuple(pieces), requires_grad=grad is True)


def _dtype(value: Any) -> str:
    """The type's name; "" where there is none, which no tensor has."""
    return value.name.removeprefix("torch.") if isinstance(value, Global) else ""


def _shard(shard: Any, shape: tuple[int, ...], dtype: str) -> list[Piece]:
    """The pieces of one shard, whose tensor may itself be distributed."""
    local = shard.field("tensor") if isinstance(shard, Record) else None
    metadata = shard.field("metadata") if isinstance(shard, Record) else None
    if not isinstance(local, TensorEntry) or not isinstance(metadata, Record):
        raise TypeError("a shard without a tensor or metadata")
    offset = sizes(metadata.field("shard_offsets"), "shard_offsets", None)
    size = sizes(metadata.field("shard_sizes"), "shard_sizes", None)
    return _placed(local, offset, size, shape, dtype)


def _placed(
    local: TensorEntry, offset: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...], dtype: str
) -> list[Piece]:
    """The pieces of a local tensor that holds the box of these offsets and sizes."""
    if local.shape != size or local.dtype != dtype or len(offset) != len(shape) or len(size) != len(shape):
        raise CheckpointError(
            "A shard is not as its metadata says.", expected=f"{dtype} {size}", got=f"{local.dtype} {local.shape}"
        )
    return [
        narrowed(
            piece, piece.box, tuple([a + b for a, b in zip(offset, piece.box.offset, strict=True)]), local.itemsize
        )
        for piece in local.pieces
    ]


def _table() -> dict[str, Global]:
    shard = "torch.distributed._shard"
    modules = [
        f"{m}{tail}" for m in _TENSOR for tail in ("", ".placement_types", "._dtensor_spec", ".device_mesh", "._utils")
    ]
    modules += ["torch.distributed.device_mesh", "torch.distributed._mesh_layout"]
    classes = [
        "DTensorSpec", "TensorMeta", "ShardOrderEntry", "Shard", "Replicate", "Partial", "_Partial", "_StridedShard",
        "DeviceMesh", "_MeshLayout", "_FlatLayout",
    ]  # fmt: skip
    records = [f"{module}.{name}" for module in modules for name in classes]
    records += [
        f"{shard}.sharded_tensor.shard.Shard", f"{shard}.metadata.ShardMetadata",
        f"{shard}.sharded_tensor.metadata.ShardedTensorMetadata", f"{shard}.sharded_tensor.metadata.TensorProperties",
        f"{shard}.sharded_tensor.metadata.MEM_FORMAT_ENCODING", "torch.distributed.remote_device._remote_device",
        f"{shard}.sharding_spec.api.EnumerableShardingSpec", f"{shard}.sharding_spec.api.ShardingSpec",
        f"{shard}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
        f"{shard}.sharding_spec.chunk_sharding_spec.EnumerableShardingSpec",
        _OUR_LAYOUT, _OUR_SHARDING, _OUR_MESH,
        *[f"torchshard.layout.placements.{name}" for name in ("Shard", "Replicate", "Partial")],
    ]  # fmt: skip
    table = {name: record(name) for name in records}
    table |= {name: Global(name) for name in (*_DTENSORS, _SHARDED, *_SUBCLASSES, _WRAPPER)}
    encoding = f"{shard}.sharded_tensor.metadata.MEM_FORMAT_ENCODING"
    table["builtins.getattr"] = attribute({_SHARDED: ("ProcessGroupState",), encoding: ()})
    table[_OUR_SHARDED] = Global(_OUR_SHARDED, _our_sharded_tensor)
    table["torch._tensor._rebuild_from_type_v2"] = Global("torch._tensor._rebuild_from_type_v2", _rebuild)
    return table


ALLOWED: Mapping[str, Global] = MappingProxyType({**PLAIN, **_table()})
