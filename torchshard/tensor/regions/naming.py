"""Texts that stand for meshes and for what lies on them, in hooks that compiled code runs.

Dynamo checks at each call all that a hook refers to: a text in no time, a mesh for 10 us, and a mesh becomes an input
of the graph as well. A name says all that a graph may depend on, so equal names are as good as equal meshes in a cache
of graphs, too.
"""

import itertools
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from torchshard._torch import is_traced
from torchshard.errors import ShardingError
from torchshard.tensor.mesh import BoundMesh, bind

_names: dict[tuple[BoundMesh, Any], str] = {}
_named: dict[str, tuple[BoundMesh, Any]] = {}


def name_of_place(device_mesh: DeviceMesh, placement: Placement) -> str:
    """A name by which `named` finds a mesh of one axis and what that axis does to a tensor."""
    mesh = bind(device_mesh)
    return name_on(mesh, (mesh.device_mesh, placement), placement)


def name_on(mesh: BoundMesh, thing: Any, *says: object) -> str:
    """A name by which `named` finds something on a mesh; `says`: all of it that a graph may depend on, as text."""
    name = _names.get((mesh, thing))
    if name is None:
        stem = " ".join(map(str, (mesh, mesh.device_mesh.device_type, mesh.cache_key, *says)))
        # More than one, say of meshes that differ in what torch compares and graphs do not ask.
        name = next(free for k in itertools.count() if (free := f"{stem} {k}") not in _named)
        _names[mesh, thing], _named[name] = name, (mesh, thing)
    return name


def named(name: str, x: Tensor) -> Any:
    """What has this name; a graph that is being made with `x` is for the groups that its mesh has now.

    Raises:
        ShardingError: it is gone with the process groups of its mesh.
    """
    try:
        mesh, thing = _named[name]
    except KeyError:
        raise ShardingError(
            "The mesh of a parallel module is gone: its process groups were destroyed.",
            expected=name,
            got=f"only {[*_named]}",
            fix="make the module anew, and parallelize it over a mesh of groups that live",
        ) from None
    if is_traced(x):
        mesh.bind_graph()
    return thing


def forget(dead: BoundMesh) -> None:
    """Let go of all that lies on a mesh."""
    for entry in [entry for entry in _names if entry[0] is dead]:
        del _named[_names.pop(entry)]
