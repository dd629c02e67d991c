"""Operators on DTensors equal eager torch on the full tensors: values, shapes, dtypes, gradients, on real ranks."""

import pytest

from tests.ranks import many, run_ranks
from tests.tensor.proving.cases import GROUPS
from tests.tensor.proving.proof import prove_group


def check(mesh_shape, group, limit, timeout=240.0):
    world = 1
    for parts in mesh_shape:
        world *= parts
    results = run_ranks(world, prove_group, mesh_shape, group, limit, timeout=timeout)
    for done, complaints in results:
        assert not complaints, f"{len(complaints)} complaints, {done} right:\n" + "\n".join(complaints[:5])
        assert done >= len(GROUPS[group])


@pytest.mark.parametrize("group", GROUPS)
def test_on_two_ranks(group):
    check((2,), group, limit=many(20))


@pytest.mark.parametrize("group", GROUPS)
def test_on_a_mesh_of_two_by_two(group):
    check((2, 2), group, limit=many(5))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (2, 3)])
@pytest.mark.parametrize("group", GROUPS)
def test_in_many_placements(group, mesh_shape):
    check(mesh_shape, group, limit=120, timeout=1700.0)
