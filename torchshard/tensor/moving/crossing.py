"""From one mesh to another: what layout/passages.py plans, carried out by one all-to-all of the ranks of both."""

from functools import partial

from torchshard._torch import root_mesh
from torchshard.errors import RankMismatchError, ShardingError
from torchshard.layout.boxes import Box
from torchshard.layout.copies import Part
from torchshard.layout.layout import Mesh
from torchshard.layout.passages import Passage, passage
from torchshard.tensor.layout import TensorLayout
from torchshard.tensor.mesh import BoundMesh, Bridge
from torchshard.tensor.moving.steps import Action, actions, boxes_of, communicating, part_within, start_copies, taking


def actions_between(source: TensorLayout, target: TensorLayout) -> list[Action]:
    """What this rank does to bring a tensor from the mesh of `source` to that of `target`.

    A rank of neither mesh does nothing. The ranks of both compare what they are about to do, once for each kind.

    Raises:
        ShardingError: the meshes are of different devices, or slices of one mesh along different axes, or of process
            groups in which this process was another rank.
        RankMismatchError: not all of them redistribute the same.
    """
    here, there = source.mesh, target.mesh
    assert isinstance(here, BoundMesh), "a layout that belongs to no DeviceMesh"
    assert isinstance(there, BoundMesh), "a layout that belongs to no DeviceMesh"
    _require_one_device(here, there)
    _require_same_slice(here, there)
    here.require_place()
    there.require_place()
    way = passage(source.sharding, target.sharding, source.shape, source.dtype.itemsize)
    steps: list[Action] = []
    if here.coordinate is not None:
        steps += actions(way.before, here)
    if here.coordinate is not None or there.coordinate is not None:
        steps.append(_copies(way, source, target, here, there))
    if there.coordinate is not None:
        steps += actions(way.after, there)
    return steps


def _require_one_device(here: BoundMesh, there: BoundMesh) -> None:
    one, other = here.device_mesh.device_type, there.device_mesh.device_type
    if one != other:
        raise ShardingError(
            "A tensor cannot be redistributed to a mesh of other devices.",
            expected=f"a mesh of {one}, as the tensor's own",
            got=f"{there} of {other}",
            fix=f"redistribute to a mesh of {one} with the same ranks, then x.to({other!r})",
        )


def _require_same_slice(here: BoundMesh, there: BoundMesh) -> None:
    """Refuse what every rank would mean other ranks by: each slice has as many tensors as there are slices like it."""
    if here.coordinate is None or there.coordinate is None or set(here.ranks) == set(there.ranks):
        return
    if root_mesh(here.device_mesh) == root_mesh(there.device_mesh):
        raise ShardingError(
            "A tensor cannot be redistributed between a mesh and its slice, or slices along different axes.",
            expected="the same ranks, or meshes made of ranks, DeviceMesh(device, ranks), which all ranks have alike",
            got=f"{here} of the ranks {list(here.ranks)} and {there} of the ranks {list(there.ranks)}, as this rank has"
            " them; other ranks have others",
            fix="if all slices hold the same, DTensor.from_local(x.to_local(), mesh, placements, shape=x.shape,"
            " stride=x.stride()) is of the whole mesh, with Replicate() along the axes that the slice has not; if x is"
            " replicated along those, the same call with mesh['name'] is of a slice",
        )


def _copies(way: Passage, source: TensorLayout, target: TensorLayout, here: BoundMesh, there: BoundMesh) -> Action:
    mine = wanted = None
    gives: list[Part] = []
    takes: list[Part] = []
    if here.coordinate is not None:
        mine, gives = way.crossing.source.box(source.shape, here.coordinate), way.crossing.sends(here.coordinate)
    if there.coordinate is not None:
        wanted, takes = way.crossing.target.box(source.shape, there.coordinate), way.crossing.receives(there.coordinate)
    if not way.lacked:
        return taking(part_within(mine, wanted))
    bridge = here.bridge(there)
    try:
        _agree(bridge, source, target)
    except RankMismatchError:
        here.part(there)
        raise
    given, taken = _by_rank(gives, there, bridge), _by_rank(takes, here, bridge)
    return communicating(partial(start_copies, given=given, taken=taken, mine=mine, wanted=wanted, group=bridge.group))


def _by_rank(parts: list[Part], mesh: Mesh, bridge: Bridge) -> list[Box | None]:
    """The box for each rank of the bridge; `parts` names coordinates of `mesh`."""
    places = {rank: place for place, rank in enumerate(bridge.ranks)}
    return boxes_of([(mesh.ranks[mesh.linear(coordinate)], box) for coordinate, box in parts], places)


def _agree(bridge: Bridge, source: TensorLayout, target: TensorLayout) -> None:
    """Compare with the other ranks; a redistribution that all have come to before is not compared again."""
    ends = [f"{layout.sharding} on the ranks {list(layout.mesh.ranks)}" for layout in (source, target)]
    bridge.agreement.restart()
    bridge.agreement.confirm(f"{source.dtype} of shape {tuple(source.shape)}\nfrom {ends[0]}\nto {ends[1]}", 0)
