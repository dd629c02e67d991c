"""What decides about a compiled graph of DTensors besides its code and its inputs, where graphs outlive the process."""

import hashlib
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

from torchshard._torch import mark_cacheable, whole_in_graphs
from torchshard.rules import registry

_Function = TypeVar("_Function", bound=Callable[..., Any])

_this_process = uuid.uuid4().hex
"""For the key of a graph that no other process may have."""

_ROOMS = ("_torch", "comm", "layout", "parallel", "rules", "tensor")


def digest(*decides: object) -> str:
    """Of what decides about a graph: the same in all processes with these sources and these rules of users."""
    return hashlib.blake2b(repr((_sources(), _rules(), *decides)).encode(), digest_size=16).hexdigest()


@cache
def _sources() -> str:
    """Of the files that take layouts to layouts, and say what is communicated."""
    package = Path(__file__).parent.parent
    files = sorted(file for room in _ROOMS for file in (package / room).rglob("*.py"))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


def _rules() -> object:
    """Rules that users have registered; where one is a function, which is not known by its text, no two are alike."""
    added = registry.added()
    told = all(isinstance(rule.how, str) for _, rules in added for rule in rules)
    return added if told else uuid.uuid4()


_nodes: list[str] = []
"""Functions whose calls are single nodes, as AOTAutograd's cache names them."""

_shared = False
"""Whether somebody has asked for these graphs to be kept."""


def one_node(function: _Function) -> _Function:
    """Have a call of a function be one node of a compiled graph: its work on tensors can be traced, its arithmetic not.

    What it depends on beside its arguments is to be in one of them.
    """
    _nodes.append(f"{function.__module__}.{function.__name__}")
    if _shared:
        renew(new=True)
    return whole_in_graphs(function)


def tie(mesh: DeviceMesh) -> str | None:
    """What such a call is given besides its arguments: it keeps a graph that is this process's own from others."""
    return owner(mesh) if is_dynamo_compiling() and isinstance(mesh, DeviceMesh) else None


def owner(mesh: DeviceMesh) -> str | None:
    """The process that alone may have graphs of a mesh; None where all may that have a mesh like it.

    A graph names groups. Those of the axes are made with the mesh, and that of all ranks is there before; others over
    several axes are made when they are first needed, so another process may not have them.
    """
    known = mesh.ndim == 1 or (mesh.ndim == 2 and dist.is_initialized() and mesh.size() == dist.get_world_size())
    return None if known else _this_process


def share() -> list[str]:
    """Have AOTAutograd's cache keep graphs with such calls; names of functions that are new to it."""
    global _shared
    _shared = True
    return renew(new=True)


def renew(new: bool = False) -> list[str]:
    """Graphs that are shared from now on depend on the rules that there are now; `new`: share those not shared yet."""
    return mark_cacheable(dict.fromkeys(_nodes, digest()), new)
