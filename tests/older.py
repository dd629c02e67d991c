"""What torch before 2.13 or 2.15 does not know, and 2.14 by mistake: tests of it are skipped there, and there only."""

import pytest
import torch

UNKNOWN = {
    "2.11": {
        "hash", "name of the backend, device", "key made here", "member of a set", "group.WORLD", "registered",
        "all groups", "ranks of a mesh", "returned mesh", "attributes", "returned placement", "graph breaks",
        "default group", "meshes in graphs", "strided shards", "parameters that are thawed", "inference in a piece",
        "attributes that go in a region", "collectives of a fake group", "stagers that are used again",
        "masked rows", "join without buffers", "gradients of aminmax", "strides of results", "no default group",
        "names in graphs", "other strides", "scales of rows", "unchecked invariants",
        "gradients of nextafter", "subclasses in nested regions", "dtypes of single parameters", "dims of gather",
        "DTensors between stages", "meshes of FSDP among others", "calls with placements",
        "units in graphs", "attention without heads", "sizes as numbers", "products beside collectives",
        "renamed reads", "one_hot in graphs", "stored functions", "graphs for other ranks",
    },
    "2.12": {
        "hash", "group.WORLD", "graph breaks of groups", "kind of a placement", "default group",
        "attributes that go in a region", "collectives of a fake group", "stagers that are used again",
        "masked rows", "join without buffers", "unchecked invariants", "gradients of nextafter",
        "subclasses in nested regions", "dtypes of single parameters", "dims of gather",
        "DTensors between stages", "inference in a piece", "products beside collectives",
        "renamed reads",
    },
    "2.13": {"writes in functions", "renamed reads", "dtypes of single parameters"},
    "2.14": {"text", "dtypes of single parameters"},
}  # fmt: skip


def known(name: str) -> bool:
    """Whether this torch knows something."""
    return name not in UNKNOWN.get(".".join(torch.__version__.split(".")[:2]), ())


def require(name: str) -> None:
    """Skip a test of what this torch does not know."""
    if not known(name):
        pytest.skip(f"torch {torch.__version__} does not know: {name}")
