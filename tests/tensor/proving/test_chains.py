"""Whatever is done to a DTensor or ShardedTensor, in whatever order, is what is done to a plain tensor."""

import math

import pytest

from tests.older import require
from tests.ranks import run_ranks
from tests.tensor.proving import chains, compiled_chains, sharded_chains


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_some_chains(mesh_shape):
    for told in run_ranks(math.prod(mesh_shape), chains.play, mesh_shape, range(20), timeout=200):
        assert not told, "\n\n".join(told)


@pytest.mark.parametrize("world", [2, 3])
def test_some_chains_of_sharded_tensors(world):
    for told in run_ranks(world, sharded_chains.play, range(30), timeout=200):
        assert not told, "\n\n".join(told)


def test_some_compiled_chains():
    require("meshes in graphs")
    for complaints, right in run_ranks(2, compiled_chains.play, (2,), range(10), 5, timeout=200):
        assert not complaints, "\n\n".join(complaints)
        assert right > 6


@pytest.mark.full
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_many_compiled_chains(mesh_shape):
    require("meshes in graphs")
    for complaints, _ in run_ranks(
        math.prod(mesh_shape), compiled_chains.play, mesh_shape, range(100, 300), 7, timeout=1500
    ):
        assert not complaints, "\n\n".join(complaints)


@pytest.mark.full
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
def test_many_chains(mesh_shape):
    for told in run_ranks(math.prod(mesh_shape), chains.play, mesh_shape, range(100, 500), timeout=1500):
        assert not told, "\n\n".join(told)


@pytest.mark.full
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_chains_of_sharded_tensors(world):
    for told in run_ranks(world, sharded_chains.play, range(100, 600), timeout=1500):
        assert not told, "\n\n".join(told)
