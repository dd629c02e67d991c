"""torch's DeviceMesh as a layout.Mesh that also knows its process groups."""

import math
import reprlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchshard._torch import bring_home, keeps_one_rank, outside_of_traces, real_object, skip_alone
from torchshard.comm.agreement import Agreement
from torchshard.comm.circle import group_of_those
from torchshard.comm.group import Group
from torchshard.comm.living import destroyed, displaced, living, living_in_graphs
from torchshard.comm.workers import pause_at_exit
from torchshard.errors import ShardingError
from torchshard.layout import layout, placements
from torchshard.layout.layout import Mesh
from torchshard.tensor.layout import TensorLayout, of_played_ranks, require_own_graphs
from torchshard.tensor.regions.caching import owner


class BoundMesh(Mesh):
    """A Mesh with the DeviceMesh that it stands for; made by `bind`."""

    __slots__ = (
        "_agreements",
        "_ascending",
        "_bridges",
        "_by_axes",
        "_groups",
        "_process_groups",
        "_world",
        "decisions",
        "device_mesh",
        "programs",
        "said",
    )
    layout_type = TensorLayout

    def __init__(self, device_mesh: DeviceMesh) -> None:
        with outside_of_traces():  # a region may be the first to see the mesh
            names, ranks = device_mesh.mesh_dim_names, device_mesh.mesh.flatten().tolist()
            talks = device_mesh.get_coordinate() is not None and _can_talk(device_mesh)
            groups = [device_mesh.get_group(axis) for axis in range(device_mesh.ndim)] if talks else []
        super().__init__(tuple(device_mesh.shape), names, device_mesh.get_coordinate(), ranks)
        self.device_mesh = device_mesh
        self._groups: dict[tuple[int, ...], Group] = {}
        self._by_axes: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._process_groups = groups  # those of the axes, before any is used, and those made since
        self._world: Any = dist.group.WORLD and weakref.ref(dist.group.WORLD)
        self._bridges: dict[BoundMesh, Bridge] = {}
        self._ascending: dict[int, bool] = {}
        self.programs: dict[Any, Any] = {}  # see moving/redistribute.py
        self.said: dict[Any, str] = {}  # what ranks say of what from_local has taken for granted; see there
        self.decisions: dict[Any, Any] = {}  # see handlers/parts.py

    def group(self, axes: tuple[int, ...]) -> Group:
        """The ranks that differ from this one on `axes` only, the first axis slowest.

        A group over several axes is made when first asked for, by its members alone; all of them ask at the same point,
        because what they communicate follows from layouts that they share.
        """
        group = self._groups.get(axes)
        if group is None:
            group = self._groups[axes] = self._make_group(axes)
        return group

    def places(self, axes: Sequence[int]) -> list[tuple[int, ...]]:
        """The coordinates that differ from this rank's on `axes` only, the first axis slowest."""
        assert self.coordinate is not None, "a rank outside of the mesh communicates"
        places = [self.coordinate]
        for axis in axes:
            places = [(*p[:axis], k, *p[axis + 1 :]) for p in places for k in range(self.shape[axis])]
        return places

    def line(self, axes: Sequence[int]) -> list[int]:
        """The ranks at these places."""
        return [self.ranks[self.linear(p)] for p in self.places(axes)]

    def ascends(self, axis: int) -> bool:
        """Whether ranks ascend along an axis, everywhere in the mesh: the same answer on all of them."""
        if axis not in self._ascending:
            parts, step = self.shape[axis], math.prod(self.shape[axis + 1 :])
            pairs = enumerate(zip(self.ranks, self.ranks[step:], strict=False))
            self._ascending[axis] = all(a < b for k, (a, b) in pairs if k // step % parts < parts - 1)
        return self._ascending[axis]

    def process_group(self, axes: tuple[int, ...]) -> dist.ProcessGroup:
        """torch's process group of the ranks of `group(axes)`; ShardingError where it is destroyed."""
        group = self.group(axes)
        return self._by_axes[axes] if group.size == 1 else living(group)

    @property
    def everyone(self) -> Group:
        """All ranks of the mesh."""
        return self.group(tuple(range(self.ndim)))

    def _make_group(self, axes: tuple[int, ...]) -> Group:
        pause_at_exit()
        self.require_place()
        ranks = self.line(axes)
        if len(axes) == 1:
            process_group = self._group_along(axes[0], ranks)
        else:
            process_group = self._group_of(sorted(ranks))
            self._process_groups.append(process_group)
        self._by_axes[axes] = process_group
        return _group_in(process_group, ranks, self.ranks[self.linear(self.coordinate or ())])

    def bridge(self, other: "BoundMesh") -> "Bridge":
        """The way to another mesh and back, for a rank of either; all of them ask for it at the same point.

        Its group is made when first asked for, by the ranks of both meshes, of which `require_place` was true.
        """
        bridge = self._bridges.get(other)
        if bridge is None:
            ranks = sorted({*self.ranks, *other.ranks})
            process_group = self._group_of(ranks)
            group = _group_in(process_group, ranks, dist.get_rank())
            agreement = Agreement(process_group, self._device, "redistributions between meshes")
            bridge = self._bridges[other] = other._bridges[self] = Bridge(tuple(ranks), group, agreement)
            for mesh in (self, other):
                mesh._process_groups.append(process_group)
        return bridge

    def displaced(self) -> ShardingError | None:
        """What is wrong where this process had another rank when the mesh was made."""
        return displaced(self.ranks, None if self.coordinate is None else self.ranks[self.linear(self.coordinate)])

    def require_living(self) -> None:
        """Raise ShardingError where graphs would send to groups that have the names of this mesh's by now."""
        world = dist.group.WORLD
        if world is None or (self._world is not None and self._world() is world):
            return
        for group in self._in_graphs():
            living(group)
        self._world = weakref.ref(world)

    def bind_graph(self) -> None:
        """Have a graph that is being made be for the groups that this mesh has now, by whatever ways it comes to be.

        One that comes from a cache is not traced, and what it sends may be in its backward alone.

        Raises:
            UnsupportedOperatorError: other ranks are to run it, too.
            ShardingError: one of the groups has been destroyed.
        """
        require_own_graphs()
        for group in self._in_graphs():
            living_in_graphs(group)

    def _in_graphs(self) -> list[Group]:
        """Groups that graphs may name: those of the axes, that of all ranks, and those that have been made."""
        if self._process_groups:
            for axis in range(self.ndim):
                self.group((axis,))
            if dist.is_initialized() and dist.get_world_size() == self.size:  # all ranks have a group already
                self.group(tuple(range(self.ndim)))
        return [group for group in self._groups.values() if group.size > 1]

    def part(self, other: "BoundMesh") -> None:
        """Let go of the way to another mesh whose ranks have come apart, on all of them: the next is agreed to anew."""
        self._bridges.pop(other, None)
        other._bridges.pop(self, None)

    def require_place(self) -> None:
        """Raise ShardingError where a group made now would not be of the ranks that this mesh was made for."""
        if not dist.is_initialized():
            raise destroyed("none")
        if (problem := self.displaced()) is not None:
            raise problem

    def _group_along(self, axis: int, ranks: list[int]) -> dist.ProcessGroup:
        """The mesh's own process group of these global ranks."""
        try:
            process_group = self.device_mesh.get_group(axis)
            held = dist.get_process_group_ranks(process_group)
        except (LookupError, RuntimeError, ValueError) as error:
            raise destroyed("none") from error
        if sorted(held) != sorted(ranks):
            raise destroyed(f"of the ranks {held}", f"of the ranks {ranks}")
        return process_group

    def _group_of(self, ranks: list[int]) -> dist.ProcessGroup:
        """A process group of these global ranks, ascending, made by themselves; the world's where these are all."""
        world = dist.group.WORLD
        if world is not None and ranks == dist.get_process_group_ranks(world):
            return world
        return group_of_those(ranks, self._device)

    @property
    def _device(self) -> torch.device:
        return torch.device(self.device_mesh.device_type)

    @property
    def cache_key(self) -> Any:
        """Of graphs that communicate on this mesh, where they outlive the process: equal keys, equal groups."""
        names = None
        if self.coordinate is not None:
            names = [self.device_mesh.get_group(axis).group_name for axis in range(self.ndim)]
        return names, self.ranks, self.coordinate, owner(self.device_mesh)

    def alive(self) -> bool:
        """Whether none of its process groups has been destroyed."""
        try:
            for process_group in self._process_groups:
                dist.get_process_group_ranks(process_group)
        except (KeyError, ValueError):
            return False
        return True

    @skip_alone
    def __reduce__(self) -> Any:
        require_own_pickle(self.size, "DTensor")
        return restored, (self.device_mesh,)

    def __deepcopy__(self, memo: Any) -> "BoundMesh":
        return self


def _group_in(process_group: dist.ProcessGroup, ranks: list[int], mine: int) -> Group:
    """All of a process group, in the order of these global ranks, of which this process is `mine`."""
    members = dist.get_process_group_ranks(process_group)
    seat_of = {rank: seat for seat, rank in enumerate(members)}
    seats = tuple([seat_of[rank] for rank in ranks])
    differ = None if seats == tuple(sorted(seats)) else seats
    made = weakref.ref(process_group)
    return Group(process_group.group_name, len(ranks), ranks.index(mine), differ, tuple(members), made)


@dataclass(frozen=True, slots=True)
class Bridge:
    """What the ranks of two meshes need to talk to one another.

    Attributes:
        ranks: global ranks of either mesh, ascending: the order of `group`.
        group: all of them.
        agreement: on what is sent.
    """

    ranks: tuple[int, ...]
    group: Group
    agreement: Agreement


# What a pickled DTensor consists of, beside tensors and itself.
PICKLED = (DeviceMesh, layout._layout, layout._sharding, placements.Shard, placements.Partial, placements.Replicate)

_by_id: dict[int, tuple["weakref.ref[DeviceMesh]", BoundMesh]] = {}
# Found by comparing: a mesh that another process has pickled may bring the hash that it had there.
_by_value: list[tuple[Any, BoundMesh]] = []


def bind(device_mesh: DeviceMesh) -> BoundMesh:
    """The one BoundMesh of a DeviceMesh; equal meshes share it for as long as its process groups live.

    Raises:
        ShardingError: `device_mesh` is something else, or its ranks are played in one process.
    """
    known = _by_id.get(id(device_mesh))
    if known is not None and known[0]() is device_mesh:
        return known[1]
    if not isinstance(device_mesh, DeviceMesh):
        raise ShardingError(
            "A mesh is needed.",
            expected="a torch.distributed.DeviceMesh",
            got=f"{type(device_mesh).__name__}: {reprlib.repr(device_mesh)}",
            fix="init_device_mesh('cpu', (world_size,))",
        )
    if (real := real_object(device_mesh)) is not device_mesh:  # a region may be the first to see the mesh
        bound = bind(real)
        bound.bind_graph()
        return bound
    if any(not isinstance(n, int) for n in device_mesh.get_coordinate() or ()):
        raise of_played_ranks()
    # Meshes that differ in this rank's place, or of which one cannot communicate, are equal for torch.
    key = device_mesh, device_mesh.get_coordinate(), _can_talk(device_mesh)
    found = next((bound for value, bound in _by_value if value == key), None)
    if found is not None and not found.alive():
        _forget(found)
        found = None
    if found is None:
        if not _by_value:
            _first_use()
        found = BoundMesh(device_mesh)
        _by_value.append((key, found))
    place = id(device_mesh)
    _by_id[place] = weakref.ref(device_mesh, lambda _: _by_id.pop(place, None)), found
    return found


def require_own_pickle(ranks: int, what: str) -> None:
    """Check that this rank's part of what lies on so many ranks is not pickled for all of them.

    Raises:
        ShardingError: torch.distributed.checkpoint would keep it of one rank.
    """
    if ranks > 1 and keeps_one_rank():
        raise ShardingError(
            f"A {what} inside of an object would be saved by one rank alone, without the parts of the others.",
            expected="tensors in dicts and lists, of which every rank saves its part",
            got="one in a tuple or another object, or flatten_state_dict=False",
            fix="put it in dicts and lists; or save each rank's own with no_dist=True",
        )


def restored(device_mesh: DeviceMesh) -> BoundMesh:
    """The mesh of a pickled DTensor, in the process that loads it.

    Raises:
        ShardingError: there is no process group, this rank has another place than the one that saved, or the groups
            that go by the mesh's names are of other ranks.
    """
    if not dist.is_initialized():
        raise ShardingError(
            "A DTensor can be loaded only where its ranks can talk.",
            expected="a process group",
            got="none",
            fix="call torch.distributed.init_process_group() before, or save x.full_tensor()",
        )
    place = device_mesh.get_coordinate()
    with outside_of_traces():  # files are also loaded under a FakeTensorMode
        bring_home(device_mesh)
        here = (device_mesh.mesh == dist.get_rank()).nonzero().tolist()
    if here != ([] if place is None else [list(place)]):
        raise ShardingError(
            "A DTensor was saved by another rank: what it holds is the part of that one.",
            expected=f"the file that the rank at {tuple(here[0]) if here else 'no place'} of the mesh has saved",
            got=f"that of the rank at {None if place is None else tuple(place)}",
            fix="load on each rank what that rank has saved, or save x.full_tensor()",
        )
    known = any(mesh == device_mesh and bound.alive() for (mesh, *_), bound in _by_value)
    if not known and place is not None:
        _check_groups(device_mesh)
    return bind(device_mesh)


def _check_groups(device_mesh: DeviceMesh) -> None:
    place = device_mesh.get_coordinate()
    assert place is not None, "a rank outside of the mesh has no groups there"
    for axis in range(device_mesh.ndim):
        line = device_mesh.mesh[tuple([slice(None) if a == axis else k for a, k in enumerate(place)])].tolist()
        try:
            held = dist.get_process_group_ranks(device_mesh.get_group(axis))
        except (KeyError, LookupError, RuntimeError, ValueError):
            held = None
        if held is None or sorted(held) != sorted(line):
            raise ShardingError(
                "The process groups of a saved DTensor's mesh do not exist here.",
                expected=f"a group of the ranks {line} along axis {axis} of the mesh",
                got="none" if held is None else f"a group of the ranks {held}",
                fix="make a mesh like it and a DTensor on it before loading: torchshard.zeros(1, device_mesh=mesh)",
            )


@cache
def _first_use() -> None:
    """Make DTensor known to torch's optimizers."""
    from torchshard._torch import introduce
    from torchshard.tensor.dtensor import DTensor
    from torchshard.tensor.gradients.stepping import attend_steps

    introduce(DTensor)
    attend_steps()


def _can_talk(device_mesh: DeviceMesh) -> bool:
    try:
        device_mesh.get_group(0)
    except (AttributeError, RuntimeError, LookupError, ValueError, AssertionError):
        return False
    return True


def _forget(dead: BoundMesh) -> None:
    """Let go of a mesh whose process groups were destroyed, its names and every plan: they may hold its layouts."""
    from torchshard.tensor.calls import dispatch
    from torchshard.tensor.regions import naming

    _by_value[:] = [(key, mesh) for key, mesh in _by_value if mesh is not dead]
    for place in [place for place, (_, mesh) in _by_id.items() if mesh is dead]:
        del _by_id[place]
    naming.forget(dead)
    dispatch.forget_plans()
