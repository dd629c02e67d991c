"""State dicts, or single tensors, from one way to spread them over ranks to another.

Every function takes plain tensors, DTensors and ShardedTensors, ours and torch's, alone or in any nesting of dicts,
lists and tuples, and returns the same nesting. Leaves that are no tensors are kept, and tensors that are one stay one.
Results carry no history; where nothing has to move they share memory with what they were made from.

Ranks compare what they are about to do before anything moves. What is given in is never changed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as upstream
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchshard._torch import below_torch_functions, default_group, ends_graphs, sharded_tensors
from torchshard.comm.circle import circle_of, this_rank, world_size
from torchshard.errors import ShardingError
from torchshard.keys.globs import Globs
from torchshard.state_dict.converting import convert
from torchshard.state_dict.forms import Form, take_replicas
from torchshard.state_dict.targets import AsOn, InParts, OnMesh, Target, Whole
from torchshard.state_dict.trees import identity, leaves, with_leaves
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.interop import without_history
from torchshard.tensor.mesh import bind
from torchshard.tensor.sharded import specs
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor
from torchshard.tensor.torch_placements import from_torch as sharding_from_torch

Placed = Sequence[Any] | None
Placements = Sequence[Any] | Mapping[str, Placed] | Callable[[str, Tensor], Placed]


@ends_graphs("a graph holds no state dict")
def to_full(sd: Any, *, rank0_only: bool = False, cpu_offload: bool = False, reduce_partial: bool = False) -> Any:
    """Whole tensors, on every rank that holds a part or on the first of them.

    Args:
        sd: a tensor or a nesting; every rank of its tensors' meshes and groups calls this.
        rank0_only: on the first of these ranks alone. Others get an empty container (None for a single tensor or a
            named tuple), and never hold a whole tensor.
        cpu_offload: in CPU memory.
        reduce_partial: take the value of Partial tensors, which are refused otherwise.

    Raises:
        ShardingError: a Partial tensor; or with `rank0_only`, tensors whose first ranks differ.
        RankMismatchError: ranks have other keys, shapes or dtypes, or one is lost.
    """
    firsts: dict[int, str] = {}

    def decide(path: str, x: Tensor, form: Form) -> Target | None:
        if form.holding is None:
            return Whole((this_rank(),), True) if cpu_offload and form.device.type != "cpu" else None
        ranks = form.holding.ranks
        if rank0_only:
            firsts.setdefault(ranks[0], path)
            if len(firsts) > 1:
                places = ", ".join(f"rank {rank} for {name}" for rank, name in firsts.items())
                raise ShardingError(
                    "The tensors have no first rank in common.",
                    expected="tensors that live on the same ranks",
                    got=places,
                    fix="convert them in separate calls, or with rank0_only=False",
                )
        return Whole(ranks[:1] if rank0_only else ranks, cpu_offload)

    full = convert(sd, decide, reduce_partial=reduce_partial)
    if rank0_only and this_rank() != next(iter(firsts), 0):
        return type(sd)() if isinstance(sd, (dict, list, tuple)) and not hasattr(sd, "_fields") else None
    return full


@ends_graphs("a graph holds no state dict")
def to_dtensor(
    sd: Any,
    device_mesh: DeviceMesh,
    placements: Placements,
    *,
    strict: bool = True,
    src_rank: int | None = None,
    reduce_partial: bool = False,
) -> Any:
    """DTensors on a mesh.

    Args:
        sd: a tensor or a nesting; every rank of the mesh, and of meshes and groups that tensors live on, calls this.
        device_mesh: where.
        placements: one for each axis, for all tensors but those without dims, which are left as they are. Or a mapping
            from patterns of keys (as of fnmatch; the keys of nested dicts are joined by dots) to such
            sequences, in which the first pattern that fits counts. Or a function of key and tensor. A tensor whose
            placements are None is left as it is.
        strict: whether each key must fit a pattern, and each pattern a key. Otherwise keys without a pattern are left
            as they are.
        src_rank: the global rank whose plain tensors count, also those that stay plain; others give tensors of the same
            shapes, on the meta device for example. Without it all ranks are taken to have the same values, and nothing
            is sent for them.
        reduce_partial: take the value of Partial tensors, which are refused otherwise.

    Raises:
        ShardingError: placements that do not fit; patterns without keys, or keys without patterns, all of them named.
        RankMismatchError: ranks do not convert the same, or one is lost.
    """
    mesh = bind(device_mesh)
    refusal: Exception | None = mesh.displaced()
    try:
        chosen = _chooser(sd, placements, strict)
    except Exception as error:
        refusal, as_text = error, {str(pattern): placed for pattern, placed in placements.items()}  # type: ignore[union-attr]
        chosen = _chooser(sd, as_text, strict=False)
    waiting = None
    if src_rank is not None:  # one that is no rank is refused, and the mesh is told
        ranks = {*mesh.ranks, *({src_rank} & set(range(world_size())))}
        waiting = tuple(sorted(ranks)), device_mesh.device_type
    known: dict[tuple[int, tuple[int, ...]], tuple[Any, OnMesh]] = {}  # one for all of a shape that are placed alike

    def decide(path: str, x: Tensor, form: Form) -> Target | None:
        found = chosen(path, x)
        if found is None:
            if src_rank is None or form.holding is not None or this_rank() not in (src_rank, *mesh.ranks):
                return None
            return AsOn(src_rank, mesh)
        take_replicas(form, mesh)
        if (id(found), form.shape) not in known:
            sharding = sharding_from_torch(found, mesh, form.shape)
            if sharding.partial:
                raise ShardingError(
                    "Values cannot be converted to terms.", expected="Shard(dim) or Replicate()", got=found
                )
            known[id(found), form.shape] = found, OnMesh(sharding)  # the placements live, so their id stays theirs
        return known[id(found), form.shape][1]

    return convert(sd, decide, reduce_partial=reduce_partial, source=src_rank, refusal=refusal, waiting=waiting)


def _chooser(sd: Any, placements: Placements, strict: bool) -> Callable[[str, Tensor], Placed]:
    if callable(placements):
        return placements
    if not isinstance(placements, Mapping):
        single = isinstance(sd, Tensor)
        return lambda _, x: placements if x.ndim or single else None
    if odd := [pattern for pattern in placements if not isinstance(pattern, str)]:
        raise ShardingError(
            "A pattern of placements is no text.",
            expected="globs of keys, such as '*.weight'; positions are text too, '0.*'",
            got=", ".join(map(repr, odd)),
        )
    patterns, globs = placements, Globs(placements)
    if strict:
        _check_patterns([path for path, leaf in leaves(sd) if isinstance(leaf, Tensor)], globs)
    return lambda path, _: None if (pattern := globs.first(path)) is None else patterns[pattern]


def _check_patterns(keys: Sequence[str], globs: Globs) -> None:
    idle = globs.idle(keys)
    left = [key for key in keys if globs.first(key) is None]
    if idle or left:
        raise ShardingError(
            "Keys and patterns of placements do not cover one another.",
            expected="a pattern for each tensor, and a tensor for each pattern",
            got="; ".join(
                [f"{what}: {', '.join(names)}" for what, names in (("no pattern", left), ("no tensor", idle)) if names]
            ),
            fix="add patterns ('*': None leaves the rest as it is), or strict=False",
        )


@ends_graphs("a graph holds no state dict")
def to_sharded_tensor(
    sd: Any,
    *,
    dim: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    spec: Any = None,
    reduce_partial: bool = False,
) -> Any:
    """ShardedTensors.

    What is spread already keeps its parts, and its memory, unless `dim` or `spec` is given: a ShardedTensor knows
    neither mesh nor replicas, so along replicated axes each group of ranks that holds a whole tensor has its own. To
    go back, say mesh and placements to `to_dtensor`.

    Args:
        sd: a tensor or a nesting; every rank of the group, and of meshes that tensors live on, calls this.
        dim: along which each tensor is cut into one piece a rank; 0 for plain tensors, if nothing is said.
        process_group: the ranks of what is cut; by default the default group for plain tensors, else the ranks that
            hold the tensor.
        spec: a sharding spec instead of `dim`.
        reduce_partial: take the value of Partial tensors, which are refused otherwise.

    Plain tensors without dims are left as they are.

    Raises:
        ShardingError: a spec that does not fit, `dim` beside a spec, or a rank outside of a tensor's mesh.
        RankMismatchError: ranks do not convert the same, or one is lost.
    """
    refusal = None
    if dim is not None and spec is not None:
        refusal = ShardingError("A spec says itself which dim is cut.", expected="dim= or spec=", got="both")
    cuts: dict[Any, Target] = {}  # one for all tensors that are cut alike
    kept: dict[Any, Target] = {}  # and for all that keep parts that lie alike

    def decide(path: str, x: Tensor, form: Form) -> Target | None:
        if form.holding is None and not form.shape:
            return None
        if form.holding is not None and dim is None and spec is None:
            if isinstance(x, ShardedTensor):
                return None
            alike = form.holding, form.device, form.group
            return kept.get(alike) or kept.setdefault(alike, _as_it_is(form))
        group = process_group or _group_of(form)
        there = group, form.device
        return cuts.get(there) or cuts.setdefault(there, _cut(spec, dim or 0, *there))

    return convert(sd, decide, reduce_partial=reduce_partial, refusal=refusal)


def _cut(spec: Any, dim: int, group: dist.ProcessGroup, device: torch.device) -> Target:
    """As a spec says, or one piece along a dim for each rank of a group."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return InParts(spec or specs.chunks(dim, ranks, device), ranks, group)


def _as_it_is(form: Form) -> Target:
    """The parts that ranks of one replica group hold already, as a spec that lists them."""
    assert form.holding is not None, "a plain tensor has no parts"
    here, ranks = dist.get_rank(), form.holding.ranks
    if form.sharding is not None and (at := form.sharding.mesh.coordinate) is not None:
        mesh = form.sharding.mesh
        fixed = form.sharding.unsplit
        places = zip(mesh.ranks, mesh.coordinates(), strict=True)
        ranks = tuple(sorted(rank for rank, there in places if all(there[a] == at[a] for a in fixed)))
    if here not in ranks:
        raise ShardingError(
            "A rank that holds nothing of a tensor can have no ShardedTensor of its parts.",
            expected=f"one of the ranks {list(ranks)}",
            got=f"rank {here}",
            fix="convert on the ranks of its mesh alone",
        )
    if not form.holding.owners:  # no element anywhere: any cut is right
        return InParts(specs.chunks(0, ranks, form.device), ranks, form.group or circle_of(ranks, form.device).group)
    held = [(rank, box) for box, owners in form.holding.owners.items() for rank in owners if rank in ranks]
    shards = [
        specs.ShardMetadata(list(b.offset), list(b.size), specs.place_alike(rank, form.device))
        for rank, b in sorted(held)
    ]
    group = form.group or circle_of(ranks, form.device).group
    metadata = specs.ShardedTensorMetadata(shards, torch.Size(form.shape))
    return InParts(specs.inferred_spec(metadata), ranks, group)


def _group_of(form: Form) -> dist.ProcessGroup:
    if form.group is not None:
        return form.group
    return default_group() if form.holding is None else circle_of(form.holding.ranks, form.device).group


@ends_graphs("a graph holds no state dict")
def to_torch(sd: Any) -> Any:
    """torch's own DTensors and ShardedTensors in place of ours, around the same memory; everything else is kept.

    Raises:
        ShardingError: a DTensor whose axes nest in an order that torch has no placement for.
    """
    return _replaced(sd, (DTensor, ShardedTensor), lambda x: x.to_torch())


@ends_graphs("a graph holds no state dict")
def from_torch(sd: Any) -> Any:
    """Our DTensors and ShardedTensors in place of torch's, around the same memory; everything else is kept.

    Raises:
        ShardingError: a local tensor that is not the piece that shape and placements say, or a strided split that is no
            nesting of axes (`to_full` and `to_dtensor` read those too).
    """

    def ours(x: Any) -> Tensor:
        return (DTensor if isinstance(x, upstream.DTensor) else ShardedTensor).from_torch(x)

    return _replaced(sd, (upstream.DTensor, sharded_tensors().ShardedTensor), ours)


@below_torch_functions
def _replaced(sd: Any, kinds: tuple[type[Tensor], ...], change: Callable[[Any], Any]) -> Any:
    known: dict[Any, Any] = {}

    def changed(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, kinds):
            return leaf
        key = identity(leaf), leaf.requires_grad
        if key not in known:
            known[key] = change(_detached(leaf))
        return known[key]

    return with_leaves(sd, changed)


def _detached(x: Any) -> Any:
    """Without history, but asking for gradients where `x` does."""
    if isinstance(x, (ShardedTensor, sharded_tensors().ShardedTensor)) or not x.requires_grad:
        return x
    return without_history(x).requires_grad_()
