"""Texts that stand for meshes and for what lies on them, in hooks that compiled code runs.

Dynamo checks at each call all that a hook refers to: a text in no time, a mesh for 10 us, and a mesh becomes an input
of the graph as well. A name says all that a graph may depend on, so equal names are as good as equal meshes in a cache
of graphs, too.
"""

import itertools
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from torchshard.errors import ShardingError
from torchshard.tensor.mesh import BoundMesh, bind

_named: dict[str, tuple[BoundMesh, Any]] = {}


def name_of_place(device_mesh: DeviceMesh, placement: Placement) -> str:
    """A name by which `named` finds a mesh of one axis and what that axis does to a tensor."""
    mesh = bind(device_mesh)
    return name_on(mesh, (mesh.device_mesh, placement), repr(placement))


def name_on(mesh: BoundMesh, thing: Any, text: str = "") -> str:
    """A name by which `named` finds something on a mesh; `text` has to say all of it that a graph may depend on."""
    stem = f"{mesh} {mesh.device_mesh.device_type} {mesh.cache_key} {text}"
    entry = mesh, thing
    # More than one, say of meshes that differ in what torch compares and graphs do not ask.
    return next(name for k in itertools.count() if _named.setdefault(name := f"{stem}{k}", entry) == entry)


def named(name: str) -> Any:
    """What has this name.

    Raises:
        ShardingError: it is gone with the process groups of its mesh.
    """
    try:
        return _named[name][1]
    except KeyError:
        raise ShardingError(
            "The mesh of a parallel module is gone: its process groups were destroyed.",
            expected=name,
            got=f"only {[*_named]}",
            fix="make the module anew, and parallelize it over a mesh of groups that live",
        ) from None


def forget(dead: BoundMesh) -> None:
    """Let go of all that lies on a mesh."""
    for name in [name for name, (mesh, _) in _named.items() if mesh is dead]:
        del _named[name]
