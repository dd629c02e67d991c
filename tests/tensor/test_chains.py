"""Whatever is done to a DTensor, in whatever order, is what is done to a plain tensor."""

import math

import pytest

from tests.ranks import run_ranks
from tests.tensor.chains import play


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_some_chains(mesh_shape):
    for told in run_ranks(math.prod(mesh_shape), play, mesh_shape, range(20), timeout=200):
        assert not told, "\n\n".join(told)


@pytest.mark.full
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
def test_many_chains(mesh_shape):
    for told in run_ranks(math.prod(mesh_shape), play, mesh_shape, range(100, 500), timeout=1500):
        assert not told, "\n\n".join(told)
